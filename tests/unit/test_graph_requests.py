"""What a queued graph says before it runs, as far as constants tell it."""

import sys
from dataclasses import replace
from operator import itemgetter
from types import SimpleNamespace

import pytest
from published import FLUX
from without_comfy import on_stand_ins

from backend.models import FAMILIES
from backend.quantization.lora_bytes import LoraBytes


@pytest.fixture
def graph():
    """The module nodes/host/graph_requests.py."""
    with on_stand_ins("host.graph_requests") as module:
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
    inputs = {"model": ["6", 0], "latent_image": ["2", 0], "steps": 6}
    prompt["7"] = {"class_type": "KSampler", "inputs": inputs}
    request = graph.request_of_graph(prompt, "1", latent_of("wan", out_channels=16))
    assert (request.image_tokens, request.steps, request.drained) == (WAN_TOKENS, 6, True)


def scheduled(nodes: dict, output: int = 0) -> dict:
    """A graph of one image whose sampler gets its sigmas of an output of the first of these nodes."""
    prompt = queued({})
    prompt["3"]["inputs"]["sigmas"] = [next(iter(nodes)), output]
    return prompt | nodes


PARTS = {"class_type": "SplitSigmasDenoise", "inputs": {"sigmas": ["scheduler", 0], "denoise": 0.4}}
SCHEDULER = {"class_type": "BasicScheduler", "inputs": {"steps": 12}}
SPLIT = {"class_type": "SplitSigmas", "inputs": {"sigmas": ["scheduler", 0], "step": 5}}
AGAIN = {"class_type": "SplitSigmas", "inputs": {"sigmas": ["split", 1], "step": 4}}
LISTED = {"class_type": "ManualSigmas", "inputs": {"sigmas": "0.85, 0.7250,.4219, 0.0"}}
LINKED = {"class_type": "ManualSigmas", "inputs": {"sigmas": ["text", 0]}}
TEXT = {"class_type": "PrimitiveString", "inputs": {"value": "1, 0.5, 0"}}
FIRST = {"class_type": "SetFirstSigma", "inputs": {"sigmas": ["scheduler", 0], "sigma": 0.9}}
OPEN = {"class_type": "SplitSigmas", "inputs": {"sigmas": ["scheduler", 0], "step": ["size", 0]}}


@pytest.mark.parametrize(
    "nodes, output, steps",
    [
        ({"first": FIRST, "scheduler": SCHEDULER}, 0, 12),
        ({"split": SPLIT, "scheduler": SCHEDULER}, 0, 5),
        ({"split": SPLIT, "scheduler": SCHEDULER}, 1, 7),
        ({"again": AGAIN, "split": SPLIT, "scheduler": SCHEDULER}, 1, 3),
        ({"parts": PARTS, "scheduler": SCHEDULER}, 0, 7),
        ({"parts": PARTS, "scheduler": SCHEDULER}, 1, 5),
        ({"open": OPEN, "scheduler": SCHEDULER, "size": {"class_type": "Length", "inputs": {}}}, 0, 12),
        ({"listed": LISTED}, 0, 3),
        ({"linked": LINKED, "text": TEXT}, 0, 2),
        ({"linked": LINKED, "text": {"class_type": "Words", "inputs": {}}}, 0, 20),
    ],
    ids=[
        "further node",
        "first half",
        "second half",
        "split twice",
        "high",
        "low",
        "split",
        "text",
        "linked",
        "unknown",
    ],
)
def test_the_steps_of_sigmas_are_counted(graph, nodes, output, steps):
    """Sigmas that are listed counted as 20 steps, half of a schedule as all of it."""
    assert graph.request_of_graph(scheduled(nodes, output), "1", latent_of("flux")).steps == steps


def number(value) -> dict:
    return {"class_type": "PrimitiveInt", "inputs": {"value": value}}


def test_numbers_of_other_nodes_are_followed(graph):
    """2048 x 2048 with 4 steps counted as 1024 x 1024 with 20."""
    prompt = queued({"width": ["side", 0], "height": ["side", 0]})
    prompt["3"]["inputs"] |= {"steps": ["steps", 0], "cfg": ["cfg", 0], "sampler_name": "euler"}
    prompt |= {"side": number(["outer", 0]), "outer": number(2048), "4": number(4), "20": number(20)}
    fast = {"switch": ["fast", 0], "on_true": ["4", 0], "on_false": ["20", 0]}
    prompt["steps"] = {"class_type": "ComfySwitchNode", "inputs": fast}
    prompt["cfg"] = {"class_type": "ComfySwitchNode", "inputs": {**fast, "on_true": 1.0, "on_false": 4.0}}
    prompt["fast"] = {"class_type": "PrimitiveBoolean", "inputs": {"value": True}}
    request = graph.request_of_graph(prompt, "1", latent_of("flux"))
    assert (request.image_tokens, request.steps, request.prompts) == (128 * 128, 4, 1)
    prompt["fast"]["inputs"]["value"] = False
    request = graph.request_of_graph(prompt, "1", latent_of("flux"))
    assert (request.steps, request.prompts) == (20, 2)


@pytest.mark.parametrize(
    "node",
    [
        {"class_type": "ComfyNotNode", "inputs": {"value": 4}},
        {"class_type": "Multiply", "inputs": {"value": 4, "by": 2}},
        {"class_type": "PrimitiveInt", "inputs": {"value": ["steps", 0]}},
        {"class_type": "ComfySwitchNode", "inputs": {"switch": ["1", 0], "on_true": 4, "on_false": 8}},
    ],
    ids=["not", "sum", "cycle", "switch"],
)
def test_numbers_that_take_a_run_are_not_guessed(graph, node):
    prompt = queued({})
    prompt["3"]["inputs"]["steps"] = ["steps", 0]
    assert graph.request_of_graph(prompt | {"steps": node}, "1", latent_of("flux")).steps == 20


@pytest.mark.parametrize(
    "cfg, sampler, prompts", [(1.0, "euler", 1), (1.5, "euler", 2), (1.0, "euler_ancestral_cfg_pp", 2)]
)
def test_the_negative_prompt_is_computed_where_a_solver_reads_it(graph, cfg, sampler, prompts):
    """CFG++ renoises by it, without guidance too."""
    prompt = queued({})
    prompt["3"]["inputs"] |= {"cfg": cfg, "sampler_name": sampler}
    assert graph.request_of_graph(prompt, "1", latent_of("flux")).prompts == prompts


def test_parallel_model_for_a_scheduler_does_not_hide_the_sampler(graph):
    prompt = {"0": {"class_type": "ParallelModel", "inputs": {"dit": ["1", 0]}}}
    prompt |= scheduled({"scheduler": {**SCHEDULER, "inputs": {"model": ["0", 0], "steps": 12}}})
    prompt["3"]["inputs"] |= {"cfg": 4.0, "sampler_name": "euler"}
    request = graph.request_of_graph(prompt, "1", latent_of("flux"))
    assert (request.drained, request.prompts, request.steps) == (False, 2, 12)


def test_loras_of_comfyuis_loaders_are_counted_on_parallel_model(graph, monkeypatch):
    sizes = {"ours": 1, "strong": 2, "chained": 4, "both": 8, "none": 16, "elsewhere": 32}
    monkeypatch.setattr(graph, "lora_size", lambda name: LoraBytes(sizes[name]))

    def lora(kind: str, name: str, strength: str, value, **inputs) -> dict:
        return {"class_type": kind, "inputs": {"lora_name": name, strength: value, **inputs}}

    only, bypass = "LoraLoaderModelOnly", "LoraLoaderBypassModelOnly"
    prompt = queued({}) | {
        "5": lora("ParallelLoRA", "ours", "strength", 1.0, dit=["1", 0]),
        "6": {"class_type": "ParallelModel", "inputs": {"dit": ["5", 0]}},
        "7": lora(only, "strong", "strength_model", ["half", 0], model=["6", 0]),
        "8": lora(bypass, "chained", "strength_model", 1.0, model=["7", 0]),
        "9": lora("LoraLoader", "both", "strength_model", 1.0, model=["8", 0], strength_clip=0.0),
        "10": lora(only, "none", "strength_model", 0.0, model=["9", 0]),
        "11": lora(only, "elsewhere", "strength_model", 1.0, model=["stock", 0]),
        "half": {"class_type": "PrimitiveFloat", "inputs": {"value": 0.5}},
        "stock": {"class_type": "UNETLoader", "inputs": {}},
    }
    shape = replace(latent_of("flux"), is_quantized=True)
    assert graph.request_of_graph(prompt, "1", shape).loras == LoraBytes(1 + 2 + 4 + 8)


def test_a_cycle_of_latents_ends(graph):
    prompt = between({"latent": None})
    prompt["2"]["inputs"] = {"samples": ["between 0", 0]}
    assert graph.request_of_graph(prompt, "1", latent_of("flux")).image_tokens == 64 * 64


@pytest.fixture
def executed(graph):
    """queued_graph.executed, with one class of output nodes."""
    classes = {"SaveImage": SimpleNamespace(OUTPUT_NODE=True), "VAEDecode": SimpleNamespace()}
    sys.modules["nodes"].__dict__["NODE_CLASS_MAPPINGS"] = classes
    return sys.modules["parallel_dit.nodes.graph.queued_graph"].executed


def test_loaders_and_samplers_that_do_not_run_do_not_count(executed, graph, monkeypatch):
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
    monkeypatch.setattr(graph, "model_choice_of", itemgetter("model_name"))
    assert graph.loaded_models(idle | prompt, besides="1") == {"b"}
    assert request.steps == 20 and not graph.loaded_models(executed(idle | prompt, "1"), besides="1")


def test_a_node_that_runs_though_no_output_needs_it_has_the_whole_graph(executed):
    """As one that another node has added."""
    prompt = queued({})
    assert executed(prompt, "1") == prompt and executed({}, "1") == {}


def test_further_samplers_of_a_loader_are_told(graph):
    """So that weights lie where they serve all of them."""
    prompt = queued({"width": 1024, "height": 1024})
    prompt["3"]["inputs"]["steps"] = 20
    links = {"dit": ["1", 0], "latent_image": ["3", 0]}
    prompt["4"] = {"class_type": "ParallelSampler", "inputs": {**links, "steps": 6}}
    request = graph.request_of_graph(prompt, "1", FLUX)
    assert request.steps == 20 and [each.steps for each in request.then] == [6]
    assert graph.request_of_graph({"1": prompt["1"]}, "1", FLUX).then == ()


def through_a_switch(kind: str, switch, **sides: str) -> dict:
    """The graph of an image whose sampler has its transformer of a Switch, as stock templates turn a LoRA on
    and off, and its cfg of another."""
    prompt = queued({})
    prompt["1"] = {"class_type": "LoadParallelDiT", "inputs": {"model_name": "m"}}
    prompt["lora"] = {"class_type": "ParallelLoRA", "inputs": {"dit": ["1", 0]}}
    linked = {name: [node, 0] for name, node in sides.items()}
    prompt["switch"] = {"class_type": kind, "inputs": {"switch": switch, **linked}}
    values = {"switch": True, "on_false": 4.0, "on_true": 1.0}
    prompt["cfg"] = {"class_type": "ComfySwitchNode", "inputs": values}
    prompt["3"]["inputs"] |= {"dit": ["switch", 0], "steps": 4, "cfg": ["cfg", 0], "sampler_name": "euler"}
    return prompt


@pytest.mark.parametrize(
    "kind, switch, sides",
    [
        ("ComfySwitchNode", False, {"on_false": "1", "on_true": "lora"}),
        ("ComfySwitchNode", True, {"on_false": "1", "on_true": "lora"}),
        ("ComfySwitchNode", ["run", 0], {"on_false": "1", "on_true": "lora"}),
        ("ComfySwitchNode", True, {"on_false": "none", "on_true": "lora"}),
        ("ComfySoftSwitchNode", False, {"on_true": "lora"}),
    ],
)
def test_a_loader_is_found_behind_a_switch(graph, kind, switch, sides):
    """Else a sampler of 4 steps without guidance was planned as one of 20 with it."""
    prompt = through_a_switch(kind, switch, **sides)
    prompt |= {"none": {"class_type": "None", "inputs": {}}, "run": {"class_type": "Math", "inputs": {}}}
    request = graph.request_of_graph(prompt, "1", latent_of("flux"))
    assert (request.steps, request.prompts) == (4, 1)


@pytest.mark.parametrize("sides", [{"on_false": "1", "on_true": "other"}, {"on_true": "switch"}])
def test_a_switch_between_two_loaders_is_nobodys(graph, sides):
    prompt = through_a_switch("ComfySwitchNode", ["run", 0], **sides)
    prompt["other"] = {"class_type": "LoadParallelDiT", "inputs": {"model_name": "n"}}
    assert graph.loader_of(prompt, "3") is None


def test_what_a_switch_does_not_take_does_not_run(executed):
    """Its inputs are lazy: a loader on that side would count as another model on the same ranks."""
    prompt = through_a_switch("ComfySwitchNode", True, on_false="other", on_true="lora")
    prompt["other"] = {"class_type": "LoadParallelDiT", "inputs": {"model_name": "n"}}
    prompt["save"] = {"class_type": "SaveImage", "inputs": {"images": ["3", 0]}}
    assert "other" not in executed(prompt, "1") and {"1", "lora", "3"} <= executed(prompt, "1").keys()
    prompt["switch"]["inputs"]["switch"] = ["2", 0]
    assert "other" in executed(prompt, "1")
