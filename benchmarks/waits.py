"""Whether ranks wait for their GPU in steady state, as torch.cuda.set_sync_debug_mode sees it.

    python benchmarks/waits.py [--ranks 2] [--device cuda] [--skip "ring;cfg"] [--json PREFIX]

Every method and tiny family of the doctor runs on real ranks, with --families these families alone. Families
of too few heads or blocks for a method have, last, a hybrid of as many ranks, whose name says its degrees.
From the second step on each synchronizing call is noted with its line. The mode is "warn", not "error": a
rank that an error stops leaves the others waiting in a collective. On the CPU the same requests run, and
there is nothing to find. With --json each rank writes PREFIX.RANK after every method: a list of {"method",
"family", "steps", "waits": {"file:line": how often}}.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "scripts"), str(ROOT / "benchmarks")]
import common
import torch

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.parallel import mesh
from backend.parallel.modulation import modulation_chunks
from backend.protocol import Sample
from backend.runtime.parent_pipe import be_killed_with_parent, end_with_parent
from backend.runtime.whole_files import replace_file
from backend.sampling.step_loop import Callbacks, Denoiser

#: Words of torch's warning (c10/cuda/CUDAFunctions.cpp).
SYNCHRONIZING = "synchronizing CUDA operation"
STEPS = 4


@contextmanager
def noted(device: str, waits: Counter[str]) -> Iterator[None]:
    """Count synchronizing calls by their line; none can be seen on the CPU."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    places = (f"{Path(each.filename).name}:{each.lineno}" for each in seen if is_wait(str(each.message)))
    waits.update(places)


def is_wait(message: str) -> bool:
    """Whether a warning is that of set_sync_debug_mode."""
    return SYNCHRONIZING in message


class Watched(Denoiser):
    """The step loop, whose steady state is watched."""

    waits: Counter[str] = Counter()
    steps = 0

    def _evaluate(self, index):
        if self.plan[index].step <= self.request.config.warmup_steps:
            super()._evaluate(index)
            return
        with noted(self.x.device.type, Watched.waits):
            super()._evaluate(index)
        Watched.steps += 1


def watch(config: ParallelConfig, groups: mesh.Mesh, path: Path, sample: Sample) -> dict | None:
    """Run a request; return what its steady state waited for, None where the model refuses the degrees."""
    engine = Engine(config, groups)
    try:
        engine.load("model", str(path), "default")
    except UnsupportedError:
        return None
    Watched.waits, Watched.steps = Counter(), 0
    settings = {name: getattr(config, name) for name in ("num_pipeline_patch", "warmup_steps", "wire")}
    # each evaluation's modulation by itself, so that steps in steady state compute it too
    one_by_one = patch.object(modulation_chunks, "AHEAD", 1)
    with patch("backend.sampling.runs.Denoiser", Watched), one_by_one:
        engine.sample(replace(sample, model="model", **settings), Callbacks())
    return {"steps": Watched.steps, "waits": dict(Watched.waits)}


def model_of(folder: Path, family: str) -> Path:
    return folder / f"{family}.safetensors"


def write_models(folder: Path, families: Sequence[str] = ()):
    """Write the tiny models of these families, by default of all, before the ranks start."""
    import doctor_degrees
    import tiny

    for family in families or doctor_degrees.FAMILIES:
        tiny.write_checkpoint(model_of(folder, family), family)


def turns(ranks: int, folder: Path, families: Sequence[str] = ()) -> list:
    """Return each method as it is run with its families, as the doctor does, by the models in ``folder``.
    families: by default all."""
    import doctor_degrees
    import doctor_models

    files = {family: model_of(folder, family) for family in families or doctor_degrees.FAMILIES}
    counts = {family: doctor_models.blocks_and_heads(file) for family, file in files.items()}

    def refusal(family: str, config: ParallelConfig) -> str:
        return doctor_models.refusal(family, counts[family], config)

    return doctor_degrees.turns(ranks, refusal, tuple(files))[0]


def rank(
    ranks: int,
    device: str,
    folder: Path,
    write: Callable[[list[dict]], None],
    skipped: tuple[str, ...] = (),
    families: Sequence[str] = (),
) -> list[dict]:
    """Watch every method but the ``skipped`` ones as this rank, with these families (default: all); ``write``
    gets what was found after each method."""
    import doctor_requests
    from families import golden

    lines = []
    for turn in turns(ranks, folder, families):
        if turn.name in skipped:
            continue
        groups = mesh.build(turn.config, device)
        for family in turn.families:
            sample = golden(f"{family}__euler_simple")[0]
            batch = doctor_requests.in_batch(sample, max(2, ranks))
            first = sample.tensors["sigmas"][0].item()
            sigmas = {"sigmas": torch.linspace(first, 0, STEPS + 1)}
            request = replace(batch, sampler="euler", tensors=batch.tensors | sigmas)
            seen = watch(turn.config, groups, model_of(folder, family), request)
            if seen is not None:
                lines.append({"method": turn.name, "family": family, **seen})
        mesh.close(groups)
        write(lines)
    return lines


def keep(lines: list[dict], path: Path | None):
    """Write what was found so far, whole at any time."""
    if path is None:
        return
    replace_file(path, json.dumps(lines))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", help="write PREFIX.RANK")
    parser.add_argument("--skip", default="", help="methods that are not run, separated by ;")
    parser.add_argument("--families", nargs="+", default=(), metavar="NAME", help="these alone")
    parser.add_argument("--ends-with-stdin", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.ends_with_stdin:
        end_with_parent()
        be_killed_with_parent()
    if not common.spawned():
        with tempfile.TemporaryDirectory(prefix="parallel-dit-waits-") as folder:
            write_models(Path(folder), chosen.families)
            common.spawn(__file__, ranks=chosen.ranks, device=chosen.device, model=folder)
    number = os.environ["RANK"]
    path = Path(f"{chosen.json}.{number}") if chosen.json else None
    models = Path(os.environ[common.MODEL_VARIABLE])
    skipped = tuple(chosen.skip.split(";"))
    write = partial(keep, path=path)
    lines = rank(chosen.ranks, chosen.device, models, write, skipped, chosen.families)
    if number == "0":
        for line in lines:
            print(line)
    common.leave()


if __name__ == "__main__":
    main()
