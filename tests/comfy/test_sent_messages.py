"""How many messages the nodes send to warm ranks from a real ComfyUI's queue."""

import json

import pytest
from golden_graphs import error_of, graph, model_graph

#: Steps of the graphs: ComfyUI's loop asks for one call of the model in each.
STEPS = 6


def sent_in_second_run(comfy, make) -> list[str]:
    """Queue a graph twice, the second time with another seed; return the kinds of messages of the second."""
    first = make()
    run = None
    for seed in (201, 202):
        sampler = {**first["4"], "inputs": {**first["4"]["inputs"], "seed": seed}}
        told = {"class_type": "TestSentMessages", "inputs": {"samples": ["4", 0]}}
        run = comfy.run({**first, "4": sampler, "9": told})
        assert error_of(run) > 1e-2  # of another seed than the golden latent's
    assert run is not None and {"1", "2", "3"} <= set(run.cached) and not run.loaded
    return json.loads(run.outputs["9"]["text"][0])


@pytest.mark.parametrize(
    "make, calls", [(graph, ["Sample"]), (model_graph, ["ModelCall"] * STEPS)], ids=["sampler", "model"]
)
def test_the_second_queue_of_a_graph_sends_load_and_the_request(comfy, make, calls):
    """Load finds the model there: it alone sees that the file has changed, or that another client has freed
    the weights."""
    assert sent_in_second_run(comfy, make) == ["Load", *calls]
