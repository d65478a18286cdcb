"""What somebody sees while ranks work: ComfyUI's bar, preview and text on the node, the terminal's bar."""

import time
from collections.abc import Callable

import comfy.model_management
import torch
from comfy_execution.utils import get_executing_context
from tqdm.auto import tqdm

from ...backend.client.connected import Connected
from ...backend.protocol import Progress
from ...backend.runtime.callbacks import nothing
from ..graph.queued_graph import queued_by
from .report import pace

#: Shown until the ranks have stopped.
CANCELLING = "cancelling: the ranks end the call of the model in progress"
#: Shown as long as the sampling runs.
NO_PREVIEW = (
    "There is no room for previews next to the ranks on ComfyUI's GPU; sampling goes on. The preview method "
    "latent2rgb needs none."
)
#: Least seconds between two lines of text on the node.
TEXT_SECONDS = 0.5


class NodeStatus:
    """A line of text under the node that runs now, below sentences that stay as long as it runs. ``latest``:
    the line of whichever it was, for the side panel."""

    latest = ""

    def __init__(self, backend: Connected | None = None):
        self.backend = backend
        self.send = node_text()
        self.sentences: list[str] = []
        self.shown = ""
        self.turn = ""

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        """Leave no line that is no longer true."""
        interrupt = comfy.model_management.InterruptProcessingException
        if self.shown:
            is_cancelled = kind is not None and issubclass(kind, interrupt)
            left = self.backend.left_line if self.backend is not None else ""
            self.show(left or "cancelled" if is_cancelled else "")
        NodeStatus.latest = ""

    def show(self, line: str):
        """Show ``line``, below the sentences, unless it is there already."""
        NodeStatus.latest = line
        text = "\n".join([*self.sentences, *([line] if line else [])])
        if text != self.shown:
            self.shown = text
            self.send(text)

    def warn(self, sentence: str):
        """Show a sentence that stays."""
        self.sentences.append(sentence)
        self.show("")

    def interrupted(self, line: str = CANCELLING, backend: Connected | None = None) -> bool:
        """Return whether somebody has pressed Cancel; then show ``line``, on what it waits for. Else show for
        which other client's request one to ``backend`` waits, or what its first step does that takes a
        while."""
        self.backend = backend or self.backend
        turn = (backend.wait_line or backend.step_line) if backend is not None else ""
        if turn or (self.turn and self.turn == NodeStatus.latest):  # what it has said is no longer true then
            self.show(turn)
        self.turn = turn
        is_cancelled = comfy.model_management.processing_interrupted()
        if is_cancelled:
            self.show(line)
        return is_cancelled

    def check(self, line: str, backend: Connected | None = None):
        """Raise ComfyUI's interrupt where somebody has pressed Cancel, and show ``line``; as interrupted."""
        if self.interrupted(line, backend):
            comfy.model_management.throw_exception_if_processing_interrupted()


def interrupt() -> BaseException:
    """Return ComfyUI's interrupt, for a request that the ranks have cancelled. Its own check takes note of it
    where somebody has pressed Cancel, and raises it then."""
    comfy.model_management.throw_exception_if_processing_interrupted()
    return comfy.model_management.InterruptProcessingException()


class Reporter:
    """Progress of the ranks -> ComfyUI's callback, which draws bar and preview and raises on an interrupt,
    and the time that is left. ``latent``: stands for x0 (B, C, [T,] H, W) until a preview comes.
    ``holds_last``: the last step is reported by ``last`` alone. ``backend``: of the ranks."""

    def __init__(
        self,
        callback,
        latent: torch.Tensor,
        total: int,
        disable_pbar: bool,
        holds_last: bool,
        backend: Connected | None = None,
    ):
        self.latest = latent
        self.total = total
        self.holds_last = holds_last
        self.bar = tqdm(total=total, disable=disable_pbar)
        self.status = NodeStatus(backend)
        self.callback = callback and tolerate_preview_oom(callback, self.status)
        self.began = time.monotonic()
        self.said = float("-inf")

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        self.bar.close()
        if kind is not None:
            self.status.__exit__(kind, *error)
        NodeStatus.latest = ""  # what stays under the node is of a run that has ended

    def __call__(self, progress: Progress):
        if "x0" in progress.tensors:
            self.latest = progress.tensors["x0"].to(self.latest.device)
        if not (self.holds_last and progress.step == self.total):
            self._report(progress.step, self.latest, self.latest)

    def last(self, denoised: torch.Tensor, samples: torch.Tensor):
        """Report the last step with its own prediction and the result."""
        self._report(self.total, denoised, samples)

    def _report(self, step: int, x0: torch.Tensor, x: torch.Tensor):
        self.bar.update(step - self.bar.n)
        now = time.monotonic()
        if step == self.total or now - self.said >= TEXT_SECONDS:
            self.said = now
            self.status.show(status(step, self.total, now - self.began))
        if self.callback is None:
            return
        try:
            self.callback(step - 1, x0, x, self.total)
        except comfy.model_management.InterruptProcessingException:
            self.status.show(CANCELLING)
            raise


def tolerate_preview_oom(callback: Callable, status: NodeStatus) -> Callable:
    """Return ComfyUI's ``callback`` of a step, whose preview may run out of memory: the ranks have what they
    need, and the sampling goes on."""

    def call(*arguments):
        try:
            callback(*arguments)
        except comfy.model_management.OOM_EXCEPTION:
            comfy.model_management.soft_empty_cache()
            if NO_PREVIEW not in status.sentences:
                status.warn(NO_PREVIEW)

    return call


def status(step: int, total: int, seconds: float) -> str:
    """Return one line: how far, how fast and how long still."""
    each = seconds / step
    return f"step {step}/{total}, {tqdm.format_interval(each * (total - step))} left ({pace(each)})"


def node_text() -> Callable[[str], None]:
    """Return a function that shows a text under the node that runs now, or is validated, on the page that has
    queued it; it does nothing without a server or a page."""
    context = get_executing_context()
    if context is None:
        return nothing
    from server import PromptServer  # ComfyUI's own, whole only once the server is up

    server = PromptServer.instance

    def send(text: str):
        validated = queued_by()  # other pages may have other nodes of that number
        page = server.client_id if validated is None else validated
        if page:
            # older pages take it as HTML, names in files included, and none shows an empty text
            server.send_progress_text(text.replace("<", "‹") or " ", context.node_id, page)

    return send
