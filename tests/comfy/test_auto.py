"""Parallel Config's auto in a real ComfyUI, on two ranks of the CPU."""

import json
from dataclasses import replace

import pytest
import torch
from comfy_modules import comfy_modules
from golden_graphs import error_of, graph, ranks_of
from published import FLUX

with comfy_modules():
    from parallel_dit.nodes.graph.queued_graph import loader_of
    from parallel_dit.nodes.host import graph_requests
    from parallel_dit.nodes.host.auto_plan import _in_context
    from parallel_dit.nodes.host.graph_requests import request_of_graph

from backend.planner.choose import METHODS
from backend.quantization.lora_bytes import LoraBytes

#: How many, and nothing else; the second one must not be slower, so that whatever is chosen is a plan.
AUTO = {"gpus": "2", "device": "cpu"}


def plans(comfy, since: int = 0) -> list[str]:
    """What the log says of choices after the character ``since``."""
    lines = log(comfy)[since:].splitlines()
    return [line.partition("parallel-dit: ")[2] for line in lines if f"parallel-dit: {METHODS[0]}: " in line]


def log(comfy) -> str:
    return comfy.log.read_text(errors="replace")


def test_one_loader_fits_one_prompt_and_two(comfy):
    """Every sampler gets a plan for its own cfg, whatever the loader had, and the latents are ComfyUI's."""
    since = len(log(comfy))
    two = graph(config=AUTO)
    two["6"] = graph("ddim_ddim_uniform", sampler_name="ddim", scheduler="ddim_uniform", cfg=1.0)["4"]
    two["6"]["inputs"]["positive"] = two["6"]["inputs"]["negative"] = ["1", 0]
    two["7"] = {
        "class_type": "TestGoldenError",
        "inputs": {
            "samples": ["6", 0],
            "file": two["5"]["inputs"]["file"].replace("euler_simple", "ddim_ddim_uniform"),
        },
    }
    run = comfy.run(two)
    assert error_of(run) <= 1e-4 and json.loads(run.outputs["7"]["text"][0])["error"] <= 1e-4
    chosen = plans(comfy, since)
    print("\n".join(chosen))
    assert len(chosen) == 3  # the load and two samplers
    assert all("same result as one rank" in line and "per rank" in line for line in chosen)
    planned, plan, *_, request = run.outputs["3"]["parallel_dit"][0].splitlines()
    steps = "1024 x 1024 (assumed), 6 steps"  # the golden latent's node tells no size
    assert planned == f"for {steps}, cfg 3.0, and 1 further sampler:"
    assert plan == chosen[0] and request.startswith(f"{steps}, cfg ")


def test_degrees_by_hand_are_compared_with_one_rank(comfy):
    """By a run of it, or by what auto has measured of this machine and model."""
    assert error_of(comfy.run(graph(config=AUTO))) <= 1e-4
    run = comfy.run(graph(config={"ulysses_degree": 2, "device": "cpu"}))
    assert "x one rank" in run.outputs["4"]["parallel_dit"][0]


def test_without_a_config_the_cpu_has_one_rank(comfy):
    alone = graph()
    del alone["2"], alone["3"]["inputs"]["config"]
    assert error_of(comfy.run(alone)) <= 1e-4
    assert len(ranks_of(comfy)) == 1


@pytest.mark.parametrize("config", [{"method": "manual"}, {}], ids=["method", "degree"])
def test_degrees_that_are_set_are_taken(comfy, config):
    """Graphs from before there was a method go on as they were."""
    since = len(log(comfy))
    assert error_of(comfy.run(graph(config={"ulysses_degree": 2, "device": "cpu", **config}))) <= 1e-4
    assert not plans(comfy, since) and len(ranks_of(comfy)) == 2


def test_a_method_that_a_degree_overrules_is_said_under_the_loader(comfy):
    run = comfy.run(graph(config={"ulysses_degree": 2, "device": "cpu", "method": METHODS[0]}))
    assert run.outputs["3"]["parallel_dit"][0].startswith("method auto is not used: ulysses_degree 2 is set")


def test_more_than_there_are_is_refused(comfy):
    run = comfy.run(graph(config={"gpus": "99", "device": "cpu"}))
    assert run.status == "rejected"
    assert "on the CPU this machine runs at most 16" in f"{run.message} {run.node_errors}"


def queued(sampler: dict, kind: str = "ParallelSampler") -> dict:
    """A graph of which the planner knows constants alone."""
    return {
        "1": {"class_type": "LoadParallelDiT", "inputs": {"model_name": "a"}},
        "2": {"class_type": "ParallelLoRA", "inputs": {"dit": ["1", 0]}},
        "3": {"class_type": "EmptyImage", "inputs": {"width": 512, "height": 768, "batch_size": 3}},
        "4": {"class_type": "BasicScheduler", "inputs": {"steps": 12}},
        "5": {"class_type": kind, "inputs": {"dit": ["2", 0], "latent_image": ["3", 0], **sampler}},
    }


@pytest.mark.parametrize(
    "sampler, steps, prompts",
    [
        ({"steps": 9, "cfg": 4.0, "sampler_name": "euler"}, 9, 2),
        ({"steps": 9, "cfg": 1.0, "sampler_name": "euler"}, 9, 1),
        ({"steps": ["9", 0], "cfg": ["9", 0], "sampler_name": "euler"}, 20, 2),
        ({"steps": 9, "start_at_step": 4, "end_at_step": 10000}, 5, 2),
        ({"sigmas": ["4", 0], "cfg": 1.0, "sampler_name": "euler"}, 12, 1),
    ],
    ids=["two prompts", "one prompt", "linked", "range of steps", "sigmas of a scheduler"],
)
def test_a_graph_tells_its_request(sampler, steps, prompts):
    request = request_of_graph(queued(sampler), "1", FLUX)
    assert (request.steps, request.prompts, request.drained) == (steps, prompts, False)
    assert (request.image_tokens, request.batch) == (32 * 48, 3)


class Watched(dict):
    """A graph that fails after a hundred look-ups."""

    def __init__(self, nodes: dict):
        super().__init__(nodes)
        self.left = 100

    def get(self, *key):
        self.left -= 1
        assert self.left, "the search goes on without end"
        return super().get(*key)


@pytest.mark.parametrize("origin", ["2", "6"], ids=["itself", "another"])
def test_a_cycle_of_loras_has_no_loader(origin):
    """ComfyUI validates a graph on its event loop, which has to go on."""
    graph = queued({}, "ParallelModel")
    graph["2"]["inputs"]["dit"] = [origin, 0]
    graph["6"] = {"class_type": "ParallelLoRA", "inputs": {"dit": ["2", 0]}}
    assert loader_of(Watched(graph), "5") is None
    assert loader_of(Watched(queued({})), "5") == "1"


def test_loras_of_a_graph_count_next_to_quantized_weights(monkeypatch):
    """As much as their files, those of the other model on the ranks too; none with plain weights."""
    sizes = {"a.safetensors": 500, "b.safetensors": 70}
    monkeypatch.setattr(graph_requests, "lora_size", lambda name: LoraBytes(sizes.get(name, 0)))
    graph = queued({"steps": 4, "cfg": 1.0, "sampler_name": "euler"})
    graph["2"]["inputs"] |= {"lora_name": "a.safetensors", "strength": 1.0}
    other = {"dit": ["2", 0], "lora_name": "b.safetensors"}
    graph["7"] = {"class_type": "ParallelLoRA", "inputs": {**other, "strength": 0.5}}
    graph["8"] = {"class_type": "ParallelLoRA", "inputs": {**other, "strength": 0}}
    assert request_of_graph(graph, "1", replace(FLUX, is_quantized=True)).loras == LoraBytes(570)
    assert request_of_graph(graph, "1", FLUX).loras == LoraBytes()


def test_parallel_model_is_drained():
    request = request_of_graph(queued({}, "ParallelModel"), "1", FLUX)
    assert request.drained and request.prompts == 1


def test_latents_in_context_count_as_references():
    """Bernini's video to edit, Phantom's subjects: as many tokens as the latent's, or more."""
    part = torch.zeros(1, 16, 3, 8, 8)
    values = {"reference_latents": None, "context_latents": [part, part], "time_dim_concat": part}
    assert len(_in_context(values)) == 3 and _in_context({}) == ()
