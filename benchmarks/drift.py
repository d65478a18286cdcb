"""How far PipeFusion's stale keys and values take the demo model's images from the serial ones: writes
docs/drift.md.

    python benchmarks/drift.py [--quick] [--out docs/drift.md]
    python benchmarks/drift.py --text docs/drift.md     # the text again around the table that is there

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
from backend.planner import drift
from backend.planner.candidates import LEAST_STEPS
from backend.protocol import Sample
from backend.sampling.step_loop import Callbacks
from demo import shapes

#: What benchmarks/wire_drift.py writes into the same page.
WIRE = Part("docs/drift.md", "wire", "benchmarks/wire_drift.py")
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
    return Sample("demo", "euler", cfg, 1, tensors=tensors)


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
            found = {}
            for stale_kv in ("reuse", "extrapolate"):
                samples = pipeline(steps, cfg, patches, warmup, stale_kv)
                db = psnr(samples, serial)
                found[stale_kv] = (
                    db.mean().item(),
                    db.min().item(),
                    ((samples - serial).norm() / serial.norm()).item(),
                )
            yield steps, cfg, patches, warmup, found


HEAD = [
    "| steps | cfg | patches M | warm-up W | reuse: PSNR mean / worst (dB) | relative error | extrapolate: "
    "PSNR mean / worst (dB) | relative error |",
    "|---|---|---|---|---|---|---|---|",
]


def table(found) -> str:
    lines = list(HEAD)
    for steps, cfg, patches, warmup, results in found:
        cells = [f"{mean:.1f} / {worst:.1f} | {error:.3f}" for mean, worst, error in results.values()]
        lines.append(f"| {steps} | {cfg:g} | {patches} | {warmup} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


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
    found, lines = numbers(table), []
    for warmup in sorted({warmup for warmup, _ in found}):
        gains = [
            tuple(b - a for a, b in zip(row["reuse"], row["extrapolate"]))
            for each, row in found
            if each == warmup
        ]
        lost = [worst for _, worst in gains if worst < 0]
        lines.append(
            f"With W = {warmup} `extrapolate` gains {min(mean for mean, _ in gains):.1f} to "
            f"{max(mean for mean, _ in gains):.1f} dB in the mean.\nAt the worst prompt it is better in "
            f"{len(gains) - len(lost)} of {len(gains)} cases"
            + (f" and loses up to {-min(lost):.1f} dB in the others." if lost else ".")
        )
    default = "extrapolate" if all(row["extrapolate"][1] >= row["reuse"][1] for _, row in found) else "reuse"
    assert len(found) == 1 or ParallelConfig().stale_kv == default, (
        f"the default of stale_kv is {ParallelConfig().stale_kv}, but by these numbers it should be "
        f"{default}:\n{table}"
    )
    lines.append(f"So `{default}` is the default{': the other can be worse' if default == 'reuse' else ''}.")
    return "\n".join(lines)


def text(table: str) -> str:
    """docs/drift.md; its part on ``wire`` is benchmarks/wire_drift.py's, and stays as it is."""
    steps = [int(line.split("|")[1]) for line in table.splitlines()[len(HEAD) :]]
    numbers = {"prompts": len(PROMPTS), "shift": SHIFT, "wire": WIRE.read()}
    numbers |= {"least": min(steps), "auto": LEAST_STEPS, "few": drift.FEW_STEPS, "most": drift.MOST_PATCHES}
    numbers |= {"stale": drift.STALE, "decibel": drift.DECIBEL, "invisible": drift.INVISIBLE}
    return TEXT.format(table=table, conclusion=conclusion(table), **numbers)


def table_in(text: str) -> str:
    """The table of this program."""
    own = text.partition("<!-- wire")[0]
    return "\n".join(line for line in own.splitlines() if line.startswith("|"))


TEXT = """# Drift of PipeFusion

Written by `python benchmarks/drift.py`. The demo model (Flux architecture, 256 image and 16 text tokens),
{prompts} prompts, Euler, schedule shift {shift:g}, float32: PSNR of the decoded image against one process
(mean and worst prompt), and relative error of the latent. With one patch, and during warm-up, there is no
drift: the results are equal. More than about 40 dB cannot be seen. The numbers are those of any
`pipefusion_degree`: which tokens are stale depends on M alone. tests/ranks/test_ranks.py compares pipelines
of 2 to 8 ranks with the one process that computes this table, to 1e-5.

{table}

A token that this step has not refreshed yet is stale. `reuse` reads its keys and values as they were in the
step before. `extrapolate` reads K + r (K - K_prev), r the ratio of the two steps in sigma and at most 1. That
costs a second buffer of keys and values.

**Fewer than {least} steps were not measured**, nor any released model. `method` auto may take PipeFusion
from {auto} steps on: with few steps the step before is further away, and the drift larger. Under {few}
steps it takes {most} patches at most. A plan has to be {stale:g} times as fast as an exact one, and
{decibel:g} times more for each dB of the mean below {invisible:g} (`backend/planner/drift.py` has the rows of
reuse with W = 1). `fastest exact` takes no stale keys and values.

{conclusion}

Tried once on the same prompts and dropped; the code is gone, so this script does not measure it again (12, 20
and 28 steps, M 2 and 8, W 1 and 2; dB against the line through two points):

- A parabola through three points gains up to 1.6 with two patches but loses 7 to 22 with eight.
- r times 0.75 gains up to 1.3 (mean) in 12 and 20 steps and loses up to 1.6 in 28; r times 0.5 is worse.
- Half of r in the first step that has two points gains up to 2 with W = 2 and loses up to 3 with W = 1.
- A factor of each block was fitted to other prompts (0.97 in the first to 0.47 in the last). It gains up to
  0.8 in the mean and 1.5 at the worst prompt with W = 1 in 12 and 20 steps. It loses up to 5 elsewhere, and
  is still worse than reuse at one worst prompt.

# Error of float8 on the wire

`wire` fp8 rounds what Ulysses and rings send to three bits of mantissa, with a scale for each token and
head ([degrees.md](degrees.md#slow-links-wire)). It has nothing to do with PipeFusion: there is no
staleness, and the error comes anew in every step. Relative error of the latent against `wire` full, on two
real ranks in float32, Euler:

<!-- wire: made by benchmarks/wire_drift.py -->
{wire}<!-- end of wire -->

The families are tiny models of **random weights** under the tests' ComfyUI requests, cut short to each
number of steps along their own schedules. They show that every family runs, and the size of the error, not
what a trained model makes of it. Krea 2's norms multiply by 1 + weight, so that its random attention is
sharp and small errors grow (in float32 it is the family furthest from ComfyUI, too). Sana is refused: its
linear attention sends sums, in full. The last row is a trained model, the demo's, with six prompts at cfg
2.5: PipeFusion's stale keys and values take it as far (the table above). No released model was measured,
nor any on a GPU.

A ring rounds the keys and values of other ranks alone. Ulysses rounds queries, keys, values and outputs, so
it is further away. More steps end nearer to each other: each takes a smaller part of its step from rounded
numbers.
"""


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(ROOT / "demo" / "shapes-flux"))
    parser.add_argument("--quick", action="store_true", help="one case in place of the table")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument(
        "--text",
        type=Path,
        help="Markdown file whose text is written again around its table, without measuring",
    )
    options = parser.parse_args()
    if options.text:
        options.text.write_text(text(table_in(options.text.read_text())))
        return
    torch.set_num_threads(1)
    began = time.time()
    found = text(table(rows(Pipeline(options.model), options.quick)))
    print(conclusion(table_in(found)))
    if options.out:
        options.out.write_text(found)
    print(f"{time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
