"""How far float8 on the wire of Ulysses and rings (wire fp8) takes latents from those in full: every family,
on two real ranks on the CPU.

    python benchmarks/wire_drift.py [--quick] [--write]

The families are the tests' own: tiny, of random weights, whose ComfyUI requests are run for STEPS steps each
along their own schedule. One more row is the trained demo model. --write puts the table into docs/drift.md.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import common
import drift
import torch

sys.path[:0] = [str(common.ROOT / "tests"), str(common.ROOT / "tests/support"), str(common.ROOT / "scripts")]
from families import LATENT_FORMATS, golden
from page_parts import Part, markdown
from ranks.family_runs import shortened
from tiny import relative, write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.parallel import mesh
from backend.protocol import Sample
from backend.sampling.step_loop import Callbacks

PART = Part("docs/drift.md", "wire", "benchmarks/wire_drift.py")
STEPS = (4, 8, 28)
METHODS = {"Ulysses 2": ParallelConfig(ulysses_degree=2), "ring 2": ParallelConfig(ring_degree=2)}
DEMO = "demo model, trained"


def along(sigmas: torch.Tensor, steps: int) -> torch.Tensor:
    """So many steps along a schedule, linear between its noise levels."""
    at = torch.linspace(0, len(sigmas) - 1, steps + 1, dtype=torch.float64)
    low = at.floor().long().clamp(max=len(sigmas) - 2)
    found = sigmas[low].double() + (at - low) * (sigmas[low + 1] - sigmas[low]).double()
    return found.to(sigmas.dtype)


def of_family(family: str, steps: int) -> Sample:
    """The golden request of a family, for so many steps."""
    sample = golden(f"{family}__euler_simple", "model")[0]
    tensors = {**sample.tensors, "sigmas": along(sample.tensors["sigmas"], steps)}
    return replace(sample, tensors=shortened(tensors))


def of_demo(steps: int) -> Sample:
    """The demo's six prompts, as in benchmarks/drift.py."""
    return replace(drift.request(steps, 2.5), model="model")


def errors(meshes: dict[str, mesh.Mesh], path: str, request) -> dict[str, list[str]]:
    """Method -> the relative error of the latent after each of STEPS, on rank 0. Raises UnsupportedError."""
    of_method = {}
    for method, groups in meshes.items():
        engine = Engine(METHODS[method], groups)
        engine.load("model", path, "default")
        of_method[method] = []
        for steps in STEPS:
            message = request(steps)
            packed = replace(message, wire="fp8")
            engine.check_sample(packed)
            full, rounded = (engine.sample(each, Callbacks())[0] for each in (message, packed))
            of_method[method].append(f"{relative(rounded, full):.3f}")
    return of_method


def row(name: str, errors_of: dict[str, list[str]]) -> tuple[str, ...]:
    """Return a line of the table."""
    return (name, *(each for method in METHODS for each in errors_of[method]))


def main():
    """Measure every family on two ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two families: shows that it runs")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PART.page}")
    options = parser.parse_args()
    demo = str(common.ROOT / "demo" / "shapes-flux")
    if not common.spawned():
        common.spawn(__file__, ranks=2, device="cpu", model=demo)
    torch.set_num_threads(1)
    families = list(LATENT_FORMATS)[: 2 if options.quick else None]
    meshes = {method: mesh.build(config, "cpu") for method, config in METHODS.items()}
    models = {family: partial(of_family, family) for family in families} | {DEMO: of_demo}
    rows, refused = [], []
    for name, request in models.items():
        folder = tempfile.TemporaryDirectory()  # each rank writes its own
        path = demo if name == DEMO else str(write_checkpoint(Path(folder.name) / "model.safetensors", name))
        try:
            rows.append(row(name, errors(meshes, path, request)))
            said = " | ".join(rows[-1])
        except UnsupportedError as error:
            said = f"{name}: {error}"
            refused.append(said)
        if os.environ["RANK"] == "0":
            print(said, flush=True)
    if os.environ["RANK"] == "0":
        head = ("family", *(f"{name}, {steps} steps" for name in METHODS for steps in STEPS))
        print(markdown(head, rows), *refused, sep="\n")
        if options.write:
            PART.write(markdown(head, rows))
    common.leave()


if __name__ == "__main__":
    main()
