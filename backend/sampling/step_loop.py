"""The step loop, one for every parallel mode.

Work is a sequence of micro-batches: evaluation x patch x prompt. A patch is the whole latent
(serial, USP, warm-up) or a PipeFusion patch (arXiv 2405.14430). The first stage holds the solvers; the last
stage returns outputs to it. With one stage the first is also the last.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.comm import WAIT_CLOCK, Pipe, all_gather, broadcast, cat_or_same
from ..parallel.mesh import Mesh, require_work
from ..parallel.sequence import Span
from ..parallel.step_context import StepContext
from ..runtime.callbacks import never, nothing
from .guidance import mix
from .model_runner import Runner
from .request import FreshNoise, Inpaint, Request, problem
from .solver_registry import SOLVER_FUNCTIONS, Evaluation, evaluations, solver_input
from .solvers.problem import Steps


class RequestCancelled(Exception):
    """The request was cancelled; every rank stopped before the same model call, with nothing under way."""

    def __init__(self, step: int):
        super().__init__(f"cancelled at step {step}")
        self.step = step


@dataclass
class SolverState:
    """One solver over the tokens of a patch; it runs on the first stage alone."""

    span: Span
    solver: Steps | None = None


@dataclass
class Patch:
    span: Span
    states: list[SolverState]
    with_text: bool


@dataclass
class Pending:
    """A patch's model outputs that are still on their way to the first stage."""

    patch: Patch
    evaluation: Evaluation
    prompts: tuple[str, ...]
    opens_step: bool
    closes_step: bool
    outputs: list[Tensor] = field(default_factory=list)
    expected: int = 0


@dataclass(frozen=True)
class Callbacks:
    """What the step loop reports. on_step(steps done, x0): on the first stage; x0 (B, N, F) is the prediction
    with which the step began. should_stop(): asked on global rank 0. on_denoised(x0): of the whole batch and
    the last step, if a request asks for it. on_begin(step): on every rank before each evaluation."""

    on_step: Callable = nothing
    should_stop: Callable[[], bool] = never
    on_denoised: Callable = nothing
    on_begin: Callable[[int], None] = nothing


def broadcast_from_first_rank(mesh: Mesh, drawn: Tensor) -> Tensor:
    """Return what the first rank of a first stage has ``drawn``, where GPUs differ: CUDA's random numbers
    depend on how many multiprocessors a GPU has. All ranks of a first stage draw in the same order."""
    return broadcast(drawn, (mesh.tp, mesh.sp, mesh.cfg, mesh.dp)) if mesh.gpus_differ else drawn


class Denoiser:
    """Runs one request on this rank."""

    def __init__(self, mesh: Mesh, request: Request, runner: Runner, callbacks: Callbacks):
        self.mesh = mesh
        self.request = request
        self.runner = runner
        self.callbacks = callbacks
        self.branches = request.branches if mesh.cfg.size == 1 else (request.branches[mesh.cfg.rank],)
        self.prompts = self._own(tuple(request.prompts))
        self.first_stage = mesh.pp.is_first
        edge = mesh.edges.outputs
        self.outputs = Pipe(incoming=edge, outgoing=edge, mechanism="outputs") if mesh.pp.size > 1 else None
        self.pending: deque[Pending] = deque()
        self.stop_broadcasts: list[tuple[dist.Work, Tensor]] = []
        states = [SolverState(span) for span in request.patch_spans]
        self.whole = Patch(Span(0, request.grid.tokens), states, with_text=True)
        self.patches = [Patch(each.span, [each], with_text=each is states[0]) for each in states]
        self._begin()
        self.plan = self._plan()
        self.ratios = [_ratio(self.plan, index) for index in range(len(self.plan))]

    @property
    def planned_calls(self) -> int:
        """The calls of the model that this rank makes."""
        return sum(len(contexts) for index in range(len(self.plan)) for _, contexts in self._calls(index)[1])

    def _begin(self):
        request = self.request
        self.x = torch.zeros_like(request.noise)
        self.x0 = torch.zeros_like(request.noise)
        self.inpaint = Inpaint(request)
        drawn = (request.seed, request.batch, request.grid, self.x.device, request.sigmas)
        self.noise = FreshNoise(*drawn, partial(broadcast_from_first_rank, self.mesh))

    def run(self) -> Tensor:
        """Return the denoised tokens (B, N, F), valid on the first stage. Raises RequestCancelled."""
        self.runner.plan([evaluation.sigma for evaluation in self.plan])
        self._modulate_ahead()
        if self.first_stage:
            self._start_solvers()
        for index, evaluation in enumerate(self.plan):
            self.callbacks.on_begin(evaluation.step)
            self._broadcast_stop(evaluation)
            self._evaluate(index)
        self._collect_until(None)
        self._drain()
        return self.x

    def _own(self, prompts: tuple[str, ...]) -> tuple[str, ...]:
        found = self.request.prompts
        return tuple(name for name in prompts if found[name].branch in self.branches)

    def _plan(self) -> list[Evaluation]:
        return evaluations(self.request.solver, problem(self.request, self.noise, Span(0, 0)))

    def _modulate_ahead(self):
        self.runner.modulate_ahead(self.prompts)

    def _start_solvers(self):
        start = self.request.start()
        for state in self.whole.states:
            tokens = start[:, state.span.indices]
            solve = SOLVER_FUNCTIONS[self.request.solver]
            state.solver = solve(tokens, problem(self.request, self.noise, state.span))
            self._step(state, None)

    def _is_stale(self, index: int) -> bool:
        """Return whether the evaluation reads stale K/V; a prompt that begins to count has none yet."""
        evaluation = self.plan[index]
        if len(self.patches) == 1 or evaluation.step < self.request.config.warmup_steps:
            return False
        before = self.request.prompts_at(self.plan[index - 1].sigma) if index else ()
        return set(self.request.prompts_at(evaluation.sigma)) <= set(before)

    def _calls(self, index: int) -> tuple[tuple[str, ...], list[tuple[Patch, list[StepContext]]]]:
        """Return this rank's prompts of an evaluation, and its patches with their micro-batches."""
        prompts = self._own(self.request.prompts_at(self.plan[index].sigma))
        patches = self.patches if self._is_stale(index) else [self.whole]
        return prompts, [(patch, self._micro_batches(patch, index, prompts)) for patch in patches]

    def _evaluate(self, index: int):
        """Run one evaluation, from its modulation on: what meters of a steady state count."""
        plan = self.plan
        evaluation = plan[index]
        self.runner.begin_evaluation(index, self.ratios[index])
        opens = index == 0 or plan[index - 1].step != evaluation.step
        closes = index + 1 == len(plan) or plan[index + 1].step != evaluation.step
        prompts, calls = self._calls(index)
        contexts = [context for _, micro_batches in calls for context in micro_batches]
        done = ahead = 0
        for patch, micro_batches in calls:
            if self.first_stage:
                self._collect_until(patch)
                ends = closes and patch is calls[-1][0]
                self.pending.append(Pending(patch, evaluation, prompts, opens_step=opens, closes_step=ends))
            for context in micro_batches:
                most = min(done + 2, len(contexts))
                while ahead < most and self.runner.expect(contexts[ahead]):  # in the order in which they come
                    ahead += 1
                self._hand_over(patch, context, self.runner.run(self.x, evaluation.sigma, context))
                done += 1
                ahead = max(ahead, done)

    def _micro_batches(self, patch: Patch, index: int, prompts: tuple[str, ...]) -> list[StepContext]:
        """Return the micro-batches: prompts, and in a pipeline's synchronous step each sample by itself."""
        batch = self.x.shape[0]
        whole = patch is self.whole
        spans = [Span(0, batch)]
        if whole and self.outputs:
            spans = [Span(i, i + 1) for i in range(batch)]
        image = None if whole else patch.span
        return [StepContext(name, index, span, image, patch.with_text) for name in prompts for span in spans]

    def _hand_over(self, patch: Patch, context: StepContext, output: Tensor | None):
        """Bring outputs to the first stage, or leave them there where it is the last one too."""
        if self.outputs is None:
            assert output is not None, "one stage has every block"
            self.pending[-1].outputs.append(output)
        elif output is not None:
            self.outputs.send(output.float(), self.mesh.pp.ranks[0])
        elif self.first_stage:
            shape = (len(context.sample_span), self._token_counts(patch)[self.mesh.sp.rank], self.x.shape[2])
            self.pending[-1].expected += 1
            self.outputs.post(shape, torch.float32, self.x.device, self.mesh.pp.ranks[-1])

    # ------ the first stage: outputs -> denoised -> solvers -> next x
    def _collect_until(self, patch: Patch | None):
        """Step the solvers with every output that the next x of ``patch`` depends on (None: with all)."""
        while self.pending and (patch is None or self.pending[0].patch.span.overlaps(patch.span)):
            self._collect(self.pending.popleft())

    def _collect(self, pending: Pending):
        span = pending.patch.span
        outputs = self._take(pending)
        predictions = [self._predict(branch, outputs, pending) for branch in self.branches]
        if self.mesh.cfg.size > 1:  # this rank's is one of them
            shapes = [tuple(predictions[0].shape)] * self.mesh.cfg.size
            predictions = all_gather(predictions[0], shapes, self.mesh.cfg, "cfg")
        denoised = predictions[0]
        if len(predictions) == 2:
            denoised = predictions[1] + (predictions[0] - predictions[1]) * self.request.cfg
        denoised = self.inpaint.denoised(denoised, span)
        if pending.opens_step:  # as ComfyUI's solvers report it
            self.x0[:, span.indices] = denoised
        for state in pending.patch.states:
            tokens = slice(state.span.lo - span.lo, state.span.hi - span.lo)
            uncond = predictions[-1][:, tokens]
            self._step(
                state, solver_input(self.request.solver, denoised=denoised[:, tokens], negative=uncond)
            )
        if pending.closes_step:
            self.callbacks.on_step(pending.evaluation.step + 1, self.x0)

    def _take(self, pending: Pending) -> dict[str, Tensor]:
        """Return prompt -> output (B, tokens of the patch, F), of this rank's prompts."""
        received = pending.outputs
        if self.outputs is not None:
            received = [self.outputs.take() for _ in range(pending.expected)]
        if not received:  # no prompt counts now
            return {}
        local = cat_or_same(received).float().unflatten(0, (len(pending.prompts), -1))
        shapes = [(*local.shape[:2], count, local.shape[3]) for count in self._token_counts(pending.patch)]
        gathered = all_gather(local, shapes, self.mesh.sp, "outputs")
        return dict(zip(pending.prompts, cat_or_same(gathered, dim=2)))

    def _token_counts(self, patch: Patch) -> list[int]:
        sp = self.mesh.sp
        return [len(patch.span.shard(i, sp.size, sp.shares)) for i in range(sp.size)]

    def _predict(self, branch: str, outputs: dict[str, Tensor], pending: Pending) -> Tensor:
        """Return a CFG branch's prediction, (B, tokens of the patch, F); zeros where no prompt counts."""
        request = self.request
        span = pending.patch.span
        tokens = span.indices
        x = self.x[:, tokens]
        prompts = {name: request.prompts[name] for name in outputs if request.prompts[name].branch == branch}
        if not prompts:
            return torch.zeros_like(x)
        sigma = pending.evaluation.sigma
        predictions = [request.denoised(x, sigma, outputs[name], span) for name in prompts]
        return mix(list(prompts.values()), predictions, tokens)

    def _step(self, state: SolverState, prediction: Tensor | tuple[Tensor, Tensor] | None):
        """Send a prediction to a solver (None: start it) and place what it asks for, or returns, into x."""
        assert state.solver is not None, "solvers are started before the first evaluation"
        tokens = state.span.indices
        try:
            x, sigma, _ = state.solver.send(prediction)
            self.x[:, tokens] = self.inpaint.model_input(x, sigma, state.span)
        except StopIteration as end:
            self.x[:, tokens] = end.value

    # ------------------------------------------------------------------ cancelling
    def _broadcast_stop(self, evaluation: Evaluation):
        """Learn whether to stop. Rank 0 does not wait for the others, so the pipeline keeps its overlap."""
        if self.mesh.control is None:
            stop = self.callbacks.should_stop()
        else:
            own = int(self.mesh.rank == 0 and self.callbacks.should_stop())
            flag = torch.tensor([own], dtype=torch.uint8)
            work = require_work(dist.broadcast(flag, 0, group=self.mesh.control, async_op=True))
            self.stop_broadcasts = [(w, b) for w, b in self.stop_broadcasts if not w.is_completed()] + [
                (work, flag)
            ]
            if self.mesh.rank:
                with WAIT_CLOCK:
                    work.wait()
            stop = bool(flag.item())
        if stop:
            self._drain()
            raise RequestCancelled(evaluation.step)

    def _drain(self):
        self.runner.drain()
        if self.outputs:
            self.outputs.drain()
        for work, _ in self.stop_broadcasts:
            work.wait()


def _ratio(plan: list[Evaluation], index: int) -> float:
    """Return the step in sigma to evaluation ``index`` over the one before; 0 without two steps."""
    if index < 2:
        return 0.0
    step = float(plan[index].sigma - plan[index - 1].sigma)
    before = float(plan[index - 1].sigma - plan[index - 2].sigma)
    return step / before if before else 0.0
