"""The blocks of a transformer as the engine takes them apart: data (Blocks), and what single families do
otherwise (BlockAdapter)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

#: How a list of blocks carries its streams: text and image in arguments of their own, both joined in one
#: argument, or image tokens alone (the first lists: text enters after them).
APART, JOINED, IMAGE_ONLY = "apart", "joined", "image only"


def _heads(config) -> int:
    return config["num_attention_heads"]


def _head_size(config) -> int:
    return config["attention_head_dim"]


@dataclass(frozen=True)
class Blocks:
    """How a transformer's blocks are called, and which tokens pass which of their layers.

    lists: names of the transformer's ModuleLists in pipeline order -> APART, JOINED (the image argument, and
    only result, carries text and image in the order of text_position) or IMAGE_ONLY.
    returns: what a block returns, in order ("image", "text").
    image, text: names of the arguments that carry image tokens and text tokens (text None: the prompt is
    read through cross-attention).
    text_position: where text sits in the joint sequence ("first" | "last"), None without joint text.
    needs_text_token: blocks fail on a text stream without tokens, so where they have none they are given a
    dummy token that attention leaves out.
    per_token: arguments that have a row per token: name -> (kind, dimension), or (kinds of a tuple's
    elements, dimension); with a third entry, only where the tensor has that many dimensions. One row stands
    for all.
    per_feature: arguments whose last dimension runs over the features of all heads (rotation before the
    heads are told apart), or, of four, whose second runs over heads.
    attention: kind of each attention call of a block, in order ("joint" | "image" | "text" | "cross", or two:
    whose queries, whose keys), and of each call of mixing.py ("sum" | "surroundings").
    heads: config -> number of attention heads; head_size: config -> features of a head; width: config ->
    features of a token between blocks, where they are not those of all heads.
    text_layers: layers of a block (patterns) that text tokens alone pass through.
    shares: layers of a block (patterns) -> transformer config -> part of their work that a token costs, where
    it is not all: a token passes some experts, one row stands for all.
    whole_only: why the sequence cannot be cut, so that only CFG and data parallelism run; None where it can.
    """

    lists: Mapping[str, str]
    returns: tuple[str, ...] = ("image",)
    image: str = "hidden_states"
    text: str | None = None
    text_position: str | None = None
    needs_text_token: bool = False
    per_token: Mapping[str, tuple] = field(default_factory=dict)
    per_feature: tuple[str, ...] = ()
    attention: tuple[str | tuple[str, str], ...] = ("joint",)
    heads: Callable[[Mapping], int] = _heads
    head_size: Callable[[Mapping], int] = _head_size
    width: Callable[[Mapping], int] | None = None
    text_layers: tuple[str, ...] = ()
    shares: Mapping[str, Callable[[Mapping], float]] = field(default_factory=dict)
    whole_only: str | None = None
    streams: tuple[str, ...] = ()
    fresh_text: Callable[[dict], int] = lambda arguments: 0
    counts_image: bool = False
    counts_text: bool = False
    text_mask: str | None = None
    leading: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    skip: str | None = None
    skip_source: Callable[[int, int], int | None] = lambda index, total: None

    def hidden_width(self, config: Mapping) -> int:
        """Features of a token between blocks."""
        return self.width(config) if self.width else self.heads(config) * self.head_size(config)

    def is_text_layer(self, name: str) -> bool:
        """Does the layer ``name`` of a block see text tokens alone?"""
        return any(fnmatchcase(name, pattern) for pattern in self.text_layers)
