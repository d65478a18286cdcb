"""What a model family is: data. The engine reads it and never names a family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from ..schedule import DiscreteSchedule
from ..tokens import NestedGrid, TokenGrid
from .key_layout import Layout

#: How one stream or per-token argument relates to the sequence: its rows are "text", "image" or both
#: ("joint").
Kind = str


@dataclass(frozen=True)
class Nested:
    """Several latents of one request, as ComfyUI nests them: names, and config -> patch and channels, in
    ComfyUI's order.

    order: the latents as their rows follow each other in the model's sequence.
    carry: sigma (0-d) -> for every latent three numbers (0-d) where the solvers step it at another scale than
    the model's: the model is given ``input`` times x, and the velocity of x is ``own`` times x plus
    ``output`` times the model's.
    """

    names: tuple[str, ...]
    patches: Callable[[Mapping], tuple[tuple[int, int, int], ...]]
    channels: Callable[[Mapping], tuple[int, ...]]
    order: tuple[int, ...]
    carry: Callable[[Tensor], list[tuple[Tensor, Tensor, Tensor]]] | None = None


@dataclass(frozen=True)
class Beside:
    """A folder of a diffusers pipeline whose tensors are part of the transformer here, as in ComfyUI's files:
    its name, its configuration -> entries of the transformer's, and the prefix of a parameter here -> that of
    the folder's."""

    folder: str
    config: Callable[[Mapping], dict]
    names: Mapping[str, str]


@dataclass(frozen=True)
class Family:
    """Everything family specific.

    block_lists: names of the transformer's ModuleLists in pipeline order.
    image, text: names of the blocks' arguments that carry image rows and text rows (text None: the prompt is
    read through cross-attention).
    streams: names of the blocks' arguments, and results, for the rows of each of several latents, where a
    model keeps them apart (nested); attention kinds are then the latents' names, and pairs of them (queries
    of one, keys and values of the other).
    returns: what a block returns, in order ("image", "text").
    text_position: where text sits in the joint sequence ("first" | "last"), None without joint text.
    joined: block lists whose image argument, and only result, carries text and image rows together in the
    order of text_position.
    fresh_text: (arguments of the transformer's forward) -> rows at the end of the text (text_position "last")
    that every block is given anew, and that go no further.
    image_first: block lists, the first ones, whose blocks are given image rows alone; "joint" there means
    those, and the text enters behind them.
    counts_text: the model's tail counts the text rows that it was given, so it is handed as many (as it is
    where every list is joined).
    counts_image: the model counts the image rows between its block lists, so it is handed all of them there.
    text_needs_a_row: blocks fail on a text stream without rows, so where they have none they are given one
    that attention leaves out.
    text_mask: block argument (B, text) that hides rows of text from every query; a stage hands it to
    attention instead.
    per_token: block arguments that have a row per token: name -> (kind, dimension), or (kinds of a tuple's
    parts, dimension); with a third entry, only
        where the tensor has that many dimensions. One row stands for all.
    leading: block arguments that are a number of first rows, counted through these streams in order; a block
    that has some rows alone is given
        how many of its own are among them, one number for each stream.
    context: (transformer config, grid, arguments of one guidance branch) -> rows that forward_args puts
    behind the latent's in the image stream: given, not denoised.
    once: text is the same at every step: its rows run through the blocks in a prompt's first evaluation
    alone, and their keys and values are kept.
    variant: transformer config -> entries of this family that are others for it.
    attention: kind of each attention call of a block, in order ("joint" | "image" | "text" | "cross", or two:
    whose queries, whose keys), and of each call of mixing.py ("sum" | "surroundings").
    patch: transformer config -> (pt, ph, pw), latent pixels per token (of the first latent, where there are
    several).
    nested: the latents, where the model denoises several at once.
    skip: block argument that takes an earlier block's image rows; skip_source: (block, blocks in all) -> that
    block, or None where it takes none.
    schedule: transformer config -> noise levels of a model of discrete timesteps ("eps" and "v" predictions);
    None for flow models.
    clean_inpaint: the part that a mask keeps is given to the model without noise.
    adjust: (transformer without weights, config), called as it is built: widths that the diffusers class
    fixes and files of other sizes vary.
    prepare: (transformer, grid), called as a request begins: sets what the model keeps in attributes and
    ComfyUI derives from the latent.
    refusal: (transformer config, grid, arguments of one guidance branch) -> why the family cannot run them,
    as one sentence, or None.
    frames: latents have a time axis (True) or none (False); None where either runs.
    conditioning: names of model arguments accepted in a request; required: those without which it is refused;
    precise: those that keep their own type;
        ignored: those that ComfyUI sends and the model does not read.
    text_rows: arguments of one guidance branch -> rows that ride with patch 0 in front of, or behind, the
    latent's where text is joined with it.
    widths: transformer config -> features of arguments, by name.
    only: entries of the transformer's config -> (the value that is supported, what models with another one
    are).
    forward_args: (transformer config, grid, latent (B, C, [T,] H, W) scaled for the model, time,
    conditioning) -> arguments of the transformer's forward. The time is the noise
        level, or where there is a ``schedule`` its timestep: 0-d, or (B,) where a client tells each sample's
        (ModelCall).
    output: the transformer's output (all of its outputs, where latents are nested) -> tokens (B, N, F).
    layout: the key layout of single files; beside: what a diffusers pipeline keeps apart from its
    transformer.
    heads: config -> number of attention heads; head_size: config -> features of a head; width: config ->
    features of a row between blocks, where they are not those of all heads.
    tp_plan: module pattern -> style (see parallel/tensor.py) for tensor parallelism, where the diffusers
    class has no _tp_plan.
    whole_only: why rows cannot be cut, so that only CFG and data parallelism run; None where they can.
    per_feature: block arguments whose last dimension runs over the features of all heads (rotation before the
    heads are told apart), or, of four, whose second runs over heads.
    modulation: layers of a block (patterns) whose input is silu of its argument ``modulation_input`` (B, D),
    the same for every row: computed ahead.
    modulation_shared: that argument is (rows, D), the same for all items of a batch.
    prompt_only: layers of a block (patterns) whose input is the prompt alone (keys and values of
    cross-attention): computed once a request.
    prompt_modules: the same of modules of the transformer before its blocks, whose every input is the
    prompt's.
    text_layers: layers of a block (patterns) that text rows alone pass through.
    float32: parameters (patterns) that stay in float32 whatever the precision of the others.
    shares: layers of a block (patterns): transformer config -> part of their work that a row costs, where it
    is not all: a row passes some experts, one row stands for all.
    """

    name: str
    transformer: str
    prediction: str
    block_lists: tuple[str, ...]
    returns: tuple[str, ...]
    patch: Callable[[Mapping], tuple[int, int, int]]
    latent_channels: Callable[[Mapping], int]
    conditioning: tuple[str, ...]
    required: tuple[str, ...]
    widths: Callable[[Mapping], dict[str, int]]
    forward_args: Callable[
        [Mapping, TokenGrid | NestedGrid, Tensor, Tensor, dict[str, Tensor]], dict[str, Any]
    ]
    output: Callable[[Any, TokenGrid | NestedGrid], Tensor]
    layout: Layout
    frames: bool | None = None
    ignored: tuple[str, ...] = ()
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    image: str = "hidden_states"
    text: str | None = None
    text_position: str | None = None
    joined: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    fresh_text: Callable[[dict], int] = lambda arguments: 0
    counts_image: bool = False
    counts_text: bool = False
    image_first: tuple[str, ...] = ()
    text_needs_a_row: bool = False
    text_mask: str | None = None
    per_token: Mapping[str, tuple] = field(default_factory=dict)
    leading: Mapping[str, tuple[Kind, ...]] = field(default_factory=dict)
    context: Callable[[Mapping, TokenGrid, dict[str, Tensor]], int] = lambda config, grid, cond: 0
    once: bool = False
    variant: Callable[[Mapping], dict[str, Any]] = lambda config: {}
    skip: str | None = None
    skip_source: Callable[[int, int], int | None] = lambda index, total: None
    schedule: Callable[[Mapping], DiscreteSchedule] | None = None
    clean_inpaint: bool = False
    nested: Nested | None = None
    adjust: Callable[[nn.Module, Mapping], None] | None = None
    prepare: Callable[[nn.Module, TokenGrid], None] | None = None
    refusal: Callable[[Mapping, TokenGrid, dict[str, Tensor]], str | None] = lambda config, grid, cond: None
    attention: tuple[str | tuple[str, str], ...] = ("joint",)
    heads: Callable[[Mapping], int] = lambda config: config["num_attention_heads"]
    head_size: Callable[[Mapping], int] = lambda config: config["attention_head_dim"]
    width: Callable[[Mapping], int] | None = None
    tp_plan: Mapping[str, Any] | None = None
    per_feature: tuple[str, ...] = ()
    whole_only: str | None = None
    modulation: tuple[str, ...] = ()
    modulation_input: str = "temb"
    modulation_shared: bool = False
    prompt_only: tuple[str, ...] = ()
    prompt_modules: tuple[str, ...] = ()
    text_layers: tuple[str, ...] = ()
    precise: tuple[str, ...] = ()
    beside: Beside | None = None
    text_rows: Callable[[dict[str, Tensor]], int] = lambda cond: (
        cond["c_crossattn"].shape[1] if "c_crossattn" in cond else 0
    )
    shares: Mapping[str, Callable[[Mapping], float]] = field(default_factory=dict)
    float32: tuple[str, ...] = ()

    def is_float32(self, name: str) -> bool:
        """Does the parameter ``name`` stay in float32?"""
        return any(fnmatchcase(name, pattern) for pattern in self.float32)

    def cast(self, name: str, value: Tensor, device, dtype) -> Tensor:
        """The argument ``name`` as the transformer takes it: on its device, and in its type where it is a
        floating one."""
        return value.to(
            device, dtype if value.is_floating_point() and name not in self.precise else value.dtype
        )

    def of(self, config: Mapping) -> "Family":
        """The family as it is for a transformer of this configuration."""
        others = self.variant(config)
        return replace(self, **others) if others else self

    @property
    def latent_dimensions(self) -> tuple[int, ...]:
        """How many dimensions a latent may have, (B, C, [T,] H, W)."""
        return (4, 5) if self.frames is None else (5,) if self.frames else (4,)

    def is_text_layer(self, name: str) -> bool:
        """Does the layer ``name`` of a block see text rows alone?"""
        return any(fnmatchcase(name, pattern) for pattern in self.text_layers)

    def grid(self, config: Mapping, shape: tuple[int, ...], latent_shapes: list) -> TokenGrid | NestedGrid:
        """Tokens of a latent (C, [T,] H, W); of nested ones with these shapes."""
        if self.nested is None:
            return TokenGrid(tuple(shape), self.patch(config))
        parts = zip(latent_shapes, self.nested.patches(config))
        return NestedGrid(tuple(TokenGrid(tuple(part), patch) for part, patch in parts), self.nested.order)
