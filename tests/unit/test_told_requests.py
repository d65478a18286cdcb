"""What of a request a queued graph tells, and what is assumed."""

import pytest
from without_comfy import on_stand_ins

from backend.models import FAMILIES


@pytest.fixture
def graph():
    """The module nodes/host/graph_requests.py."""
    with on_stand_ins("host.graph_requests") as module:
        yield module


TOLD = {"latent_image": ["2", 0], "steps": 4, "cfg": 1.0, "sampler_name": "euler"}


@pytest.mark.parametrize(
    "family, size, inputs, tells",
    [
        ("flux", {"width": 512, "height": 768}, {}, (True, True, 1.0)),
        ("flux", {"width": 512, "height": ["9", 0]}, {}, (False, True, 1.0)),
        ("flux", {}, {"steps": ["9", 0]}, (False, False, 1.0)),
        ("flux", {"width": 512, "height": 768}, {"cfg": ["9", 0]}, (True, True, None)),
        ("flux", {"width": 512, "height": 768}, {"start_at_step": ["9", 0]}, (True, False, 1.0)),
        ("flux", {"width": 512, "height": 768}, {"sigmas": ["9", 0], "steps": None}, (True, False, 1.0)),
        ("wan", {"width": 832, "height": 480}, {}, (False, True, 1.0)),
        ("wan", {"width": 832, "height": 480, "length": 81}, {}, (True, True, 1.0)),
    ],
    ids=str,
)
def test_what_a_graph_does_not_tell_is_known(graph, family, size, inputs, tells):
    """So that the loader's text says what of a request it has assumed, also where both are the same."""
    prompt = {
        "1": {"class_type": "LoadParallelDiT", "inputs": {"model_name": "a"}},
        "2": {"class_type": "EmptyLatent", "inputs": size},
        "3": {"class_type": "ParallelSampler", "inputs": {"dit": ["1", 0], **TOLD, **inputs}},
        "9": {"class_type": "Elsewhere", "inputs": {}},
    }
    pixels = FAMILIES[family].latent.pixels({"out_channels": 16})
    (request,) = graph.requests_of_graph(prompt, "1", pixels)
    assert (request.has_size, request.has_steps, request.cfg) == tells
    assert not any(getattr(graph.requests_of_graph({}, "1", pixels)[0], name) for name in HAS)


#: What says that a graph tells of a request.
HAS = ("has_size", "has_steps", "cfg")
