"""Graphs that sample a golden case of the tiny Flux and compare, and what a run of one says."""

import json
from itertools import count

import tiny

TWO_RANKS = {"ulysses_degree": 2, "device": "cpu"}
#: Tells graphs apart that are otherwise equal, so that no test finds its latent in ComfyUI's cache.
RUNS = count(1)


def graph(
    case="euler_simple",
    config=TWO_RANKS,
    change="nothing",
    model="tiny-flux.safetensors",
    family="flux-dev",
    **sampler,
) -> dict:
    """An API graph that samples a golden case of a family and compares; no two are equal."""
    file = str(tiny.GOLDEN / f"{family}__{case}.safetensors")
    inputs = {
        "seed": 42,
        "steps": 6,
        "cfg": 3.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1.0,
        **sampler,
    }
    return {
        "1": {
            "class_type": "TestGoldenInputs",
            "inputs": {"file": file, "change": change, "run": next(RUNS)},
        },
        "2": {"class_type": "ParallelConfig", "inputs": dict(config)},
        "3": {"class_type": "LoadParallelDiT", "inputs": {"config": ["2", 0], "model_name": model}},
        "4": {
            "class_type": "ParallelSampler",
            "inputs": {
                "dit": ["3", 0],
                "positive": ["1", 0],
                "negative": ["1", 1],
                "latent_image": ["1", 2],
                **inputs,
            },
        },
        "5": {"class_type": "TestGoldenError", "inputs": {"samples": ["4", 0], "file": file}},
    }


def model_graph(case="euler_simple", **arguments) -> dict:
    """The same graph with ComfyUI's KSampler on the MODEL of ParallelModel."""
    nodes = graph(case, **arguments)
    inputs = {key: value for key, value in nodes["4"]["inputs"].items() if key != "dit"}
    return {
        **nodes,
        "4": {"class_type": "KSampler", "inputs": {"model": ["6", 0], **inputs}},
        "6": {"class_type": "ParallelModel", "inputs": {"dit": ["3", 0]}},
    }


def custom_graph(sampler: str, scheduler: str, cfg: float, case: str) -> dict:
    """SamplerCustomAdvanced on the MODEL of ParallelModel, with a ModelSamplingFlux that asks for what Flux
    has anyway."""
    nodes, model = model_graph(case), ["7", 0]
    return {
        **{key: nodes[key] for key in "1236"},
        "7": {
            "class_type": "ModelSamplingFlux",
            "inputs": {
                "model": ["6", 0],
                "max_shift": 1.15,
                "base_shift": 0.5,
                "width": 1024,
                "height": 1024,
            },
        },
        "8": {
            "class_type": "CFGGuider",
            "inputs": {"model": model, "positive": ["1", 0], "negative": ["1", 1], "cfg": cfg},
        },
        "9": {
            "class_type": "BasicScheduler",
            "inputs": {"model": model, "scheduler": scheduler, "steps": 6, "denoise": 1.0},
        },
        "10": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": sampler}},
        "11": {"class_type": "RandomNoise", "inputs": {"noise_seed": 42}},
        "4": {
            "class_type": "SamplerCustomAdvanced",
            "inputs": {
                "noise": ["11", 0],
                "guider": ["8", 0],
                "sampler": ["10", 0],
                "sigmas": ["9", 0],
                "latent_image": ["1", 2],
            },
        },
        "5": nodes["5"],
    }


def error_of(run) -> float:
    assert run.status == "success", run.message or run.node_errors
    return json.loads(run.outputs["5"]["text"][0])["error"]


def ranks_of(server) -> dict[int, str]:
    """Process id of every rank of the server's backend."""
    return {
        pid: line
        for pid, line in server.descendants("backend.worker").items()
        if "torch.distributed.run" not in line
    }
