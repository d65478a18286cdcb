"""Makes every fault of fault_table.py on a live backend of two ranks, and writes what came of it.

    python scripts/reliability.py [--write] [--only WORDS ...]

Prints the rows of docs/reliability.md; --write puts them there. Fails where a message lacks what it should
say, the next run is not exact, or a process is left. Needs Linux, some ten minutes of two cores, and root for
the faults of a full disk (a tmpfs is mounted), which are left out otherwise.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests/support")]
import psutil
from fault_table import FAULTS
from faults import CONFIG, FINISHED, Fault, Scene
from page_parts import Part, markdown
from tiny import error_in_std, to_vae_units

from backend.client import pool

PART = Part("docs/reliability.md", "faults", "scripts/reliability.py")
HEAD = ("fault", "told after", "message", "next run", "left over")
#: Largest distance from one process's latent, in its standard deviations.
EXACT = 1e-4
#: How long processes may take to end once the next run is done.
SOON = 10.0


@dataclass(frozen=True)
class Row:
    """A line of the table, and what is wrong with it, if anything."""

    cells: tuple[str, ...]
    wrong: str


def tried(fault: Fault, scene: Scene) -> Row:
    """Make a fault, run once more, and look what is left."""
    backend = scene.backend
    assert backend.process is not None
    folder, pids = backend.process.folder, backend.welcome.pids
    outcome = fault.make(scene)
    began = time.monotonic()
    told: list[str] = []
    fresh = pool.backend_for(CONFIG, warn=told.append)
    message = " ".join(told) or outcome.message
    if told and outcome.message == FINISHED:
        message = f"{FINISHED}, and the request gives its result; the next one: {message}"
    result = fresh.sample(scene.request())
    error = (
        error_in_std(to_vae_units(result.tensors["samples"]), scene.expected()) if result else float("inf")
    )
    seconds = time.monotonic() - began
    is_same = fresh.welcome.pids == pids
    left = [] if is_same else left_over(folder)
    logs = ["log, for a day"] if not is_same and folder.exists() else []
    wrong = []
    if fault.says not in message:
        wrong.append(f"it should say {fault.says!r}")
    if not error <= EXACT:  # NaN too
        wrong.append(f"the next run is {error} off")
    if left:
        wrong.append("processes are left")
    if fault.ends and is_same:
        wrong.append("the ranks are the same")
    ranks = "same ranks" if is_same else "fresh ranks"
    cells = (
        *(fault.name, f"{outcome.seconds:.1f} s", shown(message)),
        *(f"{ranks}, exact, {seconds:.1f} s", ", ".join([*left, *logs]) or "nothing"),
    )
    return Row(cells, "; ".join(wrong))


def left_over(folder: Path) -> list[str]:
    """Return the processes of a backend that has ended, once they have had time to."""
    deadline = time.monotonic() + SOON
    while (found := processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"process {pid}" for pid in found]


def processes(folder: Path) -> list[int]:
    """Return the processes whose command line has the folder of a backend."""
    every = psutil.process_iter(["cmdline"])
    return [each.pid for each in every if any(str(folder) in word for word in each.info["cmdline"] or ())]


def shown(message: str) -> str:
    """Return a message as the page has it: without the names of this run's folders."""
    message = re.sub(r"/\S*/backend\.log", "LOG", message)
    message = re.sub(r"\S*parallel-dit-faults-\w+", "FOLDER", message)
    return message.replace("|", "/").replace("\n", " ")


def write(row: Row):
    """Put a row into the page, in the place of what was there of its fault."""
    known = PART.rows() | {row.cells[0]: row.cells}
    table = markdown(HEAD, [known[fault.name] for fault in FAULTS if fault.name in known])
    PART.write(table)


def main():
    """Try the faults that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"put each row into {PART.page}")
    parser.add_argument("--only", nargs="+", help="faults whose name has one of these")
    options = parser.parse_args()
    faults = [f for f in FAULTS if not options.only or any(word in f.name for word in options.only)]
    rows = []
    place = tempfile.mkdtemp(prefix="parallel-dit-faults-")
    tempfile.tempdir = place  # the launcher's folders, too
    try:
        scene = Scene(Path(place))
        for fault in faults:
            if "disk" in fault.name and os.getuid():
                print(f"{fault.name}: left out, since only root can mount a small disk")
                continue
            rows.append(tried(fault, scene))
            if options.write and not rows[-1].wrong:
                write(rows[-1])
            print(
                f"| {' | '.join(rows[-1].cells)} |", rows[-1].wrong and f"WRONG: {rows[-1].wrong}", flush=True
            )
    finally:
        pool.close_all()
        shutil.rmtree(place, ignore_errors=True)
    sys.exit(any(row.wrong for row in rows))


if __name__ == "__main__":
    main()
