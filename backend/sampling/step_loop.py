"""The step loop, one for every parallel mode.

Work is a sequence of model calls: evaluation x part x prompt (branch). A part is the whole latent (serial,
USP, warm-up) or a PipeFusion patch (arXiv 2405.14430). The head (first stage) holds the solvers; the last
stage returns outputs to it. With one stage the head is also the last.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.comm import Pipe, gather, joined
from ..parallel.mesh import Mesh
from ..parallel.pipeline_stage import Forward
from ..parallel.sequence import Span
from .guidance import mix
from .model_runner import Runner
from .request import FreshNoise, Inpaint, Request, problem
from .solver_registry import SOLVER_FUNCTIONS, Evaluation, answer, evaluations


class Cancelled(Exception):
    """The request was cancelled; every rank stopped before the same model call, with nothing under way."""

    def __init__(self, step: int):
        super().__init__(f"cancelled at step {step}")
        self.step = step


@dataclass
class Part:
    """Rows that are evaluated together, and the solvers that step them."""

    span: Span
    tracks: list["Track"]
    with_text: bool


@dataclass
class Track:
    """One solver over the rows of one patch."""

    span: Span
    solver: object
    done: bool = False


@dataclass
class Pending:
    """A part's model outputs that are still on their way to the head."""

    part: Part
    evaluation: Evaluation
    branches: tuple[str, ...]
    opens_step: bool
    closes_step: bool
    outputs: list[Tensor] = field(default_factory=list)
    expected: int = 0


@dataclass(frozen=True)
class Callbacks:
    """on_step(steps done, x0) is called on the head alone, x0 being the prediction with which the step began;
    should_stop() is asked on global rank 0 alone.

    on_denoised(x0) gets the whole batch's of the last step, where a request asks for it.
    """

    on_step: Callable = lambda step, x0: None
    should_stop: Callable[[], bool] = lambda: False
    on_denoised: Callable = lambda x0: None


class Denoiser:
    """Runs one request on this rank."""

    def __init__(self, mesh: Mesh, request: Request, runner: Runner, callbacks: Callbacks):
        self.mesh, self.request, self.runner, self.callbacks = mesh, request, runner, callbacks
        self.sides = request.sides if mesh.cfg.size == 1 else (request.sides[mesh.cfg.rank],)
        self.branches = self._own(request.prompts)
        self.head, self.tail = mesh.pp.first, mesh.pp.last
        self.returns = Pipe(mesh.pp_return, "outputs") if mesh.pp.size > 1 else None
        self.pending: deque[Pending] = deque()
        self.votes: list = []
        self._plan_parts()
        self._begin()

    def _begin(self):
        request = self.request
        self.x, self.x0 = torch.zeros_like(request.noise), torch.zeros_like(request.noise)
        self.inpaint = Inpaint(request)
        self.noise = FreshNoise(request.seed, request.batch, request.grid, self.x.device, request.sigmas)

    def _plan_parts(self):
        request = self.request
        tracks = [Track(span, None) for span in request.patch_spans]
        self.whole = Part(Span(0, request.grid.tokens), tracks, True)
        self.patches = [Part(track.span, [track], index == 0) for index, track in enumerate(tracks)]

    def run(self) -> Tensor:
        """The denoised latent as tokens (B, N, F), valid on the head; raises Cancelled."""
        plan = self._plan()
        self._modulate_ahead(plan)
        if self.head:
            self._start_solvers()
        for index, evaluation in enumerate(plan):
            self._vote(evaluation)
            self.runner.begin_evaluation(_ratio(plan, index))
            opens = index == 0 or plan[index - 1].step != evaluation.step
            closes = index + 1 == len(plan) or plan[index + 1].step != evaluation.step
            branches, before = (
                self.request.prompts_at(evaluation.sigma),
                self.request.prompts_at(plan[index - 1].sigma) if index else (),
            )
            # a prompt that begins to count has no stale keys and values yet
            stale = (
                len(self.patches) > 1
                and evaluation.step >= self.request.warmup_steps
                and set(branches) <= set(before)
            )
            self._evaluate(
                self.patches if stale else [self.whole], evaluation, self._own(branches), opens, closes
            )
        self._collect_until(None)
        self._drain()
        return self.x

    def _own(self, branches) -> tuple[str, ...]:
        """Those whose side this rank evaluates."""
        return tuple(branch for branch in branches if self.request.prompts[branch].side in self.sides)

    def _plan(self) -> list[Evaluation]:
        return evaluations(self.request.solver, problem(self.request, self.noise, Span(0, 0)))

    def _modulate_ahead(self, plan: list[Evaluation]):
        self.runner.modulate_ahead([evaluation.sigma for evaluation in plan], self.branches)

    def _start_solvers(self):
        start = self.request.start()
        for track in self.whole.tracks:
            rows = start[:, track.span.lo : track.span.hi]
            track.solver = SOLVER_FUNCTIONS[self.request.solver](
                rows, problem(self.request, self.noise, track.span)
            )
            self._step(track, None)

    def _evaluate(
        self,
        parts: list[Part],
        evaluation: Evaluation,
        branches: tuple[str, ...],
        opens_step: bool,
        closes_step: bool,
    ):
        calls = [(part, self._micro_batches(part, branches)) for part in parts]
        forwards = [forward for _, micro_batches in calls for forward in micro_batches]
        done = ahead = 0
        for part, micro_batches in calls:
            if self.head:
                self._collect_until(part)
                self.pending.append(
                    Pending(part, evaluation, branches, opens_step, closes_step and part is parts[-1])
                )
            for forward in micro_batches:
                while ahead < min(done + 2, len(forwards)) and self.runner.expect(
                    forwards[ahead]
                ):  # posted in the order in which they come
                    ahead += 1
                self._hand_over(part, forward, self.runner.run(self.x, evaluation.sigma, forward))
                done += 1
                ahead = max(ahead, done)

    def _micro_batches(self, part: Part, branches: tuple[str, ...]) -> list[Forward]:
        """What fills the pipeline while one part is evaluated: the prompts, and in a synchronous step the
        batch's items too."""
        batch, span = self.x.shape[0], None if part is self.whole else part.span
        items = (
            [Span(i, i + 1) for i in range(batch)]
            if part is self.whole and self.returns
            else [Span(0, batch)]
        )
        return [Forward(branch, item, span, part.with_text) for branch in branches for item in items]

    def _hand_over(self, part: Part, forward: Forward, output: Tensor | None):
        """Outputs go to the head: kept where the head is the last stage itself, else sent, and awaited
        there."""
        if self.returns is None:
            self.pending[-1].outputs.append(output)
        elif self.tail:
            self.returns.send(output.float(), self.mesh.pp.ranks[0])
        elif self.head:
            rows = len(part.span.shard(self.mesh.sp.rank, self.mesh.sp.size))
            self.pending[-1].expected += 1
            self.returns.post(
                (len(forward.items), rows, self.x.shape[2]),
                torch.float32,
                self.x.device,
                self.mesh.pp.ranks[-1],
            )

    # ------ the head: outputs -> denoised -> solvers -> next x
    def _collect_until(self, part: Part | None):
        """Step the solvers with every outstanding output that ``part``'s next x depends on (None: with
        all)."""
        while self.pending and (part is None or self._overlap(self.pending[0].part, part)):
            self._collect(self.pending.popleft())

    def _overlap(self, a: Part, b: Part) -> bool:
        return a.span.lo < b.span.hi and b.span.lo < a.span.hi

    def _collect(self, pending: Pending):
        span = pending.part.span
        outputs = self._take(pending)
        predictions = [self._predict(side, outputs, pending) for side in self.sides]
        if self.mesh.cfg.size > 1:  # this rank's side is one of them
            predictions = gather(
                predictions[0], [predictions[0].shape] * self.mesh.cfg.size, self.mesh.cfg, "cfg"
            )
        denoised = predictions[0]
        if len(predictions) == 2:
            denoised = predictions[1] + (predictions[0] - predictions[1]) * self.request.cfg
        denoised = self.inpaint.denoised(denoised, span)
        if pending.opens_step:  # as ComfyUI's solvers report it
            self.x0[:, span.lo : span.hi] = denoised
        for track in pending.part.tracks:
            rows = slice(track.span.lo - span.lo, track.span.hi - span.lo)
            self._step(track, answer(self.request.solver, denoised[:, rows], predictions[-1][:, rows]))
        if pending.closes_step:
            self.callbacks.on_step(pending.evaluation.step + 1, self.x0)

    def _take(self, pending: Pending) -> dict[str, Tensor]:
        """Branch -> output (B, rows of the part, F), of this rank's branches."""
        outputs = pending.outputs or [self.returns.take() for _ in range(pending.expected)]
        if not outputs:  # no prompt counts now
            return {}
        outputs = joined(outputs).float().unflatten(0, (len(pending.branches), -1))
        shapes = [
            (*outputs.shape[:2], len(pending.part.span.shard(i, self.mesh.sp.size)), outputs.shape[3])
            for i in range(self.mesh.sp.size)
        ]
        return dict(zip(pending.branches, joined(gather(outputs, shapes, self.mesh.sp, "outputs"), dim=2)))

    def _predict(self, side: str, outputs: dict[str, Tensor], pending: Pending) -> Tensor:
        """What the prompts of one side predict together, (B, rows of the part, F); nothing, where none
        counts."""
        request, rows = self.request, slice(pending.part.span.lo, pending.part.span.hi)
        x, prompts = (
            self.x[:, rows],
            {branch: request.prompts[branch] for branch in outputs if request.prompts[branch].side == side},
        )
        predictions = [
            request.denoised(x, pending.evaluation.sigma, outputs[branch], pending.part.span)
            for branch in prompts
        ]
        return mix(list(prompts.values()), predictions, rows) if prompts else torch.zeros_like(x)

    def _step(self, track: Track, prediction: Tensor | tuple[Tensor, Tensor] | None):
        """Send a prediction to a solver (None: start it) and place what it asks for, or returns, into x."""
        rows = slice(track.span.lo, track.span.hi)
        try:
            x, sigma, _ = track.solver.send(prediction)
            self.x[:, rows] = self.inpaint.model_input(x, sigma, track.span)
        except StopIteration as end:
            self.x[:, rows] = end.value

    # ------------------------------------------------------------------ cancelling
    def _vote(self, evaluation: Evaluation):
        """Every rank learns here whether to stop. Rank 0 does not wait for the others, so the pipeline keeps
        its overlap."""
        if self.mesh.control is None:
            stop = self.callbacks.should_stop()
        else:
            ballot = torch.tensor(
                [int(self.mesh.rank == 0 and self.callbacks.should_stop())], dtype=torch.uint8
            )
            work = dist.broadcast(ballot, 0, group=self.mesh.control, async_op=True)
            self.votes = [(w, b) for w, b in self.votes if not w.is_completed()] + [(work, ballot)]
            if self.mesh.rank:
                work.wait()
            stop = bool(ballot.item())
        if stop:
            self._drain()
            raise Cancelled(evaluation.step)

    def _drain(self):
        self.runner.drain()
        if self.returns:
            self.returns.drain()
        for work, _ in self.votes:
            work.wait()


def _ratio(plan: list[Evaluation], index: int) -> float:
    """The step in sigma to evaluation ``index`` over the step before it; 0 where there are no two steps."""
    if index < 2:
        return 0.0
    step, before = (float(plan[i].sigma - plan[i - 1].sigma) for i in (index, index - 1))
    return step / before if before else 0.0
