"""How large a latent is after nodes that resize it, before its graph runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from latent_graphs import IMAGES, after, node
from published import FLUX, RTX4090
from released_forms import File, checkpoint_of
from without_comfy import on_stand_ins

from backend.models import FAMILIES
from backend.planner.choose import Question, choose
from backend.planner.machine import OVERHEAD, Machine
from backend.planner.weight_swaps import WeightSwaps
from backend.rank_plan.shape_of import shape_of

WORKFLOWS = Path(__file__).parents[2] / "workflows" / "api"
LTX = replace(FLUX, family="ltx2", pixels=FAMILIES["ltx2"].latent.pixels({}), patch=(1, 1, 1))


@pytest.fixture(scope="module")
def graph():
    """The module nodes/host/graph_requests.py."""
    with on_stand_ins("host.graph_requests") as module:
        yield module


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
