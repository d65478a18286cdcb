"""How large a latent is after nodes that resize it, before its graph runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from published import FLUX, RTX4090
from released_forms import File, checkpoint_of
from without_comfy import on_stand_ins

from backend.models import FAMILIES
from backend.planner.choose import Question, choose
from backend.planner.machine import OVERHEAD, Machine
from backend.planner.weight_swaps import WeightSwaps
from backend.rank_plan.shape_of import shape_of

WORKFLOWS = Path(__file__).parents[2] / "workflows" / "api"
#: Latents of images: 8 pixels a value, 16 a token.
IMAGES = replace(FLUX, family="flux", pixels=(1, 8, 8), patch=(1, 2, 2))
LTX = replace(FLUX, family="ltx2", pixels=FAMILIES["ltx2"].latent.pixels({}), patch=(1, 1, 1))


@pytest.fixture(scope="module")
def graph():
    """The module nodes/host/graph_requests.py."""
    with on_stand_ins("host.graph_requests") as module:
        yield module


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def after(*nodes: dict, **others: dict) -> dict:
    """The graph of an image of 1024 x 512 with these nodes, each linked to the one before it by its input
    that is None, between its latent and a second sampler."""
    graph = {
        "1": node("LoadParallelDiT", model_name="a"),
        "0": node("EmptySD3LatentImage", width=1024, height=512, batch_size=1),
        **others,
    }
    last = "0"
    for index, each in enumerate(nodes):
        key = f"between {index}"
        inputs = {name: [last, 0] if value is None else value for name, value in each["inputs"].items()}
        graph[key] = {**each, "inputs": inputs}
        last = key
    graph["sampler"] = node("ParallelSampler", dit=["1", 0], latent_image=[last, 0])
    return graph


DECODE, ENCODE = node("VAEDecode", samples=None), node("VAEEncode", pixels=None)


def pixels(*nodes: dict) -> tuple[dict, ...]:
    return (DECODE, *nodes, ENCODE)


def resized(kind: str, **inputs) -> dict:
    further = {f"resize_type.{name}": value for name, value in inputs.items()}
    return node("ResizeImageMaskNode", input=None, resize_type=kind, **further)


def scaled_by(factor) -> dict:
    return node("LatentUpscaleBy", samples=None, scale_by=factor)


def upscaled(width, height) -> dict:
    return node("LatentUpscale", samples=None, width=width, height=height)


def sides(width: int, height: int) -> dict:
    return node("ImageScale", image=None, width=width, height=height)


ESRGAN = node("ImageUpscaleWithModel", image=None, upscale_model=["model", 0])
HALF = node("ImageScaleBy", image=None, scale_by=0.5)


@pytest.mark.parametrize(
    "nodes, tokens",
    [
        ((), 64 * 32),
        ((scaled_by(1.5),), 96 * 48),
        ((scaled_by(["factor", 0]),), 128 * 64),
        ((scaled_by(["run", 0]),), 64 * 32),
        ((scaled_by(1.5), scaled_by(2.0)), 192 * 96),
        ((upscaled(2048, 2048),), 128 * 128),
        ((upscaled(2048, 0),), 128 * 64),
        ((upscaled(0, 0),), 64 * 32),
        (pixels(sides(0, 1024)), 128 * 64),
        (pixels(sides(2048, 512)), 128 * 32),
        (pixels(node("ImageScaleBy", image=None, scale_by=2.0)), 128 * 64),
        (pixels(node("ImageScaleToTotalPixels", image=None, megapixels=2.0)), 128 * 64),
        (pixels(node("FluxKontextImageScale", image=None)), 91 * 45),
        (pixels(node("ImageScaleToMaxDimension", image=None, largest_size=2048)), 128 * 64),
        (pixels(node("ResizeImagesByLongerEdge", images=None, longer_edge=512)), 32 * 16),
        (pixels(node("ResizeImagesByShorterEdge", images=None, shorter_edge=1024)), 128 * 64),
        (pixels(node("ResizeAndPadImage", image=None, target_width=2048, target_height=512)), 128 * 32),
        (
            pixels(node("ResizeAndPadImage", image=None, target_width=2048, target_height=["run", 0])),
            128 * 32,
        ),
        (pixels(resized("scale by multiplier", multiplier=2.0)), 128 * 64),
        (pixels(resized("scale dimensions", width=2048, height=512)), 128 * 32),
        (pixels(resized("scale dimensions", width=0, height=1024)), 128 * 64),
        (pixels(resized("scale width", width=2048)), 128 * 64),
        (pixels(resized("scale height", height=1024)), 128 * 64),
        (pixels(resized("scale longer dimension", longer_size=2048)), 128 * 64),
        (pixels(resized("scale shorter dimension", shorter_size=1024)), 128 * 64),
        (pixels(resized("scale total pixels", megapixels=2.0)), 128 * 64),
        (pixels(ESRGAN), 256 * 128),
        (pixels(ESRGAN, HALF), 128 * 64),
        ((scaled_by(2.0), node("KSampler", latent_image=None, steps=4)), 128 * 64),
    ],
)
def test_nodes_that_resize_count(graph, nodes, tokens):
    """The second pass of a hires fix counted as many tokens as the first, and got its plan."""
    others = {
        "factor": node("PrimitiveFloat", value=2.0),
        "run": node("Math"),
        "model": node("UpscaleModelLoader", model_name="4x_foolhardy_Remacri.pth"),
    }
    request = graph.request_of_graph(after(*nodes, **others), "1", IMAGES)
    assert request.image_tokens == tokens


@pytest.mark.parametrize(
    "name, factor",
    [
        ("4x-UltraSharp.pth", 4),
        ("RealESRGAN_x4plus.safetensors", 4),
        ("OmniSR_X2_DIV2K.safetensors", 2),
        ("1x-ITF-SkinDiffDetail.pth", 1),
        ("ESRGAN_x1.5-1.0.pth", 1.5),
        ("trained_512x512.pth", 1),
        ("encoder.x264.pth", 1),
        ("other.pth", 1),
    ],
)
def test_the_name_of_an_upscaling_model_has_its_factor(graph, name, factor):
    others = {"model": node("UpscaleModelLoader", model_name=name)}
    request = graph.request_of_graph(after(*pixels(ESRGAN), **others), "1", IMAGES)
    assert request.image_tokens == 64 * 32 * factor**2


@pytest.mark.parametrize(
    "nodes, tokens",
    [
        ((), 64 * 32),
        ((upscaled(1024, 1024),), 128 * 128),
        ((upscaled(1024, 0),), 128 * 64),
        ((upscaled(0, 1024),), 256 * 128),
        ((upscaled(0, 0),), 64 * 32),
        ((upscaled(8, 24),), 8 * 8),
        ((upscaled(1024, ["run", 0]),), 128 * 32),
        ((upscaled(["size", 0], ["size", 1]),), 128 * 64),
        ((scaled_by(0.01),), 1),
        ((scaled_by(0.01), upscaled(0, 512)), 64 * 64),
        ((*pixels(sides(1024, 8)), upscaled(512, 0)), 64 * 8),
        ((scaled_by(0.01), *pixels(sides(512, 0))), 32 * 32),
    ],
)
def test_a_latent_of_16_pixels_a_value_is_upscaled(graph, nodes, tokens):
    """LatentUpscale makes a value of 8 of its pixels for any model, so 4 times the tokens; and no latent has
    a side of 0."""
    prompt = after(*nodes, run=node("Length"), size=node("GetImageSize", image=["0", 0]))
    shape = replace(IMAGES, pixels=(1, 16, 16), patch=(1, 1, 1))
    assert graph.request_of_graph(prompt, "1", shape).image_tokens == tokens


def test_the_usual_size_of_a_model_is_scaled_too(graph):
    prompt = after(scaled_by(1.5))
    prompt["0"] = node("LoadImage", image="a.png")
    assert graph.request_of_graph(prompt, "1", IMAGES).image_tokens == 96 * 96


@pytest.mark.parametrize(
    "nodes, batch",
    [
        ((node("RepeatLatentBatch", samples=None, amount=4),), 4),
        ((node("LatentBatch", samples1=None, samples2=["two", 0]),), 3),
        ((node("LatentBatch", samples1=None, samples2=["two", 0]),) * 2, 5),
        ((node("BatchLatentsNode", **{"latents.latent0": None, "latents.latent1": ["two", 0]}),), 3),
        ((node("LatentBatch", samples1=["two", 0], samples2=None),), 3),
        ((node("LatentFromBatch", samples=["two", 0], batch_index=0, length=1),), 1),
        ((node("LatentFromBatch", samples=["two", 0], batch_index=0, length=9),), 2),
    ],
)
def test_the_samples_of_a_batch_are_counted(graph, nodes, batch):
    """Those that a node adds counted as none."""
    two = node("EmptySD3LatentImage", width=1024, height=512, batch_size=2)
    request = graph.request_of_graph(after(*nodes, two=two), "1", IMAGES)
    assert (request.batch, request.image_tokens) == (batch, 64 * 32)


def test_the_length_of_a_video_is_not_how_many_samples_are_picked(graph):
    prompt = after(node("LatentFromBatch", samples=None, batch_index=0, length=1))
    prompt["0"] = node("EmptyLTXVLatentVideo", width=640, height=352, length=121, batch_size=1)
    assert graph.request_of_graph(prompt, "1", LTX).image_tokens == 16 * 20 * 11


@pytest.mark.parametrize("kinds", [("LatentBatch", "LatentBatch"), ("LatentUpscaleBy", "LatentBatch")])
def test_a_cycle_ends(graph, kinds):
    prompt = after()
    prompt["a"] = node(kinds[0], samples1=["b", 0], samples2=["b", 0])
    prompt["b"] = node(kinds[1], samples1=["a", 0], samples2=["a", 0], width=["size", 0])
    prompt["size"] = node("GetImageSize", image=["a", 0])
    prompt["sampler"]["inputs"]["latent_image"] = ["a", 0]
    assert graph.request_of_graph(prompt, "1", IMAGES).image_tokens == 64 * 64


def test_the_size_of_an_image_is_handed_on(graph):
    """As LTX-2's stock template makes the first pass: half of an empty image."""
    prompt = after()
    prompt["blank"] = node("EmptyImage", width=1280, height=704, batch_size=1)
    prompt["half"] = node("ImageScaleBy", image=["blank", 0], scale_by=0.5)
    prompt["size"] = node("GetImageSize", image=["half", 0])
    links = {"width": ["size", 0], "height": ["size", 1]}
    prompt["0"] = node("EmptyLTXVLatentVideo", **links, length=121, batch_size=1)
    assert graph.request_of_graph(prompt, "1", LTX).image_tokens == 16 * 20 * 11


def test_the_side_that_a_switch_takes_has_the_size(graph):
    prompt = after(node("ComfySwitchNode", on_false=["small", 0], on_true=None, switch=True))
    prompt["small"] = node("EmptySD3LatentImage", width=256, height=256)
    assert graph.request_of_graph(prompt, "1", IMAGES).image_tokens == 64 * 32


def test_layers_are_latents_of_one_image(graph):
    prompt = after()
    prompt["0"] = node("EmptyQwenImageLayeredLatentImage", width=640, height=640, layers=3, batch_size=1)
    assert graph.request_of_graph(prompt, "1", IMAGES).image_tokens == 4 * 40 * 40


def expression(text: str, **values) -> dict:
    return node("ComfyMathExpression", expression=text, **{f"values.{n}": v for n, v in values.items()})


@pytest.mark.parametrize(
    "text, steps",
    [
        ("a/2", 10),
        ("a * b + 1", 61),
        ("(a // 8) * 8", 16),
        ("max(((a + 15) // 16) * 16, 256)", 256),
        ("a & -8", 16),
        ("a & ~1", 20),
        ("floor(a/3)*3", 18),
        ("max(5, round(a * b)) + (5 - (max(5, round(a * b)) % 17)) % 17", 73),
        ("a / 0", None),
        ("a * 1e999", None),
        ("a +", None),
        ("a ** 2", None),
        ("sqrt(a)", None),
        ("round(a / 3, 1) * 10", 67),
        ("round(1, -1000000000)", None),
        ("round(a / 3, 1000000000)", None),
        ("c", None),
        ("word", None),
        ("run", None),
        ("itself", None),
        ("a.real", None),
        ("__import__('os').getpid()", None),
        ("a" + "+a" * 200, None),
    ],
)
def test_what_an_expression_computes_is_followed(graph, text, steps):
    """Half of the width, and seconds times frames, as LTX-2.3's template has them."""
    unknown = {"word": "x", "run": ["run", 0], "itself": ["steps", 1]}
    values = {"a": ["twenty", 0], "b": 3} | {name: link for name, link in unknown.items() if name == text}
    prompt = after(
        twenty=node("PrimitiveInt", value=20), run=node("Length"), steps=expression(text, **values)
    )
    prompt["sampler"]["inputs"]["steps"] = ["steps", 1]
    assert graph.request_of_graph(prompt, "1", IMAGES).steps == (steps or 20)


@pytest.mark.parametrize(
    "inputs, tokens",
    [
        (("1:1 (Square)", 1.0, 8), 64 * 64),
        (("16:9 (Widescreen)", 1.0, 8), 86 * 48),
        (("9:16 (Portrait Widescreen)", 2.0, 64), 68 * 120),
        (("21:9 (Ultrawide)", ["megapixels", 0], 32), 138 * 60),
        (("wide", 1.0, 8), 64 * 64),
        (("1:1 (Square)", ["run", 0], 8), 64 * 64),
        (("1:1 (Square)", 2.0, 0), 64 * 64),
    ],
)
def test_the_sides_that_a_ratio_has_are_followed(graph, inputs, tokens):
    """Resolution Selector, which many of ComfyUI's templates have, counted as 1024 x 1024."""
    named = dict(zip(("aspect_ratio", "megapixels", "multiple"), inputs))
    prompt = after(megapixels=node("PrimitiveFloat", value=2.0), run=node("Length"))
    prompt["ratio"] = node("ResolutionSelector", **named)
    prompt["0"] = node("EmptySD3LatentImage", width=["ratio", 0], height=["ratio", 1], batch_size=1)
    assert graph.request_of_graph(prompt, "1", IMAGES).image_tokens == tokens


#: Each has two links to the one before it, so paths through so many of them are 10**18.
CHAINED = 60


def test_a_chain_of_sums_is_computed_once(graph):
    """And one of switches: every link was followed anew, and ComfyUI stood still."""
    first = {"sum0": node("PrimitiveFloat", value=20 / 2**CHAINED), "switch0": node("LoadParallelDiT")}
    prompt = after(**first, run=node("Length"))
    for index in range(1, CHAINED + 1):
        before = [f"sum{index - 1}", 0]
        prompt[f"sum{index}"] = expression("a + b", a=before, b=before)
        links = {"on_false": [f"switch{index - 1}", 0], "on_true": [f"switch{index - 1}", 0]}
        prompt[f"switch{index}"] = node("ComfySwitchNode", switch=["run", 0], **links)
    prompt["sampler"]["inputs"] |= {"steps": [f"sum{CHAINED}", 1], "dit": [f"switch{CHAINED}", 0]}
    assert graph.request_of_graph(prompt, "switch0", IMAGES).steps == 20


@pytest.mark.parametrize("length, steps", [(CHAINED, 7), (1000, 20)])
def test_a_longer_chain_takes_a_run(graph, length, steps):
    """Rather than all of Python's stack."""
    prompt = after(steps0=node("PrimitiveInt", value=7))
    for index in range(length):
        prompt[f"steps{index + 1}"] = expression("a", a=[f"steps{index}", 1])
    prompt["sampler"]["inputs"]["steps"] = [f"steps{length}", 1]
    assert graph.request_of_graph(prompt, "1", IMAGES).steps == steps


@pytest.mark.parametrize(
    "kind, inputs, batch",
    [
        ("LatentBatch", {"samples1": ("latent", 0), "samples2": ("latent", 0)}, 2**CHAINED),
        ("ImageScale", {"image": ("latent", 0), "width": ("size", 0), "height": ("size", 1)}, 1),
    ],
)
def test_a_chain_of_latents_is_sized_once(graph, kind, inputs, batch):
    prompt = after()
    prompt["latent0"] = node("EmptySD3LatentImage", width=1024, height=512)
    for index in range(CHAINED):
        links = {name: [f"{before}{index}", output] for name, (before, output) in inputs.items()}
        prompt[f"size{index}"] = node("GetImageSize", image=[f"latent{index}", 0])
        prompt[f"latent{index + 1}"] = node(kind, **links)
    prompt["sampler"]["inputs"]["latent_image"] = [f"latent{CHAINED}", 0]
    request = graph.request_of_graph(prompt, "1", IMAGES)
    assert (request.batch, request.image_tokens) == (batch, 64 * 32)


def workflow(name: str) -> dict:
    return json.loads((WORKFLOWS / f"{name}.json").read_text())


@pytest.mark.parametrize(
    "model, tokens",
    [
        ("ltx-2.3-spatial-upscaler-x2-1.1.safetensors", 16 * 40 * 22),
        ("ltx-2.3-spatial-upscaler-x1.5-1.0.safetensors", 16 * 30 * 16),
        ("ltx-2-temporal-upscaler-x2-1.0.safetensors", 31 * 20 * 11),
        ("renamed.safetensors", 16 * 40 * 22),
    ],
)
def test_the_second_pass_of_ltx_is_larger(graph, model, tokens):
    """The graph of ComfyUI's template: 8 steps of half the sides, then 3 of all."""
    prompt = workflow("ltx25_t2v")
    prompt["10"]["inputs"] |= {"width": 640, "height": 352}
    prompt |= {
        "30": node("LTXVLatentUpsampler", samples=["16", 0], upscale_model=["31", 0], vae=["4", 0]),
        "31": node("LatentUpscaleModelLoader", model_name=model),
        "32": node("LTXVConcatAVLatent", video_latent=["30", 0], audio_latent=["16", 1]),
        "33": node("ManualSigmas", sigmas="0.85, 0.7250, 0.4219, 0.0"),
    }
    links = {"latent_image": ["32", 0], "sigmas": ["33", 0]}
    prompt["34"] = node("ParallelSamplerCustom", **{**prompt["15"]["inputs"], **links})
    request = graph.request_of_graph(prompt, "6", LTX)
    (second,) = request.then
    assert (request.image_tokens, request.steps) == (3520, 8)
    assert (second.image_tokens, second.steps) == (tokens, 3)


def test_both_passes_of_the_bundled_workflow_are_known(graph):
    prompt = workflow("ltx23_two_pass_t2v")
    request = graph.request_of_graph(prompt, "6", LTX)
    found = [(each.image_tokens, each.steps, each.prompts) for each in (request, *request.then)]
    assert found == [(3520, 8, 1), (14080, 3, 1)]


def test_the_second_pass_of_an_image_is_larger(graph):
    prompt = workflow("z_image_int8_txt2img")
    prompt["30"] = node("LatentUpscaleBy", samples=["9", 0], upscale_method="bislerp", scale_by=1.5)
    prompt["31"] = node("ParallelSampler", **{**prompt["9"]["inputs"], "latent_image": ["30", 0]})
    request = graph.request_of_graph(prompt, "5", IMAGES)
    assert (request.image_tokens, request.then[0].image_tokens) == (4096, 9216)


def test_both_passes_of_an_image_get_one_plan(graph):
    """Flux in fp8, 8 steps and 4 of twice the sides, on two GPUs of 16 GB over PCIe: counted as large as the
    first, the second got PipeFusion's stages."""
    file = File("Flux", "", "var__flux1-dev-fp8-e4m3fn__Kijai_")
    shape = shape_of(checkpoint_of(file), torch.bfloat16)
    memory = (16 * 2**30 - 600_000_000,) * 2
    machine = replace(RTX4090, launch=Machine.launch, overhead=OVERHEAD, memory=memory)
    fast = {"cfg": 1.0, "sampler_name": "euler"}
    first = node("ParallelSampler", dit=["1", 0], latent_image=None, steps=8, **fast)
    plans = []
    for between in ((), (scaled_by(2.0),)):
        prompt = after(first, *between)
        prompt["0"]["inputs"]["height"] = 1024
        prompt["sampler"]["inputs"] |= {"steps": 4, **fast}
        request = graph.request_of_graph(prompt, "1", shape)
        assert (request.steps, [then.steps for then in request.then]) == (8, [4])
        plans.append(choose(Question(shape, request, machine, 2, swaps=WeightSwaps(48 * 10**9))).plan)
    same, larger = plans
    assert same.pipefusion_degree == 2 and larger.ring_degree == 2
