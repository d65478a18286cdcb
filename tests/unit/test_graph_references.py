"""Reference images of an edit, counted before its graph runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from published import FLUX
from without_comfy import on_stand_ins

WORKFLOWS = Path(__file__).parents[2] / "workflows" / "api"
#: Latents of images: 8 pixels a value, 16 a token.
IMAGES = replace(FLUX, family="flux", pixels=(1, 8, 8), patch=(1, 2, 2))
#: A latent of 1 megapixel.
ONE = 64 * 64


@pytest.fixture(scope="module")
def graph():
    """The module nodes/host/graph_requests.py."""
    with on_stand_ins("host.graph_requests") as module:
        yield module


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def edit(**nodes: dict) -> dict:
    """A graph that edits an image under the prompt "positive"; the latent has 1024 x 512."""
    return {
        "1": node("LoadParallelDiT", model_name="a"),
        "latent": node("EmptySD3LatentImage", width=1024, height=512, batch_size=1),
        "image": node("LoadImage", image="a.png"),
        "encoded": node("VAEEncode", pixels=["image", 0], vae=["vae", 0]),
        "vae": node("VAELoader", vae_name="a"),
        "text": node("CLIPTextEncode", text="a"),
        "sampler": node(
            "ParallelSampler", dit=["1", 0], positive=["positive", 0], latent_image=["latent", 0]
        ),
        **nodes,
    }


def reference(before: str, latent: str = "encoded") -> dict:
    return node("ReferenceLatent", conditioning=[before, 0], latent=[latent, 0])


def qwen(kind: str = "TextEncodeQwenImageEditPlus", **inputs) -> dict:
    return node(kind, prompt="a", clip=["clip", 0], vae=["vae", 0], **inputs)


SCALED = {
    "scaled": node("ImageScaleToTotalPixels", image=["image", 0], megapixels=2.0),
    "encoded": node("VAEEncode", pixels=["scaled", 0], vae=["vae", 0]),
}
LINK = ["image", 0]


@pytest.mark.parametrize(
    "nodes, further",
    [
        ({"positive": node("CLIPTextEncode", text="a")}, 0),
        ({"positive": reference("text")}, 64 * 32),
        ({"positive": reference("first"), "first": reference("text")}, 2 * 64 * 32),
        ({"positive": node("FluxGuidance", conditioning=["first", 0]), "first": reference("text")}, 64 * 32),
        ({"positive": reference("text"), **SCALED}, 128 * 64),
        ({"positive": node("ReferenceLatent", conditioning=["text", 0])}, 0),
        ({"positive": qwen("TextEncodeQwenImageEdit", image=LINK)}, 91 * 45),
        ({"positive": qwen(image1=LINK, image2=LINK)}, 2 * 91 * 45),
        ({"positive": qwen(image1=LINK, image3=["square", 0])}, 91 * 45 + ONE),
        ({"positive": qwen()}, 0),
        ({"positive": qwen(image1=LINK) | {"class_type": "CLIPTextEncode"}}, 0),
        ({"positive": node("TextEncodeQwenImageEditPlus", prompt="a", image1=LINK)}, 0),
        ({"positive": qwen("TextEncodeQwenImage21", **{"images.image_1": LINK})}, 64 * 32),
    ],
)
def test_references_of_a_prompt_are_counted(graph, nodes, further):
    """An edit of one image was planned with half of its tokens."""
    square = node("EmptyImage", width=512, height=512)
    request = graph.request_of_graph(edit(square=square, **nodes), "1", IMAGES)
    assert (request.image_tokens, request.text_tokens) == (64 * 32 + further, graph.TEXT_TOKENS)
    assert request.latent_tokens == 64 * 32


def test_references_that_stay_with_the_text_are_among_its_tokens(graph):
    prompt = edit(positive=qwen("TextEncodeQwenImage21", **{"images.image_1": LINK}))
    request = graph.request_of_graph(prompt, "1", replace(IMAGES, static_text=True))
    assert (request.image_tokens, request.text_tokens) == (64 * 32, graph.TEXT_TOKENS + 64 * 32)
    assert request.latent_tokens == 64 * 32


def test_references_before_a_guider_are_counted(graph):
    prompt = edit(positive=reference("text"))
    prompt["sampler"] = node("ParallelModel", dit=["1", 0])
    prompt["guider"] = node("CFGGuider", model=["sampler", 0], positive=["positive", 0], cfg=1.0)
    prompt["run"] = node("SamplerCustomAdvanced", guider=["guider", 0], latent_image=["latent", 0])
    request = graph.request_of_graph(prompt, "1", IMAGES)
    assert request.drained and request.image_tokens == 2 * 64 * 32


@pytest.mark.parametrize(
    "name, loader, shape, tokens",
    [
        ("flux2_edit", "7", replace(IMAGES, pixels=(1, 16, 16), patch=(1, 1, 1)), 2 * ONE),
        ("flux_kontext_edit", "7", IMAGES, 2 * ONE),
        ("qwen_image_edit_2511_lightning", "7", IMAGES, 2 * ONE),
        ("qwen_image_edit", "7", IMAGES, 78 * 78 + ONE),  # 1.5 megapixels
    ],
)
def test_edits_of_the_bundled_workflows_have_their_references(graph, name, loader, shape, tokens):
    prompt = json.loads((WORKFLOWS / f"{name}.json").read_text())
    assert prompt[loader]["class_type"] == "LoadParallelDiT"
    assert graph.request_of_graph(prompt, loader, shape).image_tokens == tokens
