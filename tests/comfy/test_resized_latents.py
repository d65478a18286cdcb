"""Sizes that a graph documents before it runs are those that ComfyUI's own nodes make."""

import pytest
from comfy_modules import comfy_modules

with comfy_modules():
    from comfy_extras.nodes_resolution import AspectRatio, ResolutionSelector
    from parallel_dit.nodes.host.queued_graph import constants


@pytest.mark.parametrize("multiple", [8, 12, 64])
@pytest.mark.parametrize("megapixels", [0.1, 1.0, 2.3, 16.0])
@pytest.mark.parametrize("ratio", [each.value for each in AspectRatio])
def test_resolution_selector_has_the_sides_that_it_computes(ratio, megapixels, multiple):
    inputs = {"aspect_ratio": ratio, "megapixels": megapixels, "multiple": multiple}
    graph = {
        "ratio": {"class_type": "ResolutionSelector", "inputs": inputs},
        "latent": {"class_type": "EmptyLatent", "inputs": {"width": ["ratio", 0], "height": ["ratio", 1]}},
    }
    assert tuple(constants(graph, "latent").values()) == ResolutionSelector.execute(**inputs).args
