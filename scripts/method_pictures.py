"""Draws docs/images/*.svg, timelines of the parallel methods; the tests hold them up to date.

    python scripts/method_pictures.py --write

Each rank's micro-batches, and their order, are those of the backend's own step loop (Denoiser), which is run
without a model. Their lengths are the tokens that they compute. GPUs of equal speed and links that cost
nothing are assumed: the drawings explain who waits for whom, and are no measurement.
"""

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch

from backend.config import ParallelConfig
from backend.models.latent_tokens import TokenGrid
from backend.parallel.mesh import Axis, Mesh, layout, single
from backend.parallel.sequence import Span
from backend.sampling.guidance import Prompt
from backend.sampling.prediction import PREDICTIONS
from backend.sampling.request import Request
from backend.sampling.step_loop import Callbacks, Denoiser

FOLDER = ROOT / "docs/images"
STEPS = 4
#: Flux at 1024 x 1024: a latent of 128 x 128 is 4096 tokens.
GRID = TokenGrid((16, 128, 128), (1, 2, 2))
#: Name of a drawing -> the configuration that it shows.
DRAWINGS = {
    "one_gpu": ParallelConfig(),
    "cfg2": ParallelConfig(cfg_degree=2),
    "ulysses2": ParallelConfig(ulysses_degree=2),
    "pipefusion2": ParallelConfig(pipefusion_degree=2, num_pipeline_patch=4),
    "pipefusion4": ParallelConfig(pipefusion_degree=4, num_pipeline_patch=4),
    "cfg2_pipefusion2": ParallelConfig(cfg_degree=2, pipefusion_degree=2, num_pipeline_patch=4),
    "ulysses2_pipefusion2": ParallelConfig(ulysses_degree=2, pipefusion_degree=2, num_pipeline_patch=4),
}
PATCH_COLOURS = ("#4c9be8", "#7ad3a6", "#f2c14e", "#ee6c4d")
WHOLE_COLOUR = "#8d99ae"
#: Pixels: of a row, between rows, of the column of names, of the steps of one GPU.
ROW, GAP, LEFT, WIDTH = 30, 8, 64, 720


@dataclass(frozen=True)
class Work:
    """A micro-batch of one rank. start, end: in steps of one GPU. patch: -1 for the whole latent."""

    step: int
    prompt: str
    span: Span
    patch: int
    start: float = 0.0
    end: float = 0.0


class RecordedLoop(Denoiser):
    """The step loop of one rank, with nothing behind it: what it would run is written down."""

    def _hand_over(self, patch, context, output):
        pass

    def _collect_until(self, patch):
        pass

    def _broadcast_stop(self, evaluation):
        pass

    def _start_solvers(self):
        pass


class Recorder:
    """Takes the place of the model."""

    def __init__(self, patches: list[Span]):
        self.patches = patches
        self.found: list[Work] = []

    def run(self, x, sigma, context):
        whole = context.image is None
        span = Span(0, x.shape[1]) if whole else context.image
        self.found.append(
            Work(context.evaluation, context.prompt, span, -1 if whole else self.patches.index(span))
        )

    def expect(self, context) -> bool:
        return False

    def plan(self, sigmas):
        pass

    def modulate_ahead(self, prompts):
        pass

    def begin_evaluation(self, index, ratio):
        pass

    def drain(self):
        pass


def request_of(config: ParallelConfig) -> Request:
    """Return a request of two prompts over STEPS steps of euler."""
    noise = torch.zeros(1, GRID.tokens, 1)
    prompts = {name: Prompt(name) for name in ("positive", "negative")}
    counts: dict[str, Any] = {"batch": 1, "own_samples": slice(0, 1)}
    return Request(
        config=config,
        prediction=PREDICTIONS["flow"],
        sigmas=torch.linspace(1, 0, STEPS + 1),
        noise=noise,
        latent=noise,
        grid=GRID,
        prompts=prompts,
        conditioning={name: {} for name in prompts},
        reference_tokens=dict.fromkeys(prompts, 0),
        solver="euler",
        cfg=4.0,
        **counts,
    )


def mesh_of(config: ParallelConfig, rank: int) -> Mesh:
    """Return where a rank stands: places and sizes, without process groups."""
    sizes = {"dp": 1, **config.degrees}
    place = [int(each[0]) for each in (layout(config) == rank).nonzero(as_tuple=True)]
    axes = {
        name: Axis(group=None, rank=where, size=sizes[name], ranks=tuple(range(sizes[name])))
        for name, where in zip(config.degrees, place)
    }
    return replace(single(), rank=rank, world_size=config.world_size, **axes)


def recorded(config: ParallelConfig, rank: int) -> list[Work]:
    """Return what a rank runs, in order."""
    request = request_of(config)
    recorder = Recorder(request.patch_spans)
    loop: Any = RecordedLoop
    loop(mesh_of(config, rank), request, recorder, Callbacks()).run()
    return recorder.found


def timeline(config: ParallelConfig) -> list[list[Work]]:
    """Return the work of every rank with its times, in units of one step of both prompts on one GPU.

    A stage begins with a micro-batch when the stage before has ended it. The first stage begins with a patch
    when the last has ended every micro-batch of the step before that overlaps it, of both CFG branches.
    """
    stages = config.pipefusion_degree
    ranks = {rank: recorded(config, rank) for rank in range(config.world_size)}
    stage_of = {rank: mesh_of(config, rank).pp.rank for rank in ranks}
    done: dict[int, list[Work]] = {rank: [] for rank in ranks}
    share = 2 * GRID.tokens * config.sp_degree * stages
    while any(len(done[rank]) < len(ranks[rank]) for rank in ranks):
        for rank, works in ranks.items():
            if len(done[rank]) == len(works):
                continue
            work = works[len(done[rank])]
            ready = _ready(work, rank, stage_of, done, ranks, stages)
            if ready is None:
                continue
            start = max(ready, done[rank][-1].end if done[rank] else 0.0)
            done[rank].append(replace(work, start=start, end=start + len(work.span) / share))
    return [done[rank] for rank in sorted(done)]


def _ready(work: Work, rank: int, stage_of, done, ranks, stages: int) -> float | None:
    """Return when what a micro-batch needs is there; None where some of it has not been computed yet."""
    if stage_of[rank]:
        needed = [(rank - _stride(stage_of), other) for other in ranks[rank] if _same(other, work)]
    else:
        last = [each for each in ranks if stage_of[each] == stages - 1]
        needed = [(each, other) for each in last for other in ranks[each] if _comes_before(other, work)]
    ends = []
    for source, wanted in needed:
        ends_of_source = [each.end for each in done[source] if _same(each, wanted)]
        if not ends_of_source:
            return None
        ends += ends_of_source
    return max(ends, default=0.0)


def _stride(stage_of: dict[int, int]) -> int:
    """Ranks from one stage to the same place on the next."""
    return next((rank for rank in sorted(stage_of) if stage_of[rank] == 1), 1)


def _same(a: Work, b: Work) -> bool:
    return (a.step, a.prompt, a.span) == (b.step, b.prompt, b.span)


def _comes_before(a: Work, b: Work) -> bool:
    return a.step == b.step - 1 and a.span.lo < b.span.hi and b.span.lo < a.span.hi


def drawing(config: ParallelConfig) -> str:
    """Return the timeline of a configuration as SVG, on the scale of one GPU's."""
    rows = timeline(config)
    total = max(work.end for row in rows for work in row)
    scale = WIDTH / STEPS
    height = len(rows) * (ROW + GAP) + 34
    seconds = f"{total:.2f} of {STEPS} steps' time of one GPU"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 16} {height}" '
        f'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{LEFT + WIDTH + 16}" height="{height}" fill="#ffffff"/>',
    ]
    for rank, row in enumerate(rows):
        y = 8 + rank * (ROW + GAP)
        parts.append(f'<text x="8" y="{y + 20}" fill="#16202c">GPU {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW}" fill="#f1f3f5"/>')
        parts += [_box(work, y, scale) for work in row]
    x = LEFT + total * scale
    parts.append(f'<line x1="{x:.1f}" y1="4" x2="{x:.1f}" y2="{height - 24}" stroke="#16202c"/>')
    parts.append(f'<text x="{LEFT}" y="{height - 8}" fill="#16202c">{config.product}: {seconds}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _box(work: Work, y: int, scale: float) -> str:
    colour = WHOLE_COLOUR if work.patch < 0 else PATCH_COLOURS[work.patch % len(PATCH_COLOURS)]
    width = (work.end - work.start) * scale
    x = LEFT + work.start * scale
    opacity = 1 if work.prompt == "positive" else 0.55
    box = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{colour}" '
        f'fill-opacity="{opacity}" stroke="#ffffff" stroke-width="0.7"/>'
    )
    label = f"{work.step + 1}{'+' if work.prompt == 'positive' else '−'}"
    if width < 9 * len(label):
        return box
    return (
        f'{box}<text x="{x + width / 2:.1f}" y="{y + 20}" text-anchor="middle" fill="#16202c">{label}</text>'
    )


def main():
    """Print the time of each configuration, or write the drawings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the drawings")
    write = parser.parse_args().write
    for name, config in DRAWINGS.items():
        if write:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{name}.svg").write_text(drawing(config))
        rows = timeline(config)
        print(f"{name}: {max(work.end for row in rows for work in row):.2f} of {STEPS} steps")


if __name__ == "__main__":
    main()
