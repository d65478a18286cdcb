"""Texts under nodes: on the page that has queued the graph, as older pages may have them."""

import sys
from types import SimpleNamespace

import pytest
from without_comfy import on_stand_ins


@pytest.fixture
def progress(monkeypatch):
    """The module nodes/host/progress.py while node 7 runs for the page "a"; ``sent``: what pages get."""
    with on_stand_ins("host.progress") as module:
        sent = []
        server = SimpleNamespace(client_id="a", send_progress_text=lambda *given: sent.append(given))
        monkeypatch.setitem(
            sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace(instance=server))
        )
        monkeypatch.setattr(module, "get_executing_context", lambda: SimpleNamespace(node_id="7"))
        yield SimpleNamespace(text=module.node_text, module=module, sent=sent, server=server)


def test_only_the_page_that_queued_the_graph_shows_its_texts(progress):
    send = progress.text()
    send("step 1/4")
    progress.server.client_id = None  # of a script, which no page shows
    send("step 2/4")
    queued = sys.modules[progress.module.queued_by.__module__]
    queued.note_queued({"prompt": {"7": {}}, "client_id": "b"})  # which is validated meanwhile
    send("reading the model's headers")
    progress.server.client_id = "a"  # whose graph runs
    queued.note_queued({"prompt": {"7": {}}})
    send("of a script's graph, which is validated meanwhile")
    assert progress.sent == [("step 1/4", "7", "a"), ("reading the model's headers", "7", "b")]


@pytest.mark.parametrize(
    "text, shown", [("<img src=x onerror=run()>", "‹img src=x onerror=run()>"), ("", " ")]
)
def test_no_text_is_html_and_none_is_empty(progress, text, shown):
    """Names of tensors stand in refusals, which ComfyUI 0.3.64's page takes as HTML; an empty text is
    ignored, and would leave a line that is no longer true."""
    progress.text()(text)
    assert progress.sent == [(shown, "7", "a")]
