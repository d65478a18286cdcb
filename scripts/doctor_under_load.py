"""What nvidia-smi says of GPUs while scripts/doctor.py has them work: idle ones lower links and clocks."""

import subprocess
import threading
from collections.abc import Mapping

from doctor_findings import OK, WARNING, Finding

from backend.client.auto import driver_query
from backend.client.auto.measurements import bare_uuid

SMI_SECONDS = 5.0
#: Between two questions.
INTERVAL_SECONDS = 0.5
#: Fields that are asked for, and the last one's name before drivers of 2023.
FIELDS = (
    *("index", "uuid", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current"),
    *("clocks.sm", "clocks.max.sm", "power.draw", "temperature.gpu", "clocks_event_reasons.active"),
)
FORMERLY = "clocks_throttle_reasons.active"
#: Bits of the last field that say what slows a GPU down beyond its power limit (nvml.h).
SLOWED = {0x8: "its hardware", 0x20: "heat", 0x40: "heat", 0x80: "its power supply"}

Row = dict[str, str]


class UnderLoad:
    """Asks nvidia-smi as long as it is entered. ``rows``: what was said of each GPU as it worked most, with
    the fastest link, and by power of those; empty without nvidia-smi."""

    def __init__(self):
        self._most: dict[str, Row] = {}
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    @property
    def rows(self) -> list[Row]:
        return list(self._most.values())

    def __enter__(self) -> "UnderLoad":
        self._thread.start()
        return self

    def __exit__(self, *raised):
        self._has_ended.set()
        self._thread.join()

    def _ask(self):
        fields = FIELDS
        while not self._has_ended.is_set():
            try:
                answer = driver_query.answer(_command(fields), SMI_SECONDS)
            except (OSError, subprocess.SubprocessError):  # said by the quick checks
                return
            if answer.returncode and fields[-1] == FORMERLY:
                return
            if answer.returncode:
                fields = (*FIELDS[:-1], FORMERLY)
                continue
            self._note(answer.stdout)
            self._has_ended.wait(INTERVAL_SECONDS)

    def _note(self, text: str):
        for line in text.splitlines():
            row = dict(zip(FIELDS, (entry.strip() for entry in line.split(","))))
            if len(row) == len(FIELDS) and _work(row) >= _work(self._most.get(row["index"], {})):
                self._most[row["index"]] = row


def _command(fields: tuple[str, ...]) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]


def _work(row: Mapping[str, str]) -> tuple[float, float]:
    return _number(row, "pcie.link.gen.current"), _number(row, "power.draw")


def _number(row: Mapping[str, str], field: str) -> float:
    """Return a field as a number; 0 where the driver knows none ("[N/A]")."""
    try:
        return float(row.get(field, ""))
    except ValueError:
        return 0.0


def of_gpus(rows: list[Row], uuids: Mapping[int, str]) -> list[Row]:
    """Return the rows of these GPUs with the index that torch gives each, in its order. ``uuids``: index ->
    bare UUID; where one is not among the rows, as of a part of a GPU (MIG), all rows as they are."""
    by_uuid = {bare_uuid(row["uuid"]): row for row in rows}
    if not all(uuid in by_uuid for uuid in uuids.values()):
        return rows
    return [by_uuid[uuid] | {"index": str(index)} for index, uuid in uuids.items()]


def judged(rows: list[Row]) -> list[Finding]:
    """Say how the GPUs that computed ran meanwhile, and what slowed them down; nothing of no rows."""
    if not rows:
        return []
    wrong = [why for row in rows for why in _wrong(row)]
    listed = "; ".join(
        f"GPU {row['index']} PCIe {row['pcie.link.gen.current']} of {row['pcie.link.gen.max']}, "
        f"{row['clocks.sm']} of {row['clocks.max.sm']} MHz, {row['power.draw']} W, {row['temperature.gpu']} C"
        for row in rows
    )
    text = f"while all GPUs compute: {listed}"
    if wrong:
        text += f": {', '.join(wrong)}; see to cooling, power cables, slots and risers"
    return [Finding("speed", WARNING if wrong else OK, text, {"under_load": rows})]


def _wrong(row: Row) -> list[str]:
    """Return what slows a GPU down, in words."""
    name = f"GPU {row['index']}"
    try:
        reasons = int(row[FIELDS[-1]], 16)
    except ValueError:  # "[N/A]"
        reasons = 0
    causes = dict.fromkeys(cause for bit, cause in SLOWED.items() if reasons & bit)
    wrong = [f"{name} is slowed down by {' and '.join(causes)}"] if causes else []
    if 0 < _number(row, "pcie.link.gen.current") < _number(row, "pcie.link.gen.max"):
        wrong.append(f"the link of {name} is slower than it could be")
    return wrong
