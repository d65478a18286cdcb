"""The Parallel Doctor node, queued in a real ComfyUI on the CPU."""

import json
import sys
import time
from pathlib import Path

import forking
from comfy_modules import comfy_modules
from golden_graphs import error_of, graph, ranks_of

with comfy_modules():
    from parallel_dit.nodes import parallel_doctor


def doctor(**inputs) -> dict:
    """A graph with the node alone, both of whose outputs are shown."""
    shown = {
        name: {"class_type": "PreviewAny", "inputs": {"source": ["1", i]}} for i, name in enumerate("rj")
    }
    inputs = {"full": False, "minutes": 10.0, "device": "auto", **inputs}
    return {"1": {"class_type": "ParallelDoctor", "inputs": inputs}, **shown}


def findings(run) -> tuple[list[str], dict]:
    """Lines under the node, and the report of its JSON; both outputs say the same."""
    assert run.status == "success", run.message
    (lines,) = run.outputs["1"]["parallel_dit"]
    assert run.outputs["r"]["text"] == [lines]
    return lines.splitlines(), json.loads(run.outputs["j"]["text"][0])


def test_it_reports_this_machine_and_runs_anew_every_time(comfy):
    run = comfy.run(doctor())
    lines, report = findings(run)
    found = report["findings"]
    assert {"Python", "packages", "CUDA", "host"} <= {finding["check"] for finding in found}
    assert all(any(line.split()[1:] and finding["check"] in line for line in lines) for finding in found)
    counts = [sum(each["status"] == status for each in found) for status in ("problem", "warning")]
    assert lines[-1] == "{} problems, {} warnings".format(*counts)
    assert any(text.startswith(lines[0]) for text in run.texts)  # while it ran
    assert comfy.run(doctor()).cached == []


def test_full_measures_ranks_and_those_of_graphs_start_again(comfy, ranks):
    """In the least time that it takes, which is not enough for all of it."""
    lines, report = findings(comfy.run(doctor(full=True, minutes=1.0, device="cpu"), seconds=600))
    assert not ranks_of(comfy)  # it closed those of the graph before
    said = {finding["check"]: finding for finding in report["findings"]}
    assert report["options"]["full"] and report["options"]["minutes"] == 1.0
    assert "links" in said, said.keys()
    assert not comfy.descendants("doctor")
    assert error_of(comfy.run(graph())) < 1e-4


def test_cancel_ends_it_and_its_ranks(comfy):
    started = {}

    def press(text):
        if not started and (found := comfy.descendants("backend.worker")):
            started.update(found | comfy.descendants("doctor.py"))
            comfy.post("/interrupt", {})

    run = comfy.run(doctor(full=True, minutes=10.0, device="cpu"), seconds=600, at_text=press)
    assert started and run.status == "interrupted" and run.texts[-1] == "cancelled"
    for _ in range(600):  # ranks look ten times a second whether their launcher lives
        left = [pid for pid, line in started.items() if line in command(pid)]
        if not left:
            break
        time.sleep(0.1)
    assert not left


def command(pid: int) -> str:
    """Command line of a process, empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def test_a_fork_does_not_keep_it_running():
    """It ends by its pipe, however ComfyUI ends."""
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with parallel_doctor.started(command) as process, forking.living_fork():
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0
