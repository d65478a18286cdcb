"""What scripts/doctor.py --full tries of the life of ranks: a cancelled request, a rank that is killed,
weights that are parked in host memory, two models in turn."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from doctor_findings import OK, PROBLEM, WARNING, Finding, Found, gb, possible
from doctor_hangs import late, sample
from doctor_lab import RUN_SECONDS, Lab, relative
from doctor_limits import EXACT
from doctor_next import NOTHING
from doctor_time import of_form, while_time

from backend.client.auto.model_choice import ModelChoice
from backend.config import ParallelConfig
from backend.protocol import BackendError, Sample

#: Steps of requests that are cancelled, or lose a rank, after AFTER of them.
LONG, AFTER = 20, 2
#: Seconds within which the death of a rank is an error: NCCL's own waits are of minutes.
MAX_DEATH_SECONDS = 30.0
#: A tiny model of another family, which is loaded next to the mid-size Flux.
OTHER = "wan21-t2v"
#: Attention heads of OTHER, of which each rank of Ulysses needs one.
HEADS = 4


def life(lab: Lab) -> Found:
    """What ranks do after a cancel, after one of them is killed, after their weights were parked, and with
    two models."""
    if lab.ranks == 1:
        text = f"not run: one rank; it tries what several ranks do, so {NOTHING}"
        yield Finding("life", WARNING, text)
        return
    config = for_both(lab.ranks)
    wanted = _latent(lab, config)
    checks = {"cancel": _cancelled, "parking": _parked, "two models": _in_turn, "a killed rank": _killed}
    for name in while_time(lab, of_form(lab, checks, ("cancel", "a killed rank"))):
        yield from possible("life", name, checks[name], lab, config, wanted)


def for_both(ranks: int) -> ParallelConfig:
    """Return exact degrees that both models allow on so many ranks: a ring needs no heads."""
    ulysses = max(degree for degree in range(1, HEADS + 1) if ranks % degree == 0)
    return ParallelConfig(ulysses_degree=ulysses, ring_degree=ranks // ulysses)


def _latent(lab: Lab, config: ParallelConfig) -> torch.Tensor:
    path = lab.flux()
    return lab.run(config, path, lab.request(path, AFTER)).samples


def _again(lab: Lab, config: ParallelConfig, wanted: torch.Tensor) -> tuple[str, str, float]:
    """Run what gave ``wanted`` again; return a status, the comparison in words, and the distance."""
    distance = relative(_latent(lab, config), wanted)
    status = OK if distance <= EXACT[lab.device] else PROBLEM
    return status, f"the next latent is {distance:.1e} from the one before", distance


def _long(lab: Lab, config: ParallelConfig) -> Sample:
    """Return a request of many steps for the loaded Flux."""
    path = lab.flux()
    model = lab.backend(config).models[ModelChoice(str(path))]
    return replace(lab.request(path, LONG), model=model, **config.per_request)


def _until_late(lab: Lab, config: ParallelConfig) -> Callable[[], None]:
    """Return a check that raises once a request takes so long that its ranks hang."""
    began, end = time.monotonic(), lab.limit(RUN_SECONDS)

    def check():
        if time.monotonic() > end:
            raise late(lab, config, time.monotonic() - began, RUN_SECONDS)

    return check


def _cancelled(lab: Lab, config: ParallelConfig, wanted: torch.Tensor) -> Finding:
    backend, steps = lab.backend(config), [0]

    def note(progress):
        steps.append(progress.step)

    def cancels() -> bool:
        return steps[-1] >= AFTER

    request = _long(lab, config)
    result = sample(lab, config, backend, request, RUN_SECONDS, on_progress=note, cancels=cancels)
    status, text, distance = _again(lab, config, wanted)
    values = {"life": "cancel", "after": steps[-1], "distance": distance}
    what = f"cancel after step {steps[-1]} of {LONG}: {text}"
    if result is not None:
        status = PROBLEM
        what += "; the request went on to its end"
    elif lab.backend(config) is not backend:
        status = PROBLEM
        what += "; the ranks had to start again"
    return Finding("life", status, what, values)


def _killed(lab: Lab, config: ParallelConfig, wanted: torch.Tensor) -> Finding:
    backend = lab.backend(config)
    if backend.process is None:  # somebody else's ranks
        text = f"a killed rank: not tried, since this process has not started the ranks; {NOTHING}"
        return Finding("life", WARNING, text)
    request, killed = _long(lab, config), []

    def kill(progress):
        if progress.step >= AFTER and not killed:
            killed.append(time.monotonic())
            os.kill(backend.welcome.pids[1], signal.SIGKILL)

    def has_killed() -> bool:
        return bool(killed)

    why = ""
    try:
        sample(lab, config, backend, request, RUN_SECONDS, on_progress=kill, has_killed=has_killed)
    except BackendError as error:
        why = str(error)
    seconds = time.monotonic() - (killed or [time.monotonic()])[0]
    status, text, distance = _again(lab, config, wanted)
    if "rank 1" not in why or seconds > MAX_DEATH_SECONDS:
        status = PROBLEM
    said = why.splitlines()[0][:200] if why else "no error"
    values = {"life": "a killed rank", "seconds": seconds, "distance": distance, "error": why}
    return Finding("life", status, f"rank 1 killed: after {seconds:.1f} s {said!r}; {text}", values)


def _parked(lab: Lab, config: ParallelConfig, wanted: torch.Tensor) -> Finding:
    path, backend = lab.flux(), lab.backend(config)
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    _latent(lab, config)  # the weights are there, whatever came before
    choice = ModelChoice(str(path))

    def park() -> list[int]:
        return backend.unload(choice, park=True, check=_until_late(lab, config))

    _, request = _timed(_latent, lab, config)
    left, first = _timed(park)
    if choice not in backend.models:
        what = f"parking of {gb(size)} a rank: not parked but freed: the host has no room, or ranks are on "
        what += f"the CPU; {NOTHING}: weights are read from the file again instead"
        return Finding("life", WARNING, what, {"life": "parking", "left": left})
    _latent(lab, config)
    left, second = _timed(park)  # the first one has locked the pages
    (status, text, distance), last = _timed(_again, lab, config, wanted)
    seconds = {"request": request, "first": first, "second": second, "back": last - request}
    rates = {name: size / max(1e-3, seconds[name]) / 1e9 for name in ("first", "second", "back")}
    what = f"parking of {gb(size)} a rank: to host memory {rates['first']:.1f} GB/s with its pages to be "
    what += f"locked, {rates['second']:.1f} GB/s again, back {rates['back']:.1f} GB/s; {text}"
    if sorted(left) != list(range(lab.ranks)):
        status = PROBLEM
        what += f"; of {lab.ranks} ranks only {left} gave their weights up"
    values = {"life": "parking", "bytes": size, "seconds": seconds, "distance": distance, "left": left}
    return Finding("life", status, what, values)


def _timed(run: Callable, *arguments) -> tuple[Any, float]:
    """Return what ``run`` returns, and its seconds."""
    began = time.monotonic()
    returned = run(*arguments)
    return returned, time.monotonic() - began


def _in_turn(lab: Lab, config: ParallelConfig, wanted: torch.Tensor) -> Finding:
    """Two models that stay loaded, each twice in turn."""
    flux, (tiny, of_tiny, _) = lab.flux(), lab.tiny(OTHER)
    models = {"flux": (flux, lab.request(flux, AFTER)), OTHER: (tiny, of_tiny)}
    keep = [ModelChoice(str(path)) for path, _ in models.values()]
    backend, distances = lab.backend(config), []
    firsts = {"flux": wanted}
    for name in [*models, *models]:
        path, request = models[name]
        loaded = backend.load(str(path), keep=keep, check=_until_late(lab, config))
        message = replace(request, model=loaded.model, **config.per_request)
        result = sample(lab, config, backend, message, RUN_SECONDS)
        assert result is not None, "nobody has cancelled it"
        samples = result.tensors["samples"]
        distances.append(relative(samples, firsts.setdefault(name, samples)))
    status = OK if max(distances) <= EXACT[lab.device] else PROBLEM
    text = f"two models in turn: the latents are at most {max(distances):.1e} from their first"
    if not backend.models.keys() >= set(keep):
        status = PROBLEM
        text += "; they did not stay loaded"
    return Finding("life", status, text, {"life": "two models", "distances": distances})
