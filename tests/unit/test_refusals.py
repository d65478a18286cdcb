"""What the side panel keeps of the latest error, on stand-ins for ComfyUI's modules."""

from types import SimpleNamespace

import pytest
from without_comfy import on_stand_ins

from backend.config import ConfigError
from backend.protocol import BackendError

TORCHRUN = """\
Traceback (most recent call last):
  File "torch/distributed/run.py", line 1, in <module>
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
backend.worker FAILED
"""


@pytest.fixture
def refusals(monkeypatch):
    """The module nodes/host/refusals.py, with no error so far; ``sent``: the texts under its node."""
    with on_stand_ins("host.refusals") as module:
        sent = []
        monkeypatch.setattr(module, "node_text", lambda: sent.append)
        yield SimpleNamespace(module=module, sent=sent, latest=module.LATEST)


def fail(refusals, error: Exception):
    with pytest.raises(type(error)), refusals.module.errors_on_node():
        raise error


def test_an_error_is_past_once_a_sampling_has_succeeded(refusals):
    refusals.module.note_success()
    assert not refusals.latest
    fail(refusals, ConfigError("gpus is 9"))
    assert refusals.sent == ["gpus is 9"] and not refusals.latest["past"]
    refusals.module.note_success()
    assert refusals.latest["text"] == "gpus is 9" and refusals.latest["past"]
    fail(refusals, ConfigError("gpus is 8"))
    assert not refusals.latest["past"]


@pytest.mark.parametrize(
    "log, shown",
    [
        ("rank 1 died\n" + TORCHRUN, "rank 1 died\n"),
        ("rank 1 died\nTraceback (most recent call last):\n  of the rank\n", None),
        ("first\n" + 400 * "a line\n" + 200 * "another line\n", 200 * "another line\n"),
        (TORCHRUN, ""),
    ],
    ids=["torchrun's", "a rank's", "long", "nothing else"],
)
def test_the_end_of_a_log_is_whole_lines_of_ranks(refusals, monkeypatch, log, shown):
    monkeypatch.setattr(refusals.module, "log_of_last_backend", lambda: log)
    monkeypatch.setattr(refusals.module, "LOG_TAIL", 2600 + 3)
    fail(refusals, BackendError("the backend ended"))
    assert refusals.latest["log"] == (log if shown is None else shown)
