"""queue_prompts.py of docs/headless.md, with a ComfyUI that fails."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from page_examples import examples

GRAPH = {
    "1": {"class_type": "CLIPTextEncode", "inputs": {"text": ""}},
    "2": {"class_type": "KSampler", "inputs": {"positive": ["1", 0]}},
}
FAILED = ["execution_error", {"node_type": "KSampler", "exception_message": "no memory\n"}]
#: What has come of each prompt; of one that was deleted nothing has.
HISTORY = {
    "a": {"status": {"status_str": "success", "messages": [["execution_start", {}]]}},
    "b": {"status": {"status_str": "error", "messages": [FAILED]}},
}


class Handler(BaseHTTPRequestHandler):
    left: list[str] = []

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        found = {name: HISTORY[name]} if name in HISTORY else {}
        queues = {"queue_running": [], "queue_pending": []}
        self.answer(200, queues if self.path == "/queue" else found)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        name = self.left.pop(0)
        refusal = {"node_errors": {"2": "model is missing"}}
        self.answer(200, {"prompt_id": name}) if name != "wrong" else self.answer(400, refusal)

    def answer(self, code: int, value: dict):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_):
        pass


@pytest.mark.parametrize(
    "prompts, code, says",
    [
        (["a", "b", "deleted"], 0, ["1/3 success", "2/3 error KSampler: no memory", "3/3 deleted"]),
        (["a", "wrong"], 1, []),
    ],
)
def test_what_comes_of_each_prompt_is_said(tmp_path, monkeypatch, prompts, code, says):
    monkeypatch.setattr(Handler, "left", list(prompts))
    (tmp_path / "prompts").mkdir()
    for index, _ in enumerate(prompts):
        (tmp_path / f"prompts/{index}.txt").write_text("a cat")
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    (tmp_path / "queue_prompts.py").write_text(examples("headless.md")["queue_prompts.py"])
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        env = {**os.environ, "COMFY": f"http://127.0.0.1:{server.server_port}", "no_proxy": "127.0.0.1"}
        command = [sys.executable, "queue_prompts.py", "prompts", "graph.json"]
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        server.shutdown()
    assert (ran.returncode, ran.stdout.splitlines()) == (code, says)
    assert ("model is missing" in ran.stderr) is bool(code)
