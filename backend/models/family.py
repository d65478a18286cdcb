"""What a model family is: data, and functions of its file. The engine reads it and never names a family."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.callbacks import no_entries, nothing
from .blocks import Blocks
from .common.tensor_plans import COMMON
from .config_values import Config, constant
from .discrete_schedule import DiscreteSchedule
from .key_layout import Layout
from .latent_tokens import NestedGrid, PartialGrid, TokenGrid
from .patterns import matches

Grid = TokenGrid | NestedGrid
#: The argument of distilled models (MeanFlow) that are told at which noise level a step ends (1,). A request
#: knows it; a client that calls the model by itself sends it.
STEP_END = "step_end"
Arguments = dict[str, Tensor]
#: Half precisions that a family bears, preferred first (Build.dtypes).
BF16_OR_FP16 = (torch.bfloat16, torch.float16)
FP16_OR_BF16 = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Nested:
    """Several latents of one request, in ComfyUI's order: names, and config -> patches and channels.

    order: the latents as their tokens follow each other in the model's sequence.
    rescale: sigma (0-d) -> (a, b, c) of each latent, 0-d, if the solver's scale differs from the model's:
    model input = a * x, velocity = b * x + c * output.
    """

    names: tuple[str, ...]
    patches: Callable[[Config], tuple[tuple[int, int, int], ...]]
    channels: Callable[[Config], tuple[int, ...]]
    order: tuple[int, ...]
    rescale: Callable[[Tensor], list[tuple[Tensor, Tensor, Tensor]]] | None = None


def count_none(*given: object) -> int:
    """Return 0, whatever is asked about."""
    return 0


def patch_of(config: Config) -> tuple[int, int, int]:
    """Return the patch of a configuration, whose patch_size is a number, or one for each axis."""
    size = config["patch_size"]
    time, height, width = (1, size, size) if isinstance(size, int) else (1, *size)[-3:]
    return config.get("patch_size_t") or time, height, width


@dataclass(frozen=True)
class Latent:
    """The latent that a family denoises.

    channels, patch: transformer config -> channels, and (pt, ph, pw), latent pixels per token (of the first
    of nested latents).
    frames: latents have a time axis (True) or none (False); None where either runs.
    pixels: transformer config -> frames, and pixels along each side, of a latent pixel (T, H, W), as the
    family's VAE makes them; one frame for images.
    nested: the latents, where the model denoises several at once.
    left_out: (grid of the first latent, arguments of one prompt) -> which of its tokens the model is not
    given, (cells,), or None. It is asked before the arguments are checked.
    """

    channels: Callable[[Config], int] = itemgetter("in_channels")
    patch: Callable[[Config], tuple[int, int, int]] = patch_of
    frames: bool | None = None
    pixels: Callable[[Config], tuple[int, int, int]] = constant(1, 8, 8)
    nested: Nested | None = None
    left_out: Callable[[TokenGrid, Arguments], Tensor | None] = nothing

    @property
    def dimensions(self) -> tuple[int, ...]:
        """How many dimensions a latent may have, (B, C, [T,] H, W)."""
        return {None: (4, 5), True: (5,), False: (4,)}[self.frames]

    def grid(
        self,
        config: Config,
        shape: tuple[int, ...],
        latent_shapes: list,
        prompts: Iterable[Arguments] = (),
    ) -> Grid:
        """Return the grid of a latent (C, [T,] H, W); of nested ones with these shapes. The arguments of the
        first of ``prompts`` may leave tokens out; Conditioning.refusal sees that the others leave out the
        same."""
        cond = next(iter(prompts), {})
        if self.nested is None:
            return self._present(TokenGrid(tuple(shape), self.patch(config)), cond)
        latents = zip(latent_shapes, self.nested.patches(config))
        first, *others = (TokenGrid(tuple(each), patch) for each, patch in latents)
        return NestedGrid((self._present(first, cond), *others), self.nested.order)

    def _present(self, grid: TokenGrid, cond: Arguments) -> TokenGrid:
        """Return the grid without the tokens that are left out."""
        absent = self.left_out(grid, cond)
        if absent is None or not absent.any():
            return grid
        return PartialGrid(grid.shape, grid.patch, (~absent).nonzero()[:, 0])

    def named(self, grid) -> tuple[tuple[str, int], ...]:
        """Name the nested latents of a grid, and count their tokens, as they follow each other."""
        if self.nested is None:
            return ()
        return tuple((self.nested.names[index], grid.grids[index].tokens) for index in self.nested.order)


@dataclass(frozen=True)
class Noise:
    """What the model's output means, and which noise it knows.

    prediction: a name of prediction.PREDICTIONS.
    schedule: transformer config -> noise levels of discrete timesteps ("eps", "v", "v-ddpm"); None for flow
    models.
    clean_inpaint: the model is given the part that a mask keeps without noise.
    """

    prediction: str = "flow"
    schedule: Callable[[Config], DiscreteSchedule] | None = None
    clean_inpaint: bool = False


def _latent_tokens(output, grid) -> Tensor:
    """Return the latent's tokens of an output: of tokens, which those of references follow, or in a latent's
    shape, with further channels, such as a variance."""
    if output.ndim == 3:
        return output[:, : grid.tokens]
    return grid.padded.to_tokens(output[:, : grid.shape[0]])


@dataclass(frozen=True)
class ModelIO:
    """How the transformer's forward is called.

    arguments: (transformer config, grid, latent (B, C, [T,] H, W) scaled for the model, time, conditioning)
    -> arguments of the forward. The time is the noise level, or its timestep where there is a ``schedule``:
    0-d, or (B,) where a client gives each sample its own (ModelCall).
    takes_tokens: the model's input is tokens: ``arguments`` is given these (B, N, F) instead of a latent.
    output: the transformer's output, grid -> tokens (B, N, F).
    prepare: (transformer, grid), called as a request begins: sets attributes that ComfyUI derives from the
    latent.
    """

    arguments: Callable[[Config, Any, Tensor, Tensor, Arguments], dict[str, Any]]
    takes_tokens: bool = False
    output: Callable[[Any, Any], Tensor] = _latent_tokens
    prepare: Callable[[nn.Module, Any], None] | None = None

    def of_latent(self, latent: Tensor, grid: Any) -> Tensor:
        """Return what ``arguments`` is given of a latent (B, C, [T,] H, W)."""
        return grid.to_tokens(latent) if self.takes_tokens else latent

    def of_tokens(self, tokens: Tensor, grid: Any) -> Tensor:
        """Return what ``arguments`` is given of a solver's tokens (B, N, F). Those that hold more than the
        latent are filled up from it anew, as ComfyUI does at each step."""
        if self.takes_tokens and not grid.is_padded:
            return tokens
        return self.of_latent(grid.to_latent(tokens), grid)


def _one_control(cond) -> int:
    return 1


def prompt_tokens(cond: Arguments) -> int:
    """Count the tokens of the prompt; 0 without one."""
    return cond["c_crossattn"].shape[1] if "c_crossattn" in cond else 0


@dataclass(frozen=True)
class Conditioning:
    """The model arguments that a request may carry, under ComfyUI's names.

    accepted: their names; required: those without which a request is refused; precise: those that keep their
    own type, as STEP_END does everywhere; ignored: those that ComfyUI sends and the model does not read;
    notes: name of one -> what a user reads after a run to which it was sent.
    widths: transformer config -> features of arguments, by name.
    count_text_tokens: arguments of one prompt -> text tokens of the joint sequence, which ride with patch 0.
    context_tokens: (transformer config, grid, arguments of one prompt) -> reference tokens, which
    ModelIO.arguments puts after the latent's in the image stream.
    controls: arguments of one prompt -> its control inputs (Blocks.control_layers).
    image_features: (transformer config, arguments of one prompt) -> tokens of an image's features, whose keys
    and values cross-attention caches next to the prompt's; as many as is usual without arguments (None).
    refusal: as context_tokens -> why the family cannot run them, as one sentence, or None.
    """

    accepted: tuple[str, ...]
    widths: Callable[[Config], dict[str, int]]
    required: tuple[str, ...] = ("c_crossattn",)
    ignored: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    precise: tuple[str, ...] = ()
    count_text_tokens: Callable[[Arguments], int] = prompt_tokens
    context_tokens: Callable[[Config, Any, Arguments], int] = count_none
    controls: Callable[[Arguments], int] = _one_control
    image_features: Callable[[Config, Arguments | None], int] = count_none
    refusal: Callable[[Config, Any, Arguments], str | None] = nothing

    def cast(self, name: str, value: Tensor, device, dtype) -> Tensor:
        """Move the argument ``name`` to the transformer's device, and to its type if it is floating-point."""
        casts = value.is_floating_point() and name not in (STEP_END, *self.precise)
        return value.to(device, dtype if casts else value.dtype)


@dataclass(frozen=True)
class Cache:
    """Layers of a block (patterns) whose result does not change with every token or step.

    modulation: their input is silu of the block's argument ``modulation_argument`` (B, D): computed ahead.
    modulation_per_sample: False where that argument is (tokens, D), the same for all samples of a batch.
    prompt_layers: their input is the prompt alone: computed once a request; the model pads a shorter prompt
    to ``padded_prompt`` tokens before them. prompt_modules: the same of modules of the transformer before its
    blocks, for the prompt and for positions. step_modules: those before and after the blocks whose input is
    the timestep and the prompt: computed once an evaluation, for all patches. image_modules: those that embed
    the latent's tokens, and references if no list is IMAGE_ONLY. Stages after the first call them once a
    prompt, and get zeros of the shape: they are sent tokens with values. token_modules: their layers that
    make each token of its own input alone: linear ones, and convolutions whose stride is their kernel. The
    first stage gives them the tokens of its forward alone. token_latents: of nested latents, whose tokens
    each of them is given. references_first: they are given references before the latent's tokens, which
    count_text_tokens counts.
    static_text: text does not change with the step: its tokens run through the blocks in a prompt's first
    evaluation alone, and their keys and values are cached.
    """

    modulation: tuple[str, ...] = ()
    modulation_argument: str = "temb"
    modulation_per_sample: bool = True
    prompt_layers: tuple[str, ...] = ()
    padded_prompt: int = 0
    prompt_modules: tuple[str, ...] = ()
    step_modules: tuple[str, ...] = ()
    image_modules: tuple[str, ...] = ()
    token_modules: tuple[str, ...] = ()
    token_latents: Mapping[str, str] = field(default_factory=dict)
    references_first: bool = False
    static_text: bool = False


@dataclass(frozen=True)
class Build:
    """How the diffusers class becomes the family's transformer.

    patch_module: (transformer without weights, config), called as it is built: changes widths that the
    diffusers class fixes, and modules that compute otherwise in ComfyUI.
    dtypes: half precisions in which it computes well, preferred first, as comfy.supported_models lists them;
    float16 needs a class that clips where ComfyUI's does. Without fast products in one it is float32.
    float32: parameters (patterns) that stay in float32 whatever the precision of the others.
    only: config entry -> (the value that is supported, what models with another one are).
    pipeline: configurations next to a folder's transformer ("scheduler", "vae") -> entries of the config.
    """

    patch_module: Callable[[nn.Module, Config], None] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    float32: tuple[str, ...] = ()
    only: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    pipeline: Callable[[Mapping[str, Config]], dict[str, Any]] = no_entries

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the type of the parameter ``name`` in a model of ``dtype``."""
        return torch.float32 if matches(name, self.float32) else dtype


@dataclass(frozen=True)
class Family:
    """Everything family specific, in groups.

    transformer: the diffusers class. layout: the key layout of single files.
    tensor_plan: module pattern -> style (see parallel/tensor_parallel.py) for tensor parallelism; None for
    the _tp_plan of the diffusers class.
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
    tensor_plan: Mapping[str, Any] | None = field(default_factory=lambda: COMMON)
    variant: Callable[[Config], dict[str, Any]] = no_entries

    def of(self, config: Config) -> "Family":
        """Return the family as it is for a transformer of this configuration."""
        return self.changed(self.variant(config))

    def changed(self, entries: Mapping[str, Any]) -> "Family":
        """Return the family with other ``entries``, "group.field" or "field" -> value."""
        family = self
        for path, value in entries.items():
            group, _, name = path.rpartition(".")
            value = replace(getattr(family, group), **{name: value}) if group else value
            family = replace(family, **{group or name: value})
        return family
