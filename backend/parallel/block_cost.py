"""Multiply-adds (MACs) of each block, by which stages are balanced: of a typical call, from weight shapes.

A token costs a linear layer or a convolution as many MACs as it has weights, times its FLOP share
(Blocks.flop_shares). The two matrix products of attention cost 2 x queries x keys x width. Which tokens pass
a layer say Blocks.lists, Blocks.text_layers, Cache.prompt_layers and Cache.modulation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from ..models.blocks import IMAGE_ONLY
from ..models.family import Family
from ..models.patterns import matches
from .block_streams import block_list
from .matrix_cuts import KEYS, QUERIES, features_of, has_layer
from .stage_split import IMAGE_TOKENS, TEXT_TOKENS

#: A layer of queries, keys, values and the MLP at once: its width is not that of the queries.
QUERY_LAYERS = (*QUERIES, "to_qkv_mlp_proj")

#: Kinds of keys that are no tokens of the sequence: the prompt's, and the state of linear attention.
PROMPT, STATE = "prompt", "state"
#: Latent -> its tokens, of nested latents that blocks keep apart.
Latents = Mapping[str, int]


def block_costs(
    transformer: nn.Module,
    family: Family,
    config: Mapping,
    image: int = IMAGE_TOKENS,
    text: int = TEXT_TOKENS,
    latents: Latents | None = None,
) -> list[int]:
    """Count the MACs of every block in pipeline order, for ``image`` and ``text`` tokens.
    ``latents``: tokens of each of nested latents; without them all are the first's."""
    latents = latents or latents_of(family, image)
    head_size = family.blocks.head_size(config)
    costs = []
    for list_name in family.blocks.lists:
        for block in block_list(transformer, list_name):
            macs = 0
            tokens = layer_tokens(block, list_name, family)
            for name, module in block.named_modules():
                weight = getattr(module, "weight", None)
                if weight is not None and weight.ndim > 1:
                    of_token = round(weight.numel() * family.blocks.flop_share(name, config))
                    macs += of_token * tokens[name].count(image, text, latents)
            for call in attention_calls(block, list_name, family, config):
                macs += 2 * call.width * call.pairs(image, text, latents, head_size)
            costs.append(macs)
    return costs


def latents_of(family: Family, image: int) -> dict[str, int]:
    """Count all tokens as the first of nested latents."""
    names = family.latent.nested.names if family.latent.nested else ()
    return {name: 0 if index else image for index, name in enumerate(names)}


@dataclass(frozen=True)
class LayerTokens:
    """Which tokens of one step pass a layer: of the image stream or of one ``latent`` in it, of the text, or
    none where it is computed once a request; is_control: once for each control input. divided: which of them
    the ranks of sequence parallelism divide, and all call the layer: "image" (and the text, if that passes),
    or "text" alone; "" where each has the same tokens, or may call a layer that others do not: an expert."""

    image: bool
    text: bool
    latent: str = ""
    is_control: bool = False
    divided: str = ""

    def count(self, image: int, text: int, latents: Latents) -> int:
        """Count the tokens that pass the layer, of ``image``, ``text`` and each of ``latents``."""
        own = latents[self.latent] if self.latent else image
        return self.image * own + self.text * text


@dataclass(frozen=True)
class AttentionCall:
    """A call of attention in a block. queries, keys: kinds of tokens (SequenceLengths.length_of), PROMPT or
    STATE. width, kv_width: features of all heads of queries and keys. is_control: once a control input."""

    queries: str
    keys: str
    width: int
    kv_width: int
    is_control: bool = False

    @property
    def is_local(self) -> bool:
        """Return whether every rank has all of its keys and values."""
        return self.keys in (PROMPT, STATE)

    def pairs(self, image: int, text: int, latents: Latents, head_size: int) -> int:
        """Count queries times keys; linear attention has the head size for keys."""
        known = {"joint": image + text, "text": text, PROMPT: text, STATE: head_size, **latents}
        return known.get(self.queries, image) * known.get(self.keys, image)


#: Layers outside of the blocks: before them tokens are the same on all ranks, after them this rank's.
OUTSIDE = LayerTokens(True, False, divided="image")


def attention_calls(block: nn.Module, list_name: str, family: Family, config: Mapping) -> list[AttentionCall]:
    """Return a block's attention calls, one for each of its attention modules, in order."""
    modules = [(name, module) for name, module in block.named_modules() if is_attention(module)]
    kinds = [kind for kind in family.blocks.attention if not (family.cache.static_text and kind == "text")]
    calls = []
    for (name, module), kind in zip(modules, kinds):
        queries, keys = (kind, kind) if isinstance(kind, str) else kind
        if kind in ("cross", "linear"):
            queries = family.blocks.latent_of(f"{name}.{QUERIES[0]}") or "image"
            keys = PROMPT if kind == "cross" else STATE
        if family.blocks.lists[list_name] == IMAGE_ONLY:
            queries, keys = ("image" if each == "joint" else each for each in (queries, keys))
        is_control = matches(f"{name}.{QUERIES[0]}", family.blocks.control_layers)
        width = query_width(module, family, config)
        kv_width = features_of(module, KEYS) or width  # grouped keys are narrower
        calls.append(AttentionCall(queries, keys, width, kv_width, is_control))
    return calls


def layer_tokens(block: nn.Module, list_name: str, family: Family) -> dict[str, LayerTokens]:
    """Return layer of a block -> the tokens that pass it."""
    names = [name for name, _ in block.named_modules()]
    of_text = {name for name in names if matches(name, family.blocks.text_layers)}
    apart = (
        family.cache.static_text
        or family.blocks.text_position is None
        or family.blocks.lists[list_name] == IMAGE_ONLY
        or bool(of_text)
    )
    once = (*family.cache.prompt_layers, *family.cache.modulation)
    of_layer = {}
    for name in names:
        if matches(name, once):
            of_layer[name] = LayerTokens(False, False)
        elif name in of_text:
            joint = family.blocks.text_position is not None  # else each rank has the whole prompt
            of_layer[name] = LayerTokens(False, True, divided="text" if joint else "")
        else:
            latent = family.blocks.latent_of(name)
            is_control = matches(name, family.blocks.control_layers)
            divided = "" if matches(name, family.blocks.flop_shares) else "image"
            of_layer[name] = LayerTokens(
                image=True, text=not apart, latent=latent, is_control=is_control, divided=divided
            )
    return of_layer


def is_attention(module: nn.Module) -> bool:
    """Return whether a module makes queries."""
    return has_layer(module, QUERY_LAYERS)


def query_width(module: nn.Module, family: Family, config: Mapping) -> int:
    """Return the features of the queries of all heads of an attention module."""
    own = features_of(module, QUERIES)
    return own or family.blocks.heads(config) * family.blocks.head_size(config)
