"""Transformers that no family file describes: diffusers classes that take a latent, a timestep and a prompt.

The family is made from the class's signature and from what a shallow copy with random weights does
(probe.py). CFG and data parallelism always work; methods that cut the sequence (Ulysses, ring, PipeFusion)
where a self-check passes: every patch run alone against full K/V buffers equals the full forward. The meaning
of the output comes from the pipeline's scheduler; without one it is velocity.
"""

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from ...errors import UnsupportedError, reason
from ...models.blocks import Blocks
from ...models.discrete_schedule import of_scheduler, prediction
from ...models.family import BF16_OR_FP16, Build, Conditioning, Family, Latent, ModelIO, Noise
from ...models.key_layout import Layout
from ...models.latent_tokens import TokenGrid
from .inputs import CONDITIONING, WIDTHS, Inputs, cannot_run, inputs_of
from .probe import Trace, shallow, trace
from .structure import Whole, check_patches, structure

#: (height, width) in tokens, and tokens of the prompt, in the two probes; a size shows what it counts.
PROBES = (((6, 5), 7), ((6, 7), 11))


def unknown(cls: type) -> Family:
    """Return a family of which only the class is known, to compare a configuration with a file."""
    return Family(
        name=cls.__name__,
        transformer=cls.__name__,
        latent=Latent(channels=lambda config: 1, patch=lambda config: (1, 1, 1)),
        io=ModelIO(arguments=lambda *arguments: {}, output=lambda output, grid: output),
        blocks=Blocks(lists={}),
        conditioning=Conditioning(accepted=(), required=(), widths=lambda config: {}),
        tensor_plan=None,
        layout=Layout(signature=(), config=lambda shapes: {}),
    )


def family(cls: type, config: Mapping, scheduler: Mapping | None) -> Family:
    """Return the Family of a diffusers class without a family file; ``scheduler``: the pipeline's
    scheduler_config.json, if any. Raises UnsupportedError for a class that cannot be filled or run. Where the
    sequence cannot be cut, Blocks.whole_only says why."""
    return _family(cls, json.dumps(config, sort_keys=True), json.dumps(scheduler, sort_keys=True))


@lru_cache(maxsize=4)
def _family(cls: type, config_json: str, scheduler_json: str) -> Family:
    config: dict = json.loads(config_json)
    scheduler: dict | None = json.loads(scheduler_json)
    inputs = inputs_of(cls, config)
    probe = _Probe(cls, config, inputs)
    first = probe.run(*PROBES[0])
    schedule = of_scheduler(scheduler)
    _check_inputs(cls, first)
    assert first.timestep is not None  # _check_inputs has refused a class without one
    # functions below must not hold on to the probe
    channels = probe.channels
    patch = probe.patch
    heads = first.heads
    head_size = first.head_size
    widths = {CONDITIONING[name]: probe.width(name) for name in WIDTHS if name in inputs.names}
    inputs = replace(
        inputs,
        scale=1.0 if schedule else 1000.0 * 0.5 / first.timestep,
        inverted=bool(scheduler and scheduler.get("invert_sigmas")),
    )

    def tokens(output, grid):
        return output if output.ndim == 3 else grid.padded.to_tokens(output[:, :channels])

    whole = Family(
        name=cls.__name__,
        transformer=cls.__name__,
        latent=Latent(channels=lambda config: channels, patch=lambda config: patch, frames=inputs.video),
        noise=Noise(prediction(scheduler), (lambda config: schedule) if schedule else None),
        io=ModelIO(inputs, (lambda output, grid: -tokens(output, grid)) if inputs.inverted else tokens),
        blocks=Blocks(lists={}, heads=lambda config: max(1, heads), head_size=lambda config: head_size),
        conditioning=Conditioning(
            accepted=tuple(comfy for ours, comfy in CONDITIONING.items() if ours in inputs.names),
            required=(*widths, *["guidance"] * inputs.guided),
            widths=lambda config: widths,
        ),
        build=Build(dtypes=BF16_OR_FP16),
        tensor_plan=None,
        layout=Layout(signature=(), config=lambda shapes: {}),
    )
    try:
        sizes = [(probe.request(counts, text)[0].tokens, text) for counts, text in PROBES]
        facts = structure(first, probe.run(*PROBES[1]), sizes, lambda: probe.run(*PROBES[0], seed=1))
        return _checked(replace(whole, blocks=replace(whole.blocks, **facts)), probe)
    except Whole as reason:
        return whole.changed({"blocks.whole_only": str(reason)})


def _checked(family: Family, probe: "_Probe") -> Family:
    """Check the family's patches; give blocks that fail on an empty text stream a dummy token."""
    request = probe.request(*PROBES[0])
    try:
        check_patches(probe.transformer, family, *request)
    except Whole:
        family = family.changed({"blocks.needs_text_token": True})
        if family.blocks.text is None:
            raise
        check_patches(probe.transformer, family, *request)
    return family


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


class _Probe:
    """The shallow copy and its requests."""

    def __init__(self, cls, config, inputs: Inputs):
        self.cls = cls
        self.config = config
        self.inputs = inputs
        side = config.get("patch_size") or 1
        sides = (side, side) if isinstance(side, int) else tuple(side)[-2:]
        time = config.get("patch_size_t") or (side[0] if not isinstance(side, int) and len(side) == 3 else 1)
        self.patch: tuple[int, int, int] = (1, 2, 2) if inputs.packed else (time, sides[0], sides[1])
        self.channels = config["in_channels"] // 4 if inputs.packed else config["in_channels"]
        accepted = inspect.signature(cls.__init__).parameters
        arguments = {key: value for key, value in config.items() if key in accepted}
        self.transformer = self._try(lambda: shallow(cls, arguments))

    def width(self, name: str) -> int:
        """Return the features of an argument that comes from a CONDITIONING."""
        known = [self.config[key] for key in WIDTHS[name] if isinstance(self.config.get(key), int)]
        if not known:
            raise UnsupportedError(
                f"the transformer class {self.cls.__name__} has no family file, and its configuration "
                f"names no width of {name} ({', '.join(WIDTHS[name])})."
            )
        return known[0]

    def request(self, counts: tuple[int, int], text: int, seed: int = 0) -> tuple[TokenGrid, dict]:
        """Return a grid of ``counts`` tokens, of two frames for video, and random arguments."""
        sizes = [count * step for count, step in zip(counts, self.patch[1:])]
        frames = [2 * self.patch[0]] if self.inputs.video else []
        grid = TokenGrid((self.channels, *frames, *sizes), self.patch)
        generator = torch.Generator().manual_seed(100)
        cond = {"guidance": torch.tensor([3.5])}
        for name in WIDTHS:
            if name in self.inputs.names:
                tokens = [text] if name == "encoder_hidden_states" else []
                cond[CONDITIONING[name]] = torch.randn(1, *tokens, self.width(name), generator=generator)
        latent = torch.randn(1, self.channels, *frames, *sizes, generator=torch.Generator().manual_seed(seed))
        return grid, self.inputs(self.config, grid, latent, torch.tensor(0.5), cond)

    def run(self, counts, text, seed: int = 0) -> Trace:
        return self._try(lambda: trace(self.transformer, self.request(counts, text, seed)[1]))

    def _try(self, action):
        try:
            return action()
        except UnsupportedError:
            raise
        except Exception as error:  # whatever a foreign forward raises
            raise UnsupportedError(
                f"the transformer class {self.cls.__name__} has no family file, and a trial of it failed "
                f"({type(error).__name__}: {reason(error)}); docs/adding_a_model.md says how to add a family."
            ) from error
