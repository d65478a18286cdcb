"""A real ComfyUI, headless on the CPU, with packs symlinked in; and a client that queues a graph and follows
it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from comfy_websocket import WebSocket

PACK = Path(__file__).resolve().parents[1]
START_SECONDS = 180


class CannotStart(Exception):
    """ComfyUI is not there, or not all that it imports is; the message says which."""


@dataclass
class Run:
    """What one queued graph did. steps, loaded: progress of samplers and of loaders, (value, most)."""

    status: str = ""  # success | error | interrupted | rejected
    message: str = ""
    node_errors: dict = field(default_factory=dict)
    outputs: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)
    loaded: list = field(default_factory=list)
    previews: int = 0
    texts: list = field(default_factory=list)  # shown under nodes
    cached: list = field(default_factory=list)  # nodes that did not run again
    seconds: float = 0.0


class ComfyServer:
    """Starts in ``folder`` (--base-directory); the checkout is not written to. CannotStart where it cannot
    run here."""

    def __init__(self, folder: Path, packs: dict[str, Path]):
        checkout = Path(os.environ.get("COMFYUI_PATH", Path.home() / "ComfyUI"))
        if not (checkout / "main.py").exists():
            raise CannotStart(f"no ComfyUI at {checkout} (set COMFYUI_PATH)")
        for name in ("custom_nodes", "models/diffusion_models", "input", "output", "temp", "user"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name, pack in packs.items():
            (folder / "custom_nodes" / name).symlink_to(pack, target_is_directory=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.log = folder, folder / "server.log"
        command = [
            os.environ.get("COMFYUI_PYTHON", sys.executable),
            str(checkout / "main.py"),
            "--cpu",
            "--listen",
            "127.0.0.1",
            "--port",
            str(self.port),
            "--base-directory",
            str(folder),
            "--database-url",
            f"sqlite:///{folder}/comfyui.db",
            "--disable-auto-launch",
            "--disable-api-nodes",
            "--preview-method",
            "latent2rgb",
            # as on a GPU: the attention that it takes on a CPU adds masks of truth values as numbers
            "--use-pytorch-cross-attention",
        ]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._wait_until_up()

    def _wait_until_up(self):
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                output = self.log.read_text(errors="replace").strip()
                if "ModuleNotFoundError" in (last := output.split("\n")[-1]):
                    raise CannotStart(f"this Python lacks what ComfyUI imports (set COMFYUI_PYTHON): {last}")
                raise AssertionError(f"ComfyUI does not start: {output[-3000:]}")
            try:
                self.get("/system_stats")
                return
            except OSError:
                time.sleep(0.25)
        self.stop()
        raise AssertionError(
            f"ComfyUI was not up after {START_SECONDS} s: {self.log.read_text(errors='replace')[-2000:]}"
        )

    def fetch(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
            return response.read()

    def get(self, path: str):
        return json.loads(self.fetch(path))

    def post(self, path: str, data: dict) -> tuple[int, dict]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps(data).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=START_SECONDS) as response:
                return response.status, json.loads(response.read() or "{}")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or "{}")

    def run(
        self, graph: dict, at_step=lambda step: None, seconds: float = 240, at_text=lambda text: None
    ) -> Run:
        """Queue ``graph`` and follow it to its end; ``at_step(step)`` is called after every step,
        ``at_text(text)`` with every text under a node."""
        client, run, began = uuid.uuid4().hex, Run(), time.monotonic()
        websocket = WebSocket("127.0.0.1", self.port, f"/ws?clientId={client}")
        try:
            status, reply = self.post("/prompt", {"prompt": graph, "client_id": client})
            run.node_errors = reply.get("node_errors", {})
            if status != 200:
                errors = [error for node in run.node_errors.values() for error in node["errors"]]
                run.status = "rejected"
                run.message = errors[0]["details"] if errors else json.dumps(reply)
                return run
            while not run.status:
                assert time.monotonic() - began < seconds, f"the graph still runs after {seconds} s"
                received = websocket.receive(1.0)
                if received is not None:
                    texts = len(run.texts)
                    self._take(run, graph, reply["prompt_id"], *received, at_step)
                    for text in run.texts[texts:]:
                        at_text(text)
        finally:
            websocket.close()
        run.seconds = time.monotonic() - began
        run.outputs = self._outputs(reply["prompt_id"])
        return run

    @staticmethod
    def _take(run: Run, graph: dict, prompt_id: str, is_text: bool, payload: bytes, at_step):
        if not is_text:
            run.previews += payload[:4] == b"\0\0\0\1"
            if payload[:4] == b"\0\0\0\3":
                run.texts.append(payload[8 + int.from_bytes(payload[4:8], "big") :].decode())
            return
        message = json.loads(payload)
        kind, data = message["type"], message["data"]
        if data.get("prompt_id", prompt_id) != prompt_id:
            return
        if kind == "progress" and graph[data["node"]]["class_type"].startswith("LoadParallel"):
            run.loaded.append((data["value"], data["max"]))
        elif kind == "progress":
            run.steps.append((data["value"], data["max"]))
            at_step(data["value"])
        elif kind == "execution_cached":
            run.cached += data["nodes"]
        elif kind == "execution_error":
            run.status, run.message = "error", data["exception_message"]
        elif kind in ("execution_success", "execution_interrupted"):
            run.status = kind.removeprefix("execution_")

    def _outputs(self, prompt_id: str) -> dict:
        for _ in range(100):  # the history is written just after the last message
            history = self.get(f"/history/{prompt_id}")
            if prompt_id in history:
                return history[prompt_id]["outputs"]
            time.sleep(0.05)
        return {}

    def descendants(self, containing: str = "") -> dict[int, str]:
        """Process id -> command line of everything that this server started, near or far."""
        lines: dict[int, str] = {}
        if self.process.poll() is None:
            for each in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):  # it ended while we looked
                    lines[each.pid] = " ".join(each.cmdline())
        return {pid: line for pid, line in lines.items() if containing in line}

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
