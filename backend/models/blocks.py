"""The blocks of a transformer as the engine takes them apart: data (Blocks), and single families' own code
(BlockAdapter)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from torch import Tensor, nn

from .patterns import first_match

#: How a list of blocks carries its streams: text and image in arguments of their own, both joined in one
#: argument, or image tokens alone (the first lists: text enters after them).
APART = "apart"
JOINED = "joined"
IMAGE_ONLY = "image only"


class BlockAdapter:
    """How the engine takes a block's arguments and results apart and puts them together again; a family whose
    blocks need more than names overrides methods.

    call: a block's arguments by name. tokens: which tokens a forward computes here (parallel/sequence.py).
    streams: {"image": (B, tokens, D), "text": (B, tokens, D) or None}, of lists that are APART.
    """

    #: The argument that takes an earlier block's image tokens (skip_source).
    skip_argument = ""

    def skip_source(self, index: int, total: int) -> int | None:
        """Return the block whose image tokens block ``index`` of ``total`` takes as a long skip, or None."""
        return None

    def per_block_text(self, arguments: Mapping[str, Any]) -> int:
        """Count the tokens at the end of the text (text_position "last") that every block is given anew, from
        the arguments of the transformer's forward."""
        return 0

    def image(self, blocks: "Blocks", call: Mapping[str, Any]) -> Tensor:
        """Return the image stream among a block's arguments."""
        return call[blocks.image]

    def image_arguments(
        self, blocks: "Blocks", call: Mapping[str, Any], image: Tensor, tokens
    ) -> dict[str, Tensor]:
        """Return the arguments through which a block is given the image stream."""
        return {blocks.image: image}

    def returned(self, blocks: "Blocks", out) -> dict[str, Tensor | None]:
        """Return the streams that a block returned as ``out``."""
        return {"text": None, **dict(zip(blocks.returns, out if isinstance(out, tuple) else (out,)))}

    def result(self, blocks: "Blocks", call: Mapping[str, Any], streams, tokens):
        """Return what the block itself would return of ``streams``."""
        out = [streams[name] for name in blocks.returns]
        return tuple(out) if len(out) > 1 else out[0]

    def unchanged(self, blocks: "Blocks", call: Mapping[str, Any]):
        """Return what a block returns that changes nothing."""
        streams = {"image": call[blocks.image], "text": call.get(blocks.text or "")}
        return self.result(blocks, call, streams, None)

    def between_lists(self, image: Tensor, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the image stream as the model gets it between lists of different kinds; ``whole`` fills it
        up to the sequence, for a model that counts tokens there."""
        return image

    def text_after_blocks(self, text: Tensor, whole: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the text as the model gets it from the last block, if its first list is not joined:
        ``text``, as long as the first lists returned it, ``whole`` of it, as long as the model handed it in,
        or none of it, where it would be taken for the image's."""
        return text

    def leave(self, transformer: nn.Module, tokens):
        """Prepare the layers after the blocks, up to Blocks.output_layer, for this rank's image tokens."""

    def cut(self, call: Mapping[str, Any], tokens) -> dict[str, Any]:
        """Return further arguments, next to per_token, that differ for a block which is given ``tokens``."""
        return {}


@dataclass(frozen=True)
class Blocks:
    """How a transformer's blocks are called, and which tokens pass which of their layers.

    Names in control_layers, text_layers, latent_layers, flop_shares and routers may be patterns
    (patterns.py).
    """

    #: The transformer's ModuleLists in pipeline order -> APART, JOINED (text and image in the image argument
    #: and in the only result, in the order of text_position) or IMAGE_ONLY.
    lists: Mapping[str, str]
    #: What a block returns, in order: "image", "text".
    returns: tuple[str, ...] = ("image",)
    #: Argument of the image tokens.
    image: str = "hidden_states"
    #: Argument of the text tokens; None where text is in cross-attention.
    text: str | None = None
    #: Where text sits in the joint sequence: "first" or "last"; None without joint text.
    text_position: str | None = None
    #: Blocks fail on a text stream without tokens, so they are given a dummy token.
    needs_text_token: bool = False
    #: Argument of a mask (B, text) of text tokens, which attention applies in the block's place; "" for none.
    text_mask: str = ""
    #: Argument with an entry for each token, or one for all -> (kind, or kinds of a tuple's elements,
    #: dimension, and number of dimensions if others are not cut).
    per_token: Mapping[str, tuple] = field(default_factory=dict)
    #: Arguments whose last dimension runs over the features of all heads. Of four dimensions the second runs
    #: over heads.
    per_feature: tuple[str, ...] = ()
    #: Kind of each attention call of a block, in order. "joint", "image" and "text" attend within the
    #: sequence, "cross" to the prompt. A pair of kinds attends from the first's queries to the second's keys.
    #: "linear" and "halo" are calls of token_mixing.py.
    attention: tuple[str | tuple[str, str], ...] = ("joint",)
    #: Block -> how many of these calls it makes; None for all.
    count_attention_calls: Callable[[Any], int] | None = None
    #: For each call within the sequence, the layers of a block whose outputs, one after the other, are the
    #: call's values. Nothing changes them, and they have as many heads as queries. A block may lack some of
    #: the layers.
    values: tuple[tuple[str, ...], ...] = ()
    #: Config -> attention heads.
    heads: Callable[[Mapping], int] = itemgetter("num_attention_heads")
    #: Config -> features of a head.
    head_size: Callable[[Mapping], int] = itemgetter("attention_head_dim")
    #: Config -> features of a token between blocks; None for those of all heads.
    width: Callable[[Mapping], int] | None = None
    #: Layers that run once for each control input (Conditioning.controls). The states of these travel next to
    #: the tokens' own, each as wide.
    control_layers: tuple[str, ...] = ()
    #: Layers that text tokens alone pass.
    text_layers: tuple[str, ...] = ()
    #: Layers -> which of nested latents passes them, where blocks keep these apart.
    latent_layers: Mapping[str, str] = field(default_factory=dict)
    #: Layers -> config -> share of their FLOPs that a token costs; all of them where nothing is said.
    flop_shares: Mapping[str, Callable[[Mapping], float]] = field(default_factory=dict)
    #: Modules that choose experts for each token.
    routers: tuple[str, ...] = ()
    #: Why the sequence cannot be cut, so that only CFG and data parallelism run; None if it can.
    whole_only: str | None = None
    #: Layer of the transformer after the blocks. Up to it all is token by token; after it the model counts
    #: the latent's tokens. Of joined blocks it gets the text, too, unless the model drops that before. None
    #: if there is none.
    output_layer: str | None = None
    #: Code for what no data here says.
    adapter: BlockAdapter = BlockAdapter()

    def hidden_width(self, config: Mapping, controls: int = 1) -> int:
        """Count the features of a token between blocks, with the states of so many ``controls``."""
        own = self.width(config) if self.width else self.heads(config) * self.head_size(config)
        return own * (1 + controls) if self.control_layers else own

    def latent_of(self, name: str) -> str:
        """Name the nested latent that passes the layer ``name`` of a block; "" for the whole stream."""
        return first_match(name, self.latent_layers, "")

    def flop_share(self, name: str, config: Mapping) -> float:
        """Return the share of the FLOPs of the layer ``name`` of a block that a token costs."""
        share = first_match(name, self.flop_shares, None)
        return 1 if share is None else share(config)
