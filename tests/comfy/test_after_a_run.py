"""What nodes leave behind once a run has ended: the panel's line of what goes on, and one rank's times."""

from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules

with comfy_modules():
    import comfy.model_management
    from parallel_dit.backend.protocol import Progress
    from parallel_dit.nodes.host import one_rank
    from parallel_dit.nodes.host.progress import NO_PREVIEW, NodeStatus, Reporter
    from parallel_dit.nodes.panel import backends as panel


@pytest.mark.parametrize("ends", ["well", "cancelled"])
@pytest.mark.parametrize(
    "make", [NodeStatus, lambda: Reporter(None, torch.zeros(1), 2, True, False)], ids=["node", "sampler"]
)
def test_nothing_goes_on_after_a_run(make, ends):
    """Stop would interrupt whatever else ComfyUI runs."""
    try:
        with make() as found:
            status = getattr(found, "status", found)
            status.show("step 1/2")
            assert NodeStatus.latest == "step 1/2"
            if ends == "cancelled":
                raise comfy.model_management.InterruptProcessingException
    except comfy.model_management.InterruptProcessingException:
        pass
    assert NodeStatus.latest == ""


def test_a_preview_without_room_ends_no_sampling():
    """A VAE of previews runs out of memory next to the ranks; it is said once."""
    steps, said = [], []

    def callback(step, x0, x, total):
        steps.append(step)
        if step != 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with Reporter(callback, torch.zeros(1, 4, 2, 2), 3, True, True) as reporter:
        reporter.status.send = said.append
        for step in (1, 2):
            reporter(Progress(step, 3))
        reporter.last(torch.ones(1), torch.ones(1))
        assert reporter.status.sentences == [NO_PREVIEW] and NO_PREVIEW in said[-1]
    assert steps == [0, 1, 2]


@pytest.mark.parametrize("is_busy, is_left", [(False, False), (True, False), (True, True)])
def test_stop_interrupts_what_runs_on_the_ranks_alone(is_busy, is_left, monkeypatch):
    """Ranks that wait, or end what was cancelled, are ended while ComfyUI goes on with a graph that has
    nothing to do with them."""
    found = []
    backends = [SimpleNamespace(process=object(), is_busy=is_busy, is_left=is_left)]
    monkeypatch.setattr(panel.pool, "backends", lambda: backends)
    monkeypatch.setattr(panel, "executes", lambda kind: False)  # its graph has no loader
    monkeypatch.setattr(panel.pool, "close_all", lambda: found.append("closed"))
    interrupt = "interrupt_current_processing"
    monkeypatch.setattr(comfy.model_management, interrupt, lambda: found.append("interrupted"))
    panel.stop()
    assert found == ["interrupted"] * (is_busy and not is_left) + ["closed"]


def test_times_that_cannot_be_written_cost_no_latent(tmp_path, monkeypatch):
    """A run has ended when its time is stored: a full disk, or a folder of somebody else's."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(one_rank, "path", lambda: tmp_path / "file" / "one_rank.json")
    one_rank.note_seconds("request", 1.0)
    assert one_rank.least_seconds("request") is None
    monkeypatch.setattr(one_rank, "path", lambda: tmp_path / "one_rank.json")
    one_rank.note_seconds("request", 1.0)
    assert one_rank.least_seconds("request") == 1.0
