"""FLOPs of each block, by which stages are balanced: multiplications of a typical call, from weight shapes.

A token costs a linear layer or a convolution as many multiplications as it has weights, times its FLOP share
(Blocks.flop_shares). The two matrix products of attention cost 2 x queries x keys x width. Which tokens pass
a layer say Blocks.lists, Blocks.text_layers, Cache.prompt_layers and Cache.modulation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ..models.blocks import IMAGE_ONLY, Kind
from .block_streams import block_list
from .matrix_cuts import QUERIES

#: Tokens of a typical request, which describe() assumes too: 1024 x 1024 pixels, a prompt of 512 tokens.
IMAGE_TOKENS, TEXT_TOKENS = 4096, 512
#: A layer of queries, keys, values and the MLP at once: its width is not that of the queries.
QUERY_LAYERS = (*QUERIES, "to_qkv_mlp_proj")


def block_costs(
    transformer: nn.Module, family, config: Mapping, image: int = IMAGE_TOKENS, text: int = TEXT_TOKENS
) -> list[int]:
    """Count the multiplications of every block in pipeline order, for ``image`` and ``text`` tokens. Latents
    of several kinds count as tokens of the first."""
    return [
        _linear(block, blocks, family, config, image, text)
        + _attention(block, blocks, family, config, image, text)
        for blocks in family.blocks.lists
        for block in block_list(transformer, blocks)
    ]


@dataclass(frozen=True)
class LayerTokens:
    """Which tokens of one step pass a layer: of the image stream, of the text, or none where it is computed
    once a request."""

    image: bool
    text: bool

    def count(self, image: int, text: int) -> int:
        """Count them, of so many."""
        return self.image * image + self.text * text


def layer_tokens(block: nn.Module, blocks: str, family) -> dict[str, LayerTokens]:
    """Return layer of a ``block`` of the list ``blocks`` -> the tokens that pass it."""
    names = [name for name, _ in block.named_modules()]
    of_text = {name for name in names if family.blocks.is_text_layer(name)}
    apart = (
        family.cache.static_text
        or family.blocks.text_position is None
        or family.blocks.lists[blocks] == IMAGE_ONLY
        or bool(of_text)
    )
    once = (*family.cache.prompt_layers, *family.cache.modulation)
    found = {}
    for name in names:
        if _matches(name, once):
            found[name] = LayerTokens(False, False)
        elif name in of_text:
            found[name] = LayerTokens(False, True)
        else:
            found[name] = LayerTokens(True, not apart)
    return found


def _matches(name: str, patterns) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _linear(block, blocks, family, config, image, text) -> int:
    layers = {
        name: module.weight
        for name, module in block.named_modules()
        if getattr(module, "weight", None) is not None and module.weight.ndim > 1
    }
    tokens = layer_tokens(block, blocks, family)
    return sum(
        round(weight.numel() * family.blocks.flop_share(name, config)) * tokens[name].count(image, text)
        for name, weight in layers.items()
    )


def _attention(block, blocks, family, config, image, text) -> int:
    """Multiplications of a block's attention; static text is computed once a request."""
    return sum(
        query_width(module, family, config) * _pairs(kind, blocks, family, config, image, text)
        for kind, module in attention_calls(block, family)
        if not (family.cache.static_text and kind == "text")
    )


def attention_calls(block: nn.Module, family) -> list[tuple[Kind, nn.Module]]:
    """Return the kind (Blocks.attention) and the module of each attention call of a block, in order. A module
    alone may make them all; blocks that lack a module make fewer."""
    modules = [module for module in block.modules() if is_attention(module)]
    kinds = [kind for kind in family.blocks.attention if kind != "surroundings"]
    if len(modules) == 1 and not family.blocks.attention_calls:
        modules *= len(kinds)
    return list(zip(kinds, modules))


def is_attention(module: nn.Module) -> bool:
    """Does a module make queries?"""
    return any(hasattr(module, name) for name in QUERY_LAYERS)


def query_width(module: nn.Module, family, config: Mapping) -> int:
    """Return the features of the queries of all heads of an attention module."""
    layer = next((getattr(module, name) for name in QUERIES if hasattr(module, name)), None)
    if layer is not None:
        return layer.out_features
    return family.blocks.heads(config) * family.blocks.head_size(config)


def _pairs(kind, blocks, family, config, image, text) -> int:
    """Multiplications of an attention call per feature; "sum" has the head size for keys."""
    joint = image if family.blocks.lists[blocks] == IMAGE_ONLY else image + text
    queries, keys = {
        "joint": (joint, joint),
        ("image", "joint"): (image, joint),
        "cross": (image, text),
        "sum": (image, family.blocks.head_size(config)),
    }.get(kind, (image, image))
    return 2 * queries * keys
