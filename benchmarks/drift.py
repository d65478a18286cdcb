"""How far PipeFusion's stale keys and values take the demo model's images from the serial ones: the
table of docs/drift.md, and what follows from it.

    python benchmarks/drift.py [--quick] [--write]

Patches are computed in the pipeline's order by one process: with N stages the tokens that are fresh, and
those that are stale, are the same, so the numbers hold for any pipefusion_degree (tests/ranks compare them).
"""

import argparse
import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
import torch
from page_parts import Part

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.protocol import Sample
from backend.sampling.step_loop import Callbacks
from demo import shapes

TABLE = Part("docs/drift.md", "table", "benchmarks/drift.py")
CONCLUSION = Part("docs/drift.md", "conclusion", "benchmarks/drift.py")
PROMPTS = shapes.random_prompts(6, seed=11)
SHIFT = 3.0


def request(steps: int, cfg: float) -> Sample:
    """All prompts as one batch."""
    noise = torch.randn(len(PROMPTS), 16, 32, 32, generator=torch.Generator().manual_seed(1))
    linear = torch.linspace(1, 0, steps + 1)
    tensors = {
        "noise": noise,
        "latent": torch.zeros_like(noise),
        "sigmas": SHIFT * linear / (1 + (SHIFT - 1) * linear),
    }
    for branch, prompts in (("positive", PROMPTS), ("negative", [""] * len(PROMPTS)))[
        : 1 if cfg == 1.0 else 2
    ]:
        encoded = [shapes.encode_prompt(prompt) for prompt in prompts]
        tensors[f"{branch}.c_crossattn"] = torch.cat([text for text, _ in encoded])
        tensors[f"{branch}.y"] = torch.cat([pooled for _, pooled in encoded])
    return Sample(model="demo", sampler="euler", cfg=cfg, seed=1, tensors=tensors)


def psnr(samples: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio of each decoded image in dB."""
    a, b = (shapes.decode(shapes.to_vae_units(x)) for x in (samples, reference))
    return -10 * ((a - b) ** 2).mean(dim=(1, 2, 3)).clamp_min(1e-12).log10()


class Pipeline:
    """One process that computes patches in the order of a pipeline."""

    def __init__(self, model: str):
        self.engine = Engine(ParallelConfig(num_pipeline_patch=2), mesh.single())
        self.engine.load("demo", model, "fp32")

    def __call__(
        self, steps: int, cfg: float, patches: int, warmup: int, stale_kv: str = "reuse"
    ) -> torch.Tensor:
        message = replace(
            request(steps, cfg), num_pipeline_patch=patches, warmup_steps=warmup, stale_kv=stale_kv
        )
        return self.engine.sample(message, Callbacks())[0]


def rows(pipeline: Pipeline, quick: bool):
    """(steps, cfg, M, W, {stale_kv: (mean dB, worst dB, relative error)}) for every case."""
    cases = [(28, 2.5)] if quick else [(8, 1.0), (12, 2.5), (20, 4.0), (28, 1.0), (28, 2.5)]
    for steps, cfg in cases:
        serial = pipeline(steps, cfg, 1, steps)
        for patches, warmup in itertools.product((4,) if quick else (2, 4, 8), (1, 2)):
            errors = {}
            for stale_kv in ("reuse", "extrapolate"):
                samples = pipeline(steps, cfg, patches, warmup, stale_kv)
                db = psnr(samples, serial)
                errors[stale_kv] = (
                    db.mean().item(),
                    db.min().item(),
                    ((samples - serial).norm() / serial.norm()).item(),
                )
            yield steps, cfg, patches, warmup, errors


HEAD = [
    "| steps | cfg | patches M | warm-up W | reuse: PSNR mean / worst (dB) | relative error | extrapolate: "
    "PSNR mean / worst (dB) | relative error |",
    "|---|---|---|---|---|---|---|---|",
]


def table(cases) -> str:
    lines = list(HEAD)
    for steps, cfg, patches, warmup, results in cases:
        cells = [f"{mean:.1f} / {worst:.1f} | {error:.3f}" for mean, worst, error in results.values()]
        lines.append(f"| {steps} | {cfg:g} | {patches} | {warmup} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "".join(f"{line}\n" for line in lines)


def numbers(table: str) -> list[tuple[int, dict]]:
    """(W, {stale_kv: (mean dB, worst dB)}) of every row of a table."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[len(HEAD) :]
    ]
    return [
        (
            int(row[3]),
            {
                name: tuple(map(float, row[column].split("/")))
                for name, column in (("reuse", 4), ("extrapolate", 6))
            },
        )
        for row in cells
    ]


def conclusion(table: str) -> str:
    """What the numbers say of ``stale_kv``, by the worst prompt, and which default follows. Raises
    AssertionError where ParallelConfig has another."""
    by_case, lines = numbers(table), []
    for warmup in sorted({warmup for warmup, _ in by_case}):
        gains = [
            tuple(b - a for a, b in zip(row["reuse"], row["extrapolate"]))
            for each, row in by_case
            if each == warmup
        ]
        lost = [worst for _, worst in gains if worst < 0]
        lines.append(
            f"With W = {warmup} `extrapolate` gains {min(mean for mean, _ in gains):.1f} to "
            f"{max(mean for mean, _ in gains):.1f} dB in the mean.\nAt the worst prompt it is better in "
            f"{len(gains) - len(lost)} of {len(gains)} cases"
            + (f" and loses up to {-min(lost):.1f} dB in the others." if lost else ".")
        )
    default = (
        "extrapolate" if all(row["extrapolate"][1] >= row["reuse"][1] for _, row in by_case) else "reuse"
    )
    assert ParallelConfig().stale_kv == default, (
        f"the default of stale_kv is {ParallelConfig().stale_kv}, but by these numbers it should be "
        f"{default}:\n{table}"
    )
    lines.append(f"So `{default}` is the default{': the other can be worse' if default == 'reuse' else ''}.")
    return "".join(f"{line}\n" for line in lines)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "demo" / "shapes-flux"))
    parser.add_argument("--quick", action="store_true", help="one case in place of the table: writes nothing")
    parser.add_argument("--write", action="store_true", help=f"put the table into {TABLE.page}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.time()
    text = table(rows(Pipeline(options.model), options.quick))
    if not options.quick:  # of which nothing follows
        followed = conclusion(text)
        print(followed, end="")
        if options.write:
            TABLE.write(text)
            CONCLUSION.write(followed)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
