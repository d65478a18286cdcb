"""Says what is wrong with this machine, in plain words: python scripts/doctor.py [--full] [--json FILE]

Run it with ComfyUI's own Python. Without options it looks, in seconds, at Python, packages, torch, CUDA,
NCCL, GPUs, their peer access, /dev/shm, disks and limits, and for three seconds times copies between GPUs and
from and to host memory, of GPUs with 1 GB free (other programs that use the GPUs slow these: close them).
--full runs the backend, and ends --minutes after its start: links, every parallel method on tiny models
against one rank and ComfyUI's latents (float32, bf16), attention kernels on every head size, compiled blocks,
quantized files, waits for the GPU, memory against what is planned, what the engine takes over diffusers' own
transformer in a plain loop, and seconds a step. Ten minutes have time for the most telling cases of each on
two fast GPUs; its first line says how many minutes have time for all. It runs on the CPU too, with small
sizes. With one GPU, --ranks 2 has two ranks share it: that shows what methods compute over NCCL, and not how
fast. Close ComfyUI before --full: both would use the same GPUs.

Each line is ok, warning or problem; --full adds a table of seconds a step at the end. --json writes the lines
with their numbers, for an issue, as they come, and a chart of the speeds next to it (.png). Ends with 1 where
there is a problem. Ctrl-C ends it with what was found until then.
"""

import argparse
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
COLUMNS = 110
#: Exit status after Ctrl-C, as shells have it.
INTERRUPTED = 128 + signal.SIGINT
#: In the environment of the doctor that goes on in the ranks' Python: that Python, and when it began.
MOVED = "PARALLEL_DIT_DOCTOR_IN"
SINCE = "PARALLEL_DIT_DOCTOR_SINCE"
#: When this program began (time.monotonic, the same clock in the ranks' Python): imports and quick checks are
#: of the minutes that somebody waits for.
BEGAN = float(os.environ.get(SINCE, time.monotonic()))


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="run the backend, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as JSON")
    parser.add_argument("--ranks", type=int, default=0, help="of --full (default: every GPU, 2 on the CPU)")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="of --full (default: GPUs, if any)"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="longest time of all (default 10)")
    parser.add_argument("--only", default="", help="of --full: checks whose names begin so, separated by ,")
    parser.add_argument("--ends-with-stdin", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def show(findings: Iterable, report, shown: list):
    """Print findings as they come, write them into the ``report`` and add them to ``shown``."""
    for finding in findings:
        print(in_lines(f"{finding.status:8} {finding.check:18} ", finding.text))
        sys.stdout.flush()
        report.add(finding)
        shown.append(finding)


def in_lines(lead: str, text: str) -> str:
    """Wrap a text after its ``lead``, but nothing that is to be copied: paths, options, names."""
    wrapper = textwrap.TextWrapper(COLUMNS, break_on_hyphens=False, break_long_words=False)
    wrapper.initial_indent, wrapper.subsequent_indent = lead, " " * len(lead)
    return wrapper.fill(text)


def run_backend(facts, chosen: argparse.Namespace) -> Iterable:
    """Run --full; whatever ends it as a whole, a package that it lacks too, is a problem with its remedy."""
    import doctor_findings
    from doctor_next import advised

    def full(facts) -> Iterable:
        if facts.hang:  # torch then asks the driver for nothing
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import doctor_runs  # which needs most packages

        return doctor_runs.full(chosen, facts, began=BEGAN)

    return map(advised, doctor_findings.findings("full", full, facts))


def tabulate(findings: list):
    """Print the table of --full, where anything was timed."""
    try:
        import doctor_table

        doctor_table.show(findings)
    except ImportError:  # of benchmarks; said already by --full itself
        return


def draw(findings: list, path: Path):
    """Write the chart of --full, where anything was timed."""
    try:
        import doctor_steps

        drawn = doctor_steps.chart(findings, path)
    except ImportError:  # of benchmarks; said already by --full itself
        return
    except OSError as error:  # as next to /dev/stdout
        print(f"no chart: {path} cannot be written ({error})")
        return
    if drawn:
        print(f"wrote {path}")


def end_in_order(number: int, frame):
    """Handle SIGTERM, SIGHUP and Ctrl-C by SystemExit, so that ranks, programs and files of --full go, and no
    request is waited for; a second one changes nothing."""
    signal.signal(number, signal.SIG_IGN)
    if number == signal.SIGINT:  # by os.write: it may have come in the middle of a print
        with suppress(OSError):  # the same Ctrl-C may have ended who reads it, as tee
            os.write(1, b"\ninterrupted: ending the ranks and programs, if any\n")
    sys.exit(128 + number)


def handle_signals():
    """End in order by signals of which this is not told to take no notice, as under nohup."""
    for name in ("SIGTERM", "SIGHUP", "SIGINT"):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and (name == "SIGTERM" or signal.getsignal(number) != signal.SIG_IGN):
            signal.signal(number, end_in_order)


def go_on_in_ranks_python(arguments: list[str]):
    """Go on in the Python of the ranks where PARALLEL_DIT_PYTHON names another one than this: its packages,
    torch and NCCL are what ranks use."""
    from backend.client.launching.interpreter import inherited, ranks_python
    from backend.config import ConfigError

    try:
        python = ranks_python()
    except ConfigError as error:
        sys.exit(f"problem  python             {error}")
    if python != sys.executable and MOVED not in os.environ:
        moved = {MOVED: python, SINCE: str(BEGAN)}
        os.execve(python, [python, __file__, *arguments], {**inherited(os.environ), **moved})


def end_with_parent():
    """End in order when standard input does, which whoever started this holds."""

    def watch():
        while os.read(0, 1):  # not by sys.stdin, whose lock this thread would hold when Python ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; return the exit status: 1 where there is a problem, 130 after Ctrl-C."""
    chosen = options(arguments)
    handle_signals()
    if chosen.ends_with_stdin:
        end_with_parent()
    try:
        import doctor_checks as checks
        from doctor_facts import Facts
        from doctor_report import Report
    except (ImportError, OSError, ValueError) as error:  # without torch or its libraries nothing can be asked
        from doctor_wheels import remedy  # which needs none

        print(in_lines("problem  packages           ", f"{error}; {remedy(error)}"))
        return 1
    facts = Facts()
    try:
        report = Report(chosen.json, vars(chosen), facts)
    except OSError as error:
        print(f"problem  json               {chosen.json} cannot be written ({error}); name another file")
        return 1
    findings: list = []
    ended = "exit"
    try:
        show(checks.quick(facts), report, findings)
        if chosen.full:
            show(run_backend(facts, chosen), report, findings)
        ended = "complete"
    except SystemExit as end:
        if end.code != INTERRUPTED:
            ended = f"signal {end.code - 128}" if isinstance(end.code, int) and end.code > 128 else "exit"
            raise
        ended = "interrupted"
    finally:
        report.close(ended)
    if ended == "interrupted":
        print("this was found until then")
    status = conclude(findings, chosen)
    return status if ended == "complete" else INTERRUPTED


def conclude(findings: list, chosen: argparse.Namespace) -> int:
    """Say how many problems there were, and what was written; return the exit status."""
    if chosen.full:
        tabulate(findings)
    problems, warnings = (
        sum(each.status == status for each in findings) for status in ("problem", "warning")
    )
    print(f"{problems} problems, {warnings} warnings")
    if not chosen.json and any("report it" in each.text for each in findings):
        print("to report: run it again with --json doctor.json, read the file and attach it to an issue")
    if chosen.json:
        print(f"wrote {chosen.json}")
        if chosen.full:
            draw(findings, chosen.json.with_suffix(".png"))
    return 1 if problems else 0


if __name__ == "__main__":
    go_on_in_ranks_python(sys.argv[1:])
    sys.exit(main())
