"""What a model family is: data, and functions of its file. The engine reads it and never names a family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from .blocks import Blocks
from .discrete_schedule import DiscreteSchedule
from .key_layout import Layout
from .latent_tokens import NestedGrid, TokenGrid

#: How one stream or per-token argument relates to the sequence: its tokens are "text", "image" or both
#: ("joint").
Kind = str
Grid = TokenGrid | NestedGrid
Config = Mapping[str, Any]
Arguments = dict[str, Tensor]


@dataclass(frozen=True)
class Nested:
    """Several latents of one request, as ComfyUI nests them: names, and config -> patch and channels, in
    ComfyUI's order.

    order: the latents as their tokens follow each other in the model's sequence.
    carry: sigma (0-d) -> for every latent three numbers (0-d) where the solvers step it at another scale than
    the model's: the model is given ``input`` times x, and the velocity of x is ``own`` times x plus
    ``output`` times the model's.
    """

    names: tuple[str, ...]
    patches: Callable[[Config], tuple[tuple[int, int, int], ...]]
    channels: Callable[[Config], tuple[int, ...]]
    order: tuple[int, ...]
    carry: Callable[[Tensor], list[tuple[Tensor, Tensor, Tensor]]] | None = None


@dataclass(frozen=True)
class Latent:
    """The latent that a family denoises.

    channels, patch: transformer config -> channels, and (pt, ph, pw), latent pixels per token (of the first
    latent, where there are several).
    frames: latents have a time axis (True) or none (False); None where either runs.
    nested: the latents, where the model denoises several at once.
    """

    channels: Callable[[Config], int]
    patch: Callable[[Config], tuple[int, int, int]]
    frames: bool | None = None
    nested: Nested | None = None

    @property
    def dimensions(self) -> tuple[int, ...]:
        """How many dimensions a latent may have, (B, C, [T,] H, W)."""
        return (4, 5) if self.frames is None else (5,) if self.frames else (4,)

    def grid(self, config: Config, shape: tuple[int, ...], latent_shapes: list) -> Grid:
        """Tokens of a latent (C, [T,] H, W); of nested ones with these shapes."""
        if self.nested is None:
            return TokenGrid(tuple(shape), self.patch(config))
        latents = zip(latent_shapes, self.nested.patches(config))
        return NestedGrid(
            tuple(TokenGrid(tuple(shape_of), patch) for shape_of, patch in latents), self.nested.order
        )


@dataclass(frozen=True)
class Noise:
    """What the model's output means, and which noise it knows.

    prediction: a name of prediction.PREDICTIONS.
    schedule: transformer config -> noise levels of a model of discrete timesteps ("eps" and "v" predictions);
    None for flow models.
    clean_inpaint: the part that a mask keeps is given to the model without noise.
    """

    prediction: str = "flow"
    schedule: Callable[[Config], DiscreteSchedule] | None = None
    clean_inpaint: bool = False


@dataclass(frozen=True)
class ModelIO:
    """How the transformer's forward is called.

    arguments: (transformer config, grid, latent (B, C, [T,] H, W) scaled for the model, time, conditioning)
    -> arguments of the forward. The time is the noise level, or where there is a ``schedule`` its timestep:
    0-d, or (B,) where a client tells each sample's (ModelCall).
    output: the transformer's output (all of its outputs, where latents are nested), grid -> tokens (B, N, F).
    prepare: (transformer, grid), called as a request begins: sets what the model keeps in attributes and
    ComfyUI derives from the latent.
    """

    arguments: Callable[[Config, Any, Tensor, Tensor, Arguments], dict[str, Any]]
    output: Callable[[Any, Any], Tensor]
    prepare: Callable[[nn.Module, Any], None] | None = None


def _no_context(config, grid, cond) -> int:
    return 0


def _no_refusal(config, grid, cond) -> None:
    return None


def _prompt_tokens(cond: Arguments) -> int:
    return cond["c_crossattn"].shape[1] if "c_crossattn" in cond else 0


@dataclass(frozen=True)
class Conditioning:
    """The model arguments that a request may carry, under ComfyUI's names.

    accepted: their names; required: those without which a request is refused; precise: those that keep their
    own type; ignored: those that ComfyUI sends and the model does not read.
    widths: transformer config -> features of arguments, by name.
    text_tokens: arguments of one guidance branch -> tokens that ride with patch 0 in front of, or after, the
    latent's where text is joined with it.
    context_tokens: (transformer config, grid, arguments of one guidance branch) -> tokens that ModelIO.
    arguments puts after the latent's in the image stream: given, not denoised.
    refusal: the same -> why the family cannot run them, as one sentence, or None.
    """

    accepted: tuple[str, ...]
    required: tuple[str, ...]
    widths: Callable[[Config], dict[str, int]]
    ignored: tuple[str, ...] = ()
    precise: tuple[str, ...] = ()
    text_tokens: Callable[[Arguments], int] = _prompt_tokens
    context_tokens: Callable[[Config, Any, Arguments], int] = _no_context
    refusal: Callable[[Config, Any, Arguments], str | None] = _no_refusal

    def cast(self, name: str, value: Tensor, device, dtype) -> Tensor:
        """The argument ``name`` as the transformer takes it: on its device, and in its type where it is a
        floating one."""
        return value.to(
            device, dtype if value.is_floating_point() and name not in self.precise else value.dtype
        )


@dataclass(frozen=True)
class Cache:
    """Layers whose result does not change with every token or step (patterns; of a block where nothing else
    is said).

    modulation: their input is silu of the block's argument ``modulation_argument`` (B, D), the same for every
    token: computed ahead. modulation_per_sample: False where that argument is (tokens, D), the same for all
    samples of a batch.
    prompt_layers: their input is the prompt alone (keys and values of cross-attention): computed once a
    request. prompt_modules: the same of modules of the transformer before its blocks.
    static_text: text is the same at every step: its tokens run through the blocks in a prompt's first
    evaluation alone, and their keys and values are cached.
    """

    modulation: tuple[str, ...] = ()
    modulation_argument: str = "temb"
    modulation_per_sample: bool = True
    prompt_layers: tuple[str, ...] = ()
    prompt_modules: tuple[str, ...] = ()
    static_text: bool = False


@dataclass(frozen=True)
class Build:
    """How the diffusers class becomes the family's transformer.

    patch_module: (transformer without weights, config), called as it is built: widths that the diffusers
    class fixes and files of other sizes vary, and modules that compute otherwise in ComfyUI.
    float32: parameters (patterns) that stay in float32 whatever the precision of the others.
    only: entries of the transformer's config -> (the value that is supported, what models with another one
    are).
    """

    patch_module: Callable[[nn.Module, Config], None] | None = None
    float32: tuple[str, ...] = ()
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def is_float32(self, name: str) -> bool:
        """Does the parameter ``name`` stay in float32?"""
        return any(fnmatchcase(name, pattern) for pattern in self.float32)


def _no_variant(config) -> dict:
    return {}


@dataclass(frozen=True)
class Family:
    """Everything family specific, in groups.

    transformer: the diffusers class. layout: the key layout of single files.
    tensor_plan: module pattern -> style (see parallel/tensor_parallel.py) for tensor parallelism, where the
    diffusers class has no _tp_plan.
    variant: transformer config -> entries that differ for it, "group.field" -> value.
    """

    name: str
    transformer: str
    latent: Latent
    io: ModelIO
    blocks: Blocks
    conditioning: Conditioning
    layout: Layout
    noise: Noise = Noise()
    cache: Cache = Cache()
    build: Build = Build()
    tensor_plan: Mapping[str, Any] | None = None
    variant: Callable[[Config], dict[str, Any]] = _no_variant

    def of(self, config: Config) -> "Family":
        """The family as it is for a transformer of this configuration."""
        return self.changed(self.variant(config))

    def changed(self, entries: Mapping[str, Any]) -> "Family":
        """The family with other ``entries``, "group.field" or "field" -> value; itself where there are
        none."""
        family = self
        for path, value in entries.items():
            group, _, name = path.rpartition(".")
            value = replace(getattr(family, group), **{name: value}) if group else value
            family = replace(family, **{group or name: value})
        return family
