"""Transformers that no family file describes: diffusers classes that take a latent, a timestep and a prompt.

The family is made from the class's signature and from what a shallow copy with random weights does
(block_trace.py). CFG and data parallelism always work; methods that cut the sequence where every patch run
alone, against full K/V buffers, equals the full forward (structure.check_cut). The pipeline's scheduler gives
the meaning of the output; without one it is velocity. One rank tries, and broadcasts what it found.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial

import torch

from ...errors import UnsupportedError, reason
from ...models.blocks import Blocks
from ...models.config_values import NO_SHARE, constant
from ...models.discrete_schedule import of_scheduler, prediction
from ...models.family import BF16_OR_FP16, Build, Conditioning, Family, Latent, ModelIO, Noise, patch_of
from ...models.key_layout import Layout
from ...models.latent_tokens import TokenGrid
from ...runtime.callbacks import always, no_entries
from .block_trace import Trace, shallow, trace
from .inputs import CONDITIONING, WIDTHS, cannot_run, inputs_of
from .structure import CannotCut, check_cut, structure

#: The layout of files whose keys are diffusers' own.
NO_LAYOUT = Layout(signature=(), config=no_entries)
#: (height, width) in tokens, and tokens of the prompt, in the two traced runs; a size shows what it counts.
TRACE_SIZES = (((6, 5), 7), ((6, 7), 11))


def unknown(cls: type) -> Family:
    """Return a family of which only the class is known, to compare a configuration with a file."""
    return Family(
        name=cls.__name__,
        transformer=cls.__name__,
        latent=Latent(channels=always(1), patch=constant(1, 1, 1)),
        io=ModelIO(arguments=lambda *arguments: {}, output=lambda output, grid: output),
        blocks=Blocks(lists={}),
        conditioning=Conditioning(accepted=(), required=(), widths=no_entries),
        tensor_plan=None,
        layout=NO_LAYOUT,
    )


@dataclass(frozen=True)
class Trial:
    """What running a shallow copy of a class shows, as JSON for the other ranks.

    timestep: what a time of 0.5 became on its way into the Timesteps layer. heads, head_size: of the first
    attention. blocks: what ``structure`` found; empty where the sequence cannot be cut, for which whole_only
    is the reason.
    """

    timestep: float
    heads: int
    head_size: int
    blocks: Mapping
    whole_only: str | None = None


def _tuples(value):
    """Return a value with tuples where JSON has lists."""
    if isinstance(value, dict):
        return {name: _tuples(entry) for name, entry in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value


def family(
    cls: type, config: Mapping, scheduler: Mapping | None, trial: Mapping | None = None
) -> tuple[Family, dict]:
    """Return the Family of a diffusers class without a family file, and its trial as JSON holds it.

    ``scheduler``: the pipeline's scheduler_config.json, if any. ``trial``: of the same class and
    configuration on another rank; None for one here, which takes seconds and gigabytes. Raises
    UnsupportedError for a class that cannot be filled or run. Blocks.whole_only says why the sequence cannot
    be cut.
    """
    trial = trial or _tried(cls, json.dumps(config, sort_keys=True))
    held = Trial(**_tuples(dict(trial)))
    return _described(ClassInputs(cls, config), scheduler, held), dict(trial)


@lru_cache(maxsize=4)
def _tried(cls: type, config_json: str) -> dict:
    """Run a shallow copy; return its Trial as JSON holds it."""
    config: dict = json.loads(config_json)
    shape = ClassInputs(cls, config)
    shallow_model = _ShallowModel(shape)
    first = shallow_model.run(*TRACE_SIZES[0])
    _check_inputs(cls, first)
    assert first.timestep is not None  # _check_inputs has refused a class without one
    trial = Trial(timestep=first.timestep, heads=first.heads, head_size=first.head_size, blocks={})
    try:
        sizes = [(shallow_model.request(counts, text)[0].tokens, text) for counts, text in TRACE_SIZES]
        large = shallow_model.run(*TRACE_SIZES[1])
        facts = structure(first, large, sizes, partial(shallow_model.run, *TRACE_SIZES[0], seed=1))
        return asdict(_checked(shape, replace(trial, blocks=facts), shallow_model))
    except CannotCut as refusal:
        return asdict(replace(trial, whole_only=str(refusal)))


def _described(shape: "ClassInputs", scheduler: Mapping | None, trial: Trial) -> Family:
    """Make the Family of what its configuration, scheduler and trial tell."""
    schedule = of_scheduler(scheduler)
    channels = shape.channels  # functions below hold on to this, not to the shape
    widths = {CONDITIONING[name]: shape.width(name) for name in WIDTHS if name in shape.inputs.names}
    inputs = replace(
        shape.inputs,
        scale=1.0 if schedule else 1000.0 * 0.5 / trial.timestep,
        inverted=bool(scheduler and scheduler.get("invert_sigmas")),
    )

    def pixels(config) -> tuple[int, int, int]:
        return 4 if inputs.video else 1, 8, 8  # no VAE says it in its configuration in one way

    def tokens(output, grid):
        found = output if output.ndim == 3 else grid.padded.to_tokens(output[:, :channels])
        return -found if inputs.inverted else found

    blocks: dict = {"lists": {}, **trial.blocks, "whole_only": trial.whole_only}
    blocks["flop_shares"] = dict.fromkeys(trial.blocks.get("flop_shares", ()), NO_SHARE)
    return Family(
        name=shape.cls.__name__,
        transformer=shape.cls.__name__,
        latent=Latent(
            channels=always(channels), patch=always(shape.patch), frames=inputs.video, pixels=pixels
        ),
        noise=Noise(prediction(scheduler), always(schedule) if schedule else None),
        io=ModelIO(inputs, output=tokens),
        blocks=Blocks(heads=always(max(1, trial.heads)), head_size=always(trial.head_size), **blocks),
        conditioning=Conditioning(
            accepted=tuple(comfy for ours, comfy in CONDITIONING.items() if ours in inputs.names),
            required=(*widths, *["guidance"] * inputs.guided),
            widths=always(widths),
        ),
        build=Build(dtypes=BF16_OR_FP16),
        tensor_plan=None,
        layout=NO_LAYOUT,
    )


def _checked(shape: "ClassInputs", trial: Trial, shallow_model: "_ShallowModel") -> Trial:
    """Check patches of the trial's blocks; give blocks that fail on an empty text stream a dummy token."""
    request = shallow_model.request(*TRACE_SIZES[0])
    try:
        check_cut(shallow_model.transformer, _described(shape, scheduler=None, trial=trial), *request)
    except CannotCut:
        if trial.blocks["text"] is None:
            raise
        trial = replace(trial, blocks={**trial.blocks, "needs_text_token": True})
        check_cut(shallow_model.transformer, _described(shape, scheduler=None, trial=trial), *request)
    return trial


def _check_inputs(cls: type, first: Trace):
    """Refuse a class that would run on inputs that may be wrong. Raises UnsupportedError."""
    if not first.timestep:
        why = "its timestep passes no Timesteps layer, so nothing tells whether it counts to 1 or to 1000"
        raise cannot_run(cls, why)
    for call in first.blocks:
        for name, value in call.arguments.items():
            if value is None and ("rotary" in name or "rope" in name):
                why = f"its pipeline computes {name!r}, which the blocks are not given here"
                raise cannot_run(cls, why)


class ClassInputs:
    """What a class's configuration tells of its latent and its inputs."""

    def __init__(self, cls: type, config: Mapping):
        self.cls = cls
        self.config = config
        self.inputs = inputs = inputs_of(cls, config)
        stated = {**config, "patch_size": config.get("patch_size") or 1}
        self.patch: tuple[int, int, int] = (1, 2, 2) if inputs.packed else patch_of(stated)
        self.channels = config["in_channels"] // 4 if inputs.packed else config["in_channels"]

    def width(self, name: str) -> int:
        """Return the features of an argument that comes from a CONDITIONING."""
        known = [self.config[key] for key in WIDTHS[name] if isinstance(self.config.get(key), int)]
        if not known:
            raise UnsupportedError(
                f"the transformer class {self.cls.__name__} has no family file, and its configuration "
                f"names no width of {name} ({', '.join(WIDTHS[name])})."
            )
        return known[0]


class _ShallowModel:
    """The shallow copy and its requests."""

    def __init__(self, shape: ClassInputs):
        self.shape = shape
        accepted = inspect.signature(shape.cls.__init__).parameters
        arguments = {key: value for key, value in shape.config.items() if key in accepted}
        self.transformer = self._try(shallow, shape.cls, arguments)

    def request(self, counts: tuple[int, int], text: int, seed: int = 0) -> tuple[TokenGrid, dict]:
        """Return a grid of ``counts`` tokens, of two frames for video, and random arguments."""
        shape = self.shape
        sizes = [count * step for count, step in zip(counts, shape.patch[1:])]
        frames = [2 * shape.patch[0]] if shape.inputs.video else []
        grid = TokenGrid((shape.channels, *frames, *sizes), shape.patch)
        generator = torch.Generator().manual_seed(100)
        cond = {"guidance": torch.tensor([3.5])}
        for name in WIDTHS:
            if name in shape.inputs.names:
                tokens = [text] if name == "encoder_hidden_states" else []
                cond[CONDITIONING[name]] = torch.randn(1, *tokens, shape.width(name), generator=generator)
        noise = torch.Generator().manual_seed(seed)
        latent = torch.randn(1, shape.channels, *frames, *sizes, generator=noise)
        return grid, shape.inputs(shape.config, grid, latent, torch.tensor(0.5), cond)

    def run(self, counts, text, seed: int = 0) -> Trace:
        return self._try(lambda: trace(self.transformer, self.request(counts, text, seed)[1]))

    def _try(self, action, *arguments):
        try:
            return action(*arguments)
        except UnsupportedError:
            raise
        except Exception as error:  # whatever a foreign forward raises
            raise UnsupportedError(
                f"the transformer class {self.shape.cls.__name__} has no family file, and a trial of it "
                f"failed ({type(error).__name__}: {reason(error)}); docs/adding_a_model.md says how to add a "
                f"family."
            ) from error
