"""Sizes that a graph documents before it runs are those that ComfyUI's own nodes make."""

import native  # noqa: F401  # makes ComfyUI's nodes importable, rather than this pack's
import pytest
import torch
from comfy_modules import comfy_modules

with comfy_modules():
    from comfy_extras.nodes_dataset import ResizeImagesByLongerEdgeNode, ResizeImagesByShorterEdgeNode
    from comfy_extras.nodes_images import ResizeAndPadImage
    from comfy_extras.nodes_resolution import AspectRatio, ResolutionSelector
    from parallel_dit.nodes.graph.latent_sizes import GraphSizes, LatentSize
    from parallel_dit.nodes.graph.queued_graph import constants

    from nodes import LatentUpscale, LatentUpscaleBy

#: Width, height.
IMAGES = [(96, 64), (50, 83), (49, 49), (64, 97)]
EDGES = {"longer_edge": ResizeImagesByLongerEdgeNode, "shorter_edge": ResizeImagesByShorterEdgeNode}


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


def sizes_after(kind: str, link: str, size: tuple[int, int], pixels: int, inputs: dict) -> GraphSizes:
    """The sizes of a graph in which a node of this kind resizes what its input ``link`` has."""
    graph = {
        "source": {"class_type": "Source", "inputs": {"width": size[0], "height": size[1]}},
        "node": {"class_type": kind, "inputs": {link: ["source", 0], **inputs}},
    }
    return GraphSizes(graph, (1, pixels, pixels), LatentSize(1024, 1024, 1))


@pytest.mark.parametrize("size", IMAGES)
@pytest.mark.parametrize("edge", [31, 61, 128])
@pytest.mark.parametrize("name", EDGES)
def test_an_edge_is_set_as_the_node_sets_it(name, edge, size):
    width, height = size
    result = EDGES[name]._process(torch.zeros(1, height, width, 3), **{name: edge})
    found = sizes_after(EDGES[name].node_id, "images", size, 8, {name: edge}).of("node")
    assert (found.height, found.width) == result.shape[-3:-1]


def test_a_padded_image_has_the_size_that_it_is_padded_to():
    inputs = {"target_width": 40, "target_height": 72}
    further = {"padding_color": "white", "interpolation": "area"}
    result = ResizeAndPadImage.execute(torch.zeros(1, 64, 96, 3), **inputs, **further).args[0]
    found = sizes_after("ResizeAndPadImage", "image", (96, 64), 8, inputs).of("node")
    assert (found.height, found.width) == result.shape[-3:-1]


@pytest.mark.parametrize("sides", [(512, 256), (0, 256), (300, 0), (0, 0), (8, 16), (8, 0)])
@pytest.mark.parametrize("pixels", [8, 16, 32])
def test_an_upscaled_latent_has_as_many_values(pixels, sides):
    """Whose node takes 8 pixels a value, whatever the model."""
    named = dict(zip(("width", "height"), sides))
    latent = {"samples": torch.zeros(1, 4, 512 // pixels, 768 // pixels)}
    result = LatentUpscale().upscale(latent, "nearest-exact", crop="disabled", **named)[0]["samples"]
    sizes = sizes_after("LatentUpscale", "samples", (768, 512), pixels, named)
    assert sizes.sides(sizes.of("node")) == (1, *result.shape[-2:])


@pytest.mark.parametrize("factor", [0.3, 1.5, 2.0])
@pytest.mark.parametrize("pixels", [8, 16, 32])
def test_a_scaled_latent_has_as_many_values(pixels, factor):
    latent = {"samples": torch.zeros(1, 4, 512 // pixels, 768 // pixels)}
    result = LatentUpscaleBy().upscale(latent, "nearest-exact", factor)[0]["samples"]
    sizes = sizes_after("LatentUpscaleBy", "samples", (768, 512), pixels, {"scale_by": factor})
    assert sizes.sides(sizes.of("node")) == (1, *result.shape[-2:])
