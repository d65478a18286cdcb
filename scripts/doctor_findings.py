"""What checks of scripts/doctor.py find, and what becomes of one that fails or is refused."""

import errno
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

from doctor_wheels import remedy

from backend.client.auto.planning import is_memory_shortage
from backend.protocol import BackendError, RefusedError

OK, WARNING, PROBLEM = "ok", "warning", "problem"
#: Words of refusals by which something is broken (backend/rank/, sampling/).
OF_FAULTS = ("has computed NaN", "could not be loaded (", "could not be checked (")
#: Numbers of errors of a disk that has no room, or cannot be written.
NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
#: One of those in the text of what is no OSError, as safetensors raises it.
NO_DISK_TEXT = re.compile(rf"\(os error ({'|'.join(map(str, NO_DISK))})\)")


class NoRoomError(OSError):
    """The disk has no room for a file: the checks that need it are not run."""


class OutOfTime(Exception):
    """The minutes of --full are over: what is left is not run."""


@dataclass(frozen=True)
class Finding:
    """What a check says. ``values``: numbers for the JSON file."""

    check: str
    status: str
    text: str
    values: dict = field(default_factory=dict)

    def as_dict(self) -> dict:
        return asdict(self)


Found = Iterator[Finding]


def gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def findings(name: str, check: Callable, *arguments, what: str = "") -> Found:
    """Run one check: a function that returns a finding, or (status, text), or several. What it raises becomes
    a finding of its own, so that the others go on. ``what``: the part of the check, in words."""
    part = f"{what}: " if what else ""
    try:
        yield from _listed(name, check(*arguments))
    except OutOfTime as over:
        yield Finding(name, WARNING, f"{part}{over}")
    except NoRoomError as error:
        yield Finding(name, WARNING, f"{part}not run: {error}")
    except (RefusedError, BackendError) as error:
        yield (short_of_memory if is_memory_shortage(error) else _failed)(name, error, part)
    except Exception as error:
        yield _failed(name, error, part)


def _listed(name: str, result) -> Found:
    for each in [result] if isinstance(result, Finding | tuple) else result:
        yield each if isinstance(each, Finding) else Finding(name, *each)


def _failed(name: str, error: Exception, part: str) -> Finding:
    """Say why a check failed. ``part``: the part of the check with ": " behind it, or nothing."""
    why = f"{type(error).__name__}: {error}".strip().splitlines()[0][:400]
    text = f"{part}this check failed ({why})"
    if isinstance(error, ModuleNotFoundError):
        text += f"; {remedy(error)}"
    elif (isinstance(error, OSError) and error.errno in NO_DISK) or NO_DISK_TEXT.search(str(error)):
        text += "; make room there, or set TMPDIR to another folder"
    elif isinstance(error, PermissionError):
        text += "; allow this user that, or set TMPDIR to another folder"
    details = {"traceback": traceback.format_exc(), **getattr(error, "evidence", {})}
    return Finding(name, PROBLEM, text, details)


def short_of_memory(name: str, error: Exception, part: str) -> Finding:
    """Say that GPUs are too small for a check, and how much it needs. Ranks that run out in the middle had
    been thought to have room. ``part``: as in ``_failed``."""
    needs: dict[int, int] = getattr(error, "lacking", {})
    values = {"needs": needs, "error": str(error)}
    if not needs:
        text = f"{part}more memory was needed than was planned ({str(error).strip().splitlines()[0][:300]})"
        remedy = (
            "close what else uses the GPUs and run it again; if it stays, report it, with the file of --json"
        )
        return Finding(name, WARNING, f"{text}; {remedy}", values)
    listed = ", ".join(f"{gb(size)} free for rank {rank}" for rank, size in sorted(needs.items()))
    text = f"{part}not run: it needs {listed}"
    remedy = f'close what else uses the GPUs (to try it again: --only "{name}")'
    too_small = "smaller cards cannot run this check, and nothing is wrong with them"
    return Finding(name, WARNING, f"{text}; {remedy}; {too_small}", values)


def refused(name: str, what: str, refusal: RefusedError) -> Finding:
    """Say what a refusal means: degrees that divide no heads or blocks of a model, and kernels that are not
    there, are no fault; what fails in a load or computes no number is."""
    if is_memory_shortage(refusal):
        return short_of_memory(name, refusal, f"{what}: ")
    is_fault = any(words in str(refusal) for words in OF_FAULTS)
    return Finding(name, PROBLEM if is_fault else OK, f"{what}: not possible ({refusal})")


def possible(name: str, what: str, check: Callable, *arguments) -> Found:
    """Run one check of what ranks may refuse (``refused``). ``what``: the method, in words."""

    def unless_refused():
        try:
            yield from _listed(name, check(*arguments))
        except RefusedError as refusal:
            yield refused(name, what, refusal)

    yield from findings(name, unless_refused, what=what)
