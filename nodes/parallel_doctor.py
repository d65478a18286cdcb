"""The ParallelDoctor node: scripts/doctor.py, run by ComfyUI's own Python, as text and JSON."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import comfy.model_management
from comfy_api.latest import io

from ..backend.client import pool
from ..backend.client.launching import fork_guard
from ..backend.client.launching.child_process import end_process
from ..backend.protocol import BackendError
from .host.progress import NodeStatus
from .host.refusals import errors_on_node
from .host.report import shown
from .host.schema import ALIASES, schema

DOCTOR = Path(__file__).resolve().parents[1] / "scripts" / "doctor.py"
#: Lines of the report that are shown while it runs.
SHOWN_LINES = 12
POLL_SECONDS = 0.2
#: The doctor ends its ranks and programs within this; then it is killed.
END_SECONDS = 40.0
CANCELLING = "cancelling: the doctor ends"


class ParallelDoctor(io.ComfyNode):
    """Nothing -> what is wrong with this machine, as text and as JSON."""

    @classmethod
    def define_schema(cls):
        return schema(
            *ALIASES,
            *("doctor", "diagnose", "benchmark", "nccl", "health", "system check"),
            node_id="ParallelDoctor",
            display_name="Parallel Doctor",
            description="Says what is wrong with this machine's GPUs, links and packages, in plain words. "
            "With full it runs every parallel method on tiny models and measures them.",
            inputs=[
                io.Boolean.Input(
                    "full",
                    default=False,
                    tooltip="Run the ranks, too: every method against one GPU, kernels, memory and seconds a "
                    "step. Models of ComfyUI and of other ranks leave the GPUs first.",
                ),
                io.Float.Input(
                    "minutes",
                    default=10.0,
                    min=1.0,
                    max=120.0,
                    tooltip="Longest time of full, in minutes. What is left is reported as not run; slow "
                    "GPUs need more, and the report says how many.",
                ),
                io.Combo.Input(
                    "device",
                    options=["auto", "cuda", "cpu"],
                    tooltip="Where full runs: GPUs, or processes on the CPU. auto = GPUs if there are any.",
                ),
            ],
            outputs=[
                io.String.Output(
                    display_name="report", tooltip="Each line is ok, warning or problem; full adds a table."
                ),
                io.String.Output(
                    display_name="json",
                    tooltip="The same with all numbers, to attach to an issue. It names GPUs, versions, and "
                    "variables such as NCCL_*; read it first.",
                ),
            ],
            is_output_node=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **inputs):
        """Run it every time: machines change."""
        return time.monotonic()

    @classmethod
    @errors_on_node()
    def execute(cls, full=False, minutes=10.0, device="auto") -> io.NodeOutput:
        options = ["--full", "--minutes", str(minutes), "--device", device] if full else []
        if full:
            pool.close_all()
            comfy.model_management.unload_all_models()
            comfy.model_management.soft_empty_cache()
        with tempfile.TemporaryDirectory(prefix="parallel-dit-doctor-node-") as folder:
            file = Path(folder) / "doctor.json"
            lines = run([sys.executable, str(DOCTOR), "--json", str(file), "--ends-with-stdin", *options])
            if not file.exists():
                raise BackendError(f"the doctor ended without a report: {' '.join(lines[-3:])[-400:]}")
            findings = json.loads(file.read_text())
            report = json.dumps(findings, indent=1)
        shown_lines = [line for line in lines if not line.startswith("wrote ")]
        if findings["ended"] != "complete":
            shown_lines.append(
                f"problem  the doctor ended too soon ({findings['ended']}): this is what it had found"
            )
        return io.NodeOutput("\n".join(shown_lines), report, ui=shown(shown_lines))


def run(command: list[str]) -> list[str]:
    """Run a command to its end; return the lines that it printed, of which the latest are shown under the
    node. Ends it where somebody presses Cancel."""
    lines: list[str] = []
    with NodeStatus() as status, started(command) as process:
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)
        reader.start()
        while process.poll() is None:
            if status.interrupted(CANCELLING):
                break
            status.show("\n".join(lines[-SHOWN_LINES:]))
            time.sleep(POLL_SECONDS)
        comfy.model_management.throw_exception_if_processing_interrupted()
        reader.join()
    return lines


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen]:
    """Start a process that does not outlive the block. Told to end, the doctor first ends its ranks and
    programs and removes its files."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.PIPE,  # which ends with us, however we end
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )
    assert process.stdin is not None, "a pipe"
    fork_guard.hold(process.stdin)
    try:
        yield process
    finally:
        end_process(process, END_SECONDS)
        process.stdin.close()


def _read(process: subprocess.Popen, lines: list[str]):
    assert process.stdout is not None, "a pipe"
    for line in process.stdout:
        lines.append(line.rstrip())
