"""Two "hosts" on one machine: network namespaces joined by a cable (veth), each with processes of its own.

Processes of one cannot see those of the other (PID namespaces), as on two machines; files are the same. Needs
root and the commands ip, tc and unshare.
"""

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTERFACE = "pdit"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
PORT = 29500
#: What a cable of limited rate lets pass at once after a pause: less than any message that is to be delayed,
#: and more than a packet as the kernel hands it on (64 KiB).
BURST = "96kb"
#: State of a socket in /proc/net/tcp.
LISTENS = "0A"
#: Runs a command, and then lists what is left of its processes in $LEFT. $OTHER is this host's own $FILE.
SHELL = """
[ -z "$OTHER" ] || mount --bind "$OTHER" "$FILE"
"$@"; code=$?
sleep 1
list() { for p in /proc/[0-9]*; do { tr '\\0' ' ' < $p/cmdline; } 2>/dev/null; echo; done }
list | grep '[b]ackend.worker' > "$LEFT"
exit $code
"""


@cache
def why_not() -> str:
    """Return why there can be no hosts here; empty where they can be."""
    if any(shutil.which(command) is None for command in ("ip", "tc", "unshare")):
        return "needs the commands ip, tc and unshare"
    try:
        Hosts().close()
        run("unshare", "--pid", "--fork", "--mount-proc", "true")
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here ({error.stderr.strip()})"
    return ""


def token_bucket(rate: str) -> list[str]:
    """Return tc's queue that sends at most at ``rate`` (10gbit, 1gbit)."""
    return ["tbf", "rate", rate, "burst", BURST, "latency", "400ms"]


class Hosts:
    """Two of them, until ``close``."""

    def __init__(self):
        self.names = [f"pdit-{os.getpid()}-{i}" for i in (0, 1)]
        self.processes: list[subprocess.Popen] = []
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
            first, second = self.names
            ends = ["name", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE]
            run("ip", "link", "add", *ends, "netns", second)
            for name, address in zip(self.names, ADDRESSES):
                run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", INTERFACE)
                run("ip", "-n", name, "link", "set", INTERFACE, "up")
        except BaseException:
            self.close()
            raise

    def serve(self, index: int, folder: Path, config: dict, *options: str, **env: str) -> subprocess.Popen:
        """Start scripts/serve.py on host ``index``; host 0 listens at unix:FOLDER/s, with FOLDER/token.
        ``env``: OTHER and FILE of SHELL."""
        where = ["--nnodes", "2", "--node-rank", str(index), "--interface", INTERFACE]
        where += ["--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--token-file", str(folder / "token")]
        if index == 0:
            where += ["--address", f"unix:{folder}/s", "--config", json.dumps(config)]
        serve = [sys.executable, str(ROOT / "scripts/serve.py"), "start", *where, *options]
        own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", SHELL, "sh"]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[index], *own, *serve],
            env=os.environ | {"OTHER": "", "LEFT": str(folder / f"left-{index}")} | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def cut(self):
        """Cut the cable: what is sent is lost, and nobody is told."""
        run("ip", "-n", self.names[0], "link", "set", INTERFACE, "down")

    def shape(self, rate: str, device: str = INTERFACE):
        """Send by the cable ``device`` from now on, at most at ``rate`` (10gbit, 1gbit) each way; packets
        queue as at a switch. Empty: no limit."""
        for name, own, other in zip(self.names, ADDRESSES, reversed(ADDRESSES)):
            run("ip", "-n", name, "route", "replace", f"{other}/32", "dev", device, "src", own)
            where = ["dev", device, "root"]
            subprocess.run(["tc", "-n", name, "qdisc", "del", *where], capture_output=True)
            if rate:
                run("tc", "-n", name, "qdisc", "add", *where, *token_bucket(rate))

    def sent(self) -> int:
        """Return how many bytes have crossed the cable so far, both ways."""
        found = run("ip", "-n", self.names[0], "-s", "-j", "link", "show", "dev", INTERFACE)
        counts = json.loads(found)[0]["stats64"]
        return counts["tx"]["bytes"] + counts["rx"]["bytes"]

    def listening(self, index: int) -> set[tuple[str, int]]:
        """Return (address, port) of every TCP port that is open on a host; "any" for every interface."""
        tables = run("ip", "netns", "exec", self.names[index], "cat", "/proc/net/tcp", "/proc/net/tcp6")
        ports = set()
        for words in map(str.split, tables.splitlines()):
            if words[3] != LISTENS:
                continue
            address, port = words[1].split(":")
            parts = [str(int(address[-8:][i : i + 2], 16)) for i in (6, 4, 2, 0)]
            ports.add((".".join(parts) if address.strip("0") else "any", int(port, 16)))
        return ports

    def close(self):
        """End what runs on the hosts, and remove them."""
        for process in self.processes:
            process.kill()
            process.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def run(*command: str) -> str:
    """Run a command and return its output. Raises CalledProcessError."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
