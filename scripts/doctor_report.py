"""The file of scripts/doctor.py: written anew with every finding, so that what it has found is there whatever
ends it; without the names of who sends it."""

import getpass
import json
import logging
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from doctor_facts import Facts, finite
from doctor_findings import Finding

from backend.client.status import log_of_last_backend
from backend.runtime.whole_files import replace_file

ROOT = Path(__file__).resolve().parents[1]
#: Names that say nothing of anybody, or stand in other words.
COMMON = ("root", "user", "localhost", "localhost.localdomain", "ubuntu", "comfyui", "host")
#: In which DNS says the machine's name; it may take many times this where a server does not answer.
DNS_SECONDS = 2.0
#: Homes that are not this user's: of another one, and on WSL that of Windows.
OTHER_HOMES = re.compile(
    r"(/mnt/[a-z]/Users/)(?:[^/\n\\\"]{1,40}(?=/)|[^/\s\\\"':,;)]+)|(/home/)[^/\s\\\"':,;)]+"
)
#: The number of one GPU in the world, as nvidia-smi, CUDA_VISIBLE_DEVICES and torch write it.
UUID = re.compile(
    r"(?<![0-9a-f])(GPU-|MIG-)?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})(?![0-9a-f])", re.IGNORECASE
)
#: Folders that say nothing of anybody; empty: the root, and a home without one.
PUBLIC = ("", "/root", "/tmp", "/var/tmp", "/usr", "/usr/local")
#: Lines of the log that are reported.
LOG_LINES = 200
#: What is replaced, and what stands for it.
Patterns = list[tuple[re.Pattern[str], str]]


class Log(logging.Handler):
    """Keeps what the pack warns of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record):
        """Keep the message of a record, the last LOG_LINES alone."""
        self.lines = [*self.lines, record.getMessage()][-LOG_LINES:]


class Report:
    """What the doctor has found, in the file ``path`` if there is one. Raises OSError where it cannot be
    written."""

    def __init__(self, path: Path | None, options: dict, facts: Facts):
        self.path, self.facts = path, facts
        self.started = self.last = time.time()
        self.options = {**options, "json": path.name if path else None}
        self.findings: list[dict] = []
        self.failed = False
        self.log = Log()
        logging.getLogger().addHandler(self.log)
        self.write("running")

    def add(self, finding: Finding):
        """Note a finding, and the seconds since the one before."""
        now = time.time()
        self.findings.append(with_log(finding).as_dict() | {"seconds": round(now - self.last, 1)})
        self.last = now
        self.try_to_write("running")

    def write(self, ended: str):
        """Write the file, whole or not at all. ``ended``: how the doctor did, or "running"."""
        if self.path is None:
            return
        report = {
            "doctor": 2,
            "ended": ended,
            "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.started)),
            "options": self.options,
            "facts": self.facts.as_dict(),
            "findings": self.findings,
            "log": self.log.lines,
        }
        report = anonymous(finite(report))
        text = json.dumps(report, indent=1, allow_nan=False, ensure_ascii=False)
        if self.path.exists() and not self.path.is_file() or self.path.is_symlink():  # as /dev/stdout
            self.path.write_text(text, encoding="utf-8")
            return
        replace_file(self.path, text)

    def close(self, ended: str):
        """Write the file for the last time."""
        logging.getLogger().removeHandler(self.log)
        self.try_to_write(ended)

    def try_to_write(self, ended: str):
        """Write the file; say once where the disk has no room any more, and go on."""
        try:
            self.write(ended)
        except OSError as error:
            if not self.failed:
                print(f"warning  json               {self.path} cannot be written any more ({error})")
            self.failed = True


def with_log(finding: Finding) -> Finding:
    """Return a check that failed with the end of the log of the ranks that were started last."""
    if "traceback" not in finding.values or "log" in finding.values:
        return finding
    return replace(finding, values=finding.values | {"log": log_of_last_backend()})


def anonymous(value: Any) -> Any:
    """Return a text, or what JSON has, without the folders of who sends it, the user's name, the machine's
    and UUIDs of GPUs. Keys and numbers stay: a machine may be called as one of them."""
    return _each_text(value, partial(_without, _patterns(), {}))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a value with each of its texts changed, but no key."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _each_text(each, change) for key, each in value.items()}
    if isinstance(value, list):
        return [_each_text(each, change) for each in value]
    return value


def _without(patterns: Patterns, numbers: dict[str, int], text: str) -> str:
    """Return a text without the ``patterns``, and with UUIDs numbered as they come: who reads the report sees
    which GPU is which. ``numbers``: of those that have one."""

    def placeholder(match: re.Match) -> str:
        number = numbers.setdefault(match[2].lower(), len(numbers) + 1)
        return f"{match[1] or ''}UUID-{number}"

    text = UUID.sub(placeholder, text)
    for pattern, stands_for in patterns:
        text = pattern.sub(stands_for, text)
    return text


def _patterns() -> Patterns:
    """Return what is replaced, in this order, and by what (re.sub's)."""
    folders = [
        (re.compile(rf"{re.escape(folder.rstrip('/'))}(?![\w.-]*\w)"), stands_for)
        for folder, stands_for in _folders().items()
        if folder.rstrip("/") not in PUBLIC
    ]
    names = [
        (re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])"), stands_for)
        for name, stands_for in _names().items()
        if len(name) > 2 and name.lower() not in COMMON
    ]
    return [*folders, (OTHER_HOMES, r"\1\2USER"), *names]


def _names() -> dict[str, str]:
    """Return name -> what stands for it, the longest first: one may begin another."""
    host = socket.gethostname()
    hosts = dict.fromkeys((host, host.partition(".")[0], *_full_names(host)), "HOST")
    stand_ins = {_user(): "USER", os.environ.get("SUDO_USER", ""): "USER"}
    stand_ins = hosts | stand_ins
    return {name: stand_ins[name] for name in sorted(stand_ins, key=len, reverse=True)}


@cache
def _full_names(host: str) -> list[str]:
    """Return the name that DNS has for this host, as torchrun writes it into its failures: empty until it
    answers, which is waited for once, for DNS_SECONDS."""
    names: list[str] = []
    thread = threading.Thread(target=lambda: names.append(socket.getfqdn(host)), daemon=True)
    thread.start()
    thread.join(DNS_SECONDS)
    return names


def _folders() -> dict[str, str]:
    """Return folder -> what stands for it, the longest first: one may lie in another."""
    stand_ins = {
        os.path.expanduser("~"): "~",
        tempfile.gettempdir(): "TMPDIR",
        sys.prefix: "PYTHON",
        str(ROOT): "PACK",
    }
    return {folder: stand_ins[folder] for folder in sorted(stand_ins, key=len, reverse=True)}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return ""
