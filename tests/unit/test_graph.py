"""What a queued graph says before it runs, as far as constants tell it."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from published import FLUX
from without_comfy import on_stand_ins

from backend.models import FAMILIES


@pytest.fixture
def graph():
    """The module nodes/host/graph.py."""
    with on_stand_ins("host.graph") as module:
        yield module


def latent_of(family: str, **config):
    """The planner's model with the latents of a family."""
    latent = FAMILIES[family].latent
    patch = {"patch": config.pop("patch")} if "patch" in config else {}
    return replace(FLUX, family=family, pixels=latent.pixels(config), **patch)


def queued(size: dict) -> dict:
    """A loader, what makes a latent of this size, and a sampler."""
    return {
        "1": {"class_type": "LoadParallelDiT", "inputs": {"model_name": "a"}},
        "2": {"class_type": "EmptyLatent", "inputs": size},
        "3": {"class_type": "ParallelSampler", "inputs": {"dit": ["1", 0], "latent_image": ["2", 0]}},
    }


@pytest.mark.parametrize(
    "family, config, size, tokens",
    [
        ("flux", {}, (1024, 1024), 64 * 64),
        ("flux2", {"patch": (1, 1, 1)}, (1024, 1024), 64 * 64),
        ("ideogram4", {"patch": (1, 1, 1)}, (1024, 1024), 64 * 64),
        ("qwen-image-2.1", {"patch": (1, 1, 1)}, (1024, 1024), 64 * 64),
        ("sana", {"patch": (1, 1, 1)}, (1024, 1024), 32 * 32),
        ("wan", {"out_channels": 16}, (832, 480, 81), 21 * 30 * 52),
        ("wan", {"out_channels": 48}, (1280, 704, 121), 31 * 22 * 40),
        ("minimax-h3", {}, (1024, 576, 97), 25 * 18 * 32),
        ("minimax-h3-curves", {}, (1024, 576, 97), 25 * 18 * 32),
        ("hunyuan-video-1.5", {"patch": (1, 1, 1)}, (1280, 720, 121), 31 * 45 * 80),
        ("ltx2", {"patch": (1, 1, 1)}, (1280, 704, 121), 16 * 22 * 40),
    ],
)
def test_tokens_are_counted_by_the_pixels_of_the_familys_latents(graph, family, config, size, tokens):
    """Twice the pixels a side are a quarter of the tokens: counted by 8, models that fit were refused."""
    named = dict(zip(("width", "height", "length"), size))
    request = graph.request_of_graph(queued(named), "1", latent_of(family, **config))
    assert request.image_tokens == tokens


WAN_LATENT = {"width": 832, "height": 480, "length": 41}
WAN_TOKENS = 11 * 30 * 52


def between(*nodes: dict) -> dict:
    """The graph of a video with these nodes between latent and sampler, each an input's name -> a link."""
    graph = queued(WAN_LATENT)
    links = {"latent": ["2", 0]}
    for index, inputs in enumerate(nodes):
        key = f"between {index}"
        graph[key] = {"class_type": "Between", "inputs": {**inputs, next(iter(inputs)): links["latent"]}}
        links["latent"] = [key, 0]
    graph["3"]["inputs"]["latent_image"] = links["latent"]
    return graph


@pytest.mark.parametrize(
    "nodes",
    [
        [{"video_latent": None, "audio_latent": ["4", 0]}],
        [{"samples": None, "mask": ["5", 0]}],
        [{"latent": None, "image": ["5", 0]}, {"video_latent": None, "audio_latent": ["4", 0]}],
        [{"latent_image": None, "positive": ["5", 0], "steps": 4}],
        [{"samples": None}, {"pixels": None}],
    ],
    ids=["video and audio", "mask", "two nodes", "another sampler", "decoded and encoded"],
)
def test_the_size_of_a_latent_is_found_behind_other_nodes(graph, nodes):
    """A video was taken for one image, and its model loaded under the wrong plan."""
    prompt = between(*nodes)
    prompt["4"] = {"class_type": "EmptyAudio", "inputs": {"length": 7}}
    prompt["5"] = {"class_type": "LoadImage", "inputs": {"image": "a.png"}}
    request = graph.request_of_graph(prompt, "1", latent_of("wan", out_channels=16))
    assert request.image_tokens == WAN_TOKENS


def test_an_upscaled_latent_has_the_nearest_size_and_the_first_length(graph):
    prompt = between({"samples": None, "width": 1664, "height": 960})
    request = graph.request_of_graph(prompt, "1", latent_of("wan", out_channels=16))
    assert request.image_tokens == 4 * WAN_TOKENS


@pytest.mark.parametrize("family, tokens", [("wan", 21 * 30 * 52), ("flux", 64 * 64)])
@pytest.mark.parametrize("size", [{}, {"width": ["9", 0], "height": ["9", 1]}], ids=["none", "linked"])
def test_an_unknown_size_is_a_usual_one_of_the_model(graph, family, tokens, size):
    prompt = queued(size)
    prompt["9"] = {"class_type": "GetImageSize", "inputs": {}}
    assert graph.request_of_graph(prompt, "1", latent_of(family, out_channels=16)).image_tokens == tokens


def test_parallel_model_has_the_latent_of_the_sampler_of_its_model(graph):
    prompt = queued(WAN_LATENT)
    prompt["3"] = {"class_type": "ParallelModel", "inputs": {"dit": ["1", 0]}}
    prompt["4"] = {"class_type": "EmptyLatent", "inputs": {"width": 64, "height": 64, "length": 1}}
    prompt["5"] = {"class_type": "KSampler", "inputs": {"model": ["8", 0], "latent_image": ["4", 0]}}
    prompt["6"] = {"class_type": "ModelSamplingSD3", "inputs": {"model": ["3", 0]}}
    prompt["7"] = {"class_type": "KSampler", "inputs": {"model": ["6", 0], "latent_image": ["2", 0]}}
    request = graph.request_of_graph(prompt, "1", latent_of("wan", out_channels=16))
    assert request.image_tokens == WAN_TOKENS and request.drained


def test_steps_of_a_scheduler_are_found_behind_other_nodes(graph):
    prompt = queued({})
    prompt["3"]["inputs"]["sigmas"] = ["4", 0]
    prompt["4"] = {"class_type": "SplitSigmas", "inputs": {"sigmas": ["5", 0], "step": 3}}
    prompt["5"] = {"class_type": "BasicScheduler", "inputs": {"steps": 12}}
    assert graph.request_of_graph(prompt, "1", latent_of("flux")).steps == 12


def test_a_cycle_of_latents_ends(graph):
    prompt = between({"latent": None})
    prompt["2"]["inputs"] = {"samples": ["between 0", 0]}
    assert graph.request_of_graph(prompt, "1", latent_of("flux")).image_tokens == 64 * 64


@pytest.fixture
def executed(graph):
    """queued.executed, with one class of output nodes."""
    classes = {"SaveImage": SimpleNamespace(OUTPUT_NODE=True), "VAEDecode": SimpleNamespace()}
    sys.modules["nodes"].__dict__["NODE_CLASS_MAPPINGS"] = classes
    return sys.modules[f"{graph.__package__}.queued"].executed


def test_loaders_and_samplers_that_do_not_run_do_not_count(executed, graph):
    """They reserved memory, or raised for a file that is not supported."""
    prompt = queued(WAN_LATENT)
    prompt["4"] = {"class_type": "VAEDecode", "inputs": {"samples": ["3", 0]}}
    prompt["5"] = {"class_type": "SaveImage", "inputs": {"images": ["4", 0]}}
    idle = {
        "idle loader": {"class_type": "LoadParallelDiT", "inputs": {"model_name": "b"}},
        "idle sampler": {"class_type": "ParallelSampler", "inputs": {"dit": ["1", 0], "steps": 3}},
        "idle decoder": {"class_type": "VAEDecode", "inputs": {"samples": ["idle sampler", 0]}},
    }
    assert executed(idle | prompt, "1") == prompt
    request = graph.request_of_graph(executed(idle | prompt, "1"), "1", latent_of("flux"))
    assert request.steps == 20 and not graph.other_loaders(executed(idle | prompt, "1"), "1")


def test_a_node_that_runs_though_no_output_needs_it_has_the_whole_graph(executed):
    """As one that another node has added."""
    prompt = queued({})
    assert executed(prompt, "1") == prompt and executed({}, "1") == {}
