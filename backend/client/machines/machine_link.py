"""The connection between the launchers of a backend's machines (machine_rendezvous.py makes it): it carries
the configuration, heartbeats, and why one has ended. Lines of JSON travel: nothing is unpickled or encrypted.
Every machine writes twice a second; one that is not heard of is silent, as a rank is (silence.py)."""

import json
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ...protocol.handshake import MAX_HELLO
from ...runtime.callbacks import nothing
from ..exit_report import RankFailure
from ..silence import LOOK_SECONDS, silent_seconds
from .machines import Machines

#: Longest line, in bytes; the failures of a machine's ranks fit.
MAX_LINE = 1 << 20
#: A peer that connects must prove itself within so many keys of what it says, and MAX_HELLO bytes of a line.
MAX_SAID = 16
#: After one machine has ended: so long the others take to end their ranks and to say why.
REPORT_SECONDS = 20.0
#: A machine that is not heard of at so many looks is not waited for.
SLOW = 4
Check = Callable[[], None]


class Peer:
    """Another machine's launcher; ``said`` holds what it has sent under each key."""

    def __init__(self, connection: socket.socket, index: int, name: str):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.index = index
        self.name = name
        self.looks = 0
        self.gone = False
        self.said: dict[str, Any] = {}
        self._buffer = b""
        self._sending = threading.Lock()
        self._unsent = b""

    def send(self, message: dict):
        """Send a line, from any thread. What a slow link does not take within the socket's timeout goes
        before the next line. Who gets nothing finds us silent."""
        with self._sending:
            self._unsent += json.dumps(message).encode() + b"\n"
            with suppress(OSError):
                while self._unsent:
                    self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def read(self, limit: int = MAX_LINE) -> list[dict]:
        """Return lines that come within the socket's timeout. Raises ConnectionError if none will come."""
        data = self.socket.recv(1 << 16)
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if not data:
            raise ConnectionResetError("it has hung up")
        if len(self._buffer) > limit or any(len(line) > limit for line in lines):
            raise ConnectionError("it sent too long a line")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # of lists in lists
            raise ConnectionError("it sent what is no JSON") from None
        if not all(isinstance(each, dict) for each in messages):
            raise ConnectionError("it sent what is no message")
        return messages

    def has_hung_up(self) -> bool:
        """Look whether the other end has closed the connection, without taking what it has sent."""
        try:
            readable, _, _ = select.select([self.socket], [], [], 0)
            return bool(readable) and not self.socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def ask(self, key: str, seconds: float, limit: int = MAX_HELLO) -> Any:
        """Return what the first line with ``key`` says, None for a refusal. Raises ConnectionError or
        TimeoutError."""
        deadline = time.monotonic() + seconds
        while not self.said.keys() & {key, "refused"}:
            self.socket.settimeout(max(0.01, deadline - time.monotonic()))
            for line in self.read(limit):
                self.said |= line
            if time.monotonic() > deadline or len(self.said) > MAX_SAID:
                raise TimeoutError(f"it did not say its {key}")
        return self.said.get(key)


class Link:
    """This machine's connections: machine 0 has one to each other, which have one to machine 0."""

    def __init__(self, machines: Machines, peers: list[Peer], listener: socket.socket | None = None):
        self.machines = machines
        self.peers = peers
        self._listener = listener
        self._on_end: Callable[[str], None] = nothing
        self._on_ready: Check = nothing
        self._limit = silent_seconds()
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self._reported = False
        self._thread = threading.Thread(target=self._watch, name="machine link", daemon=True)

    def watch(self, on_end: Callable[[str], None], on_ready: Check):
        """Begin to beat and to listen. ``on_end`` is called where the ranks of this machine have to end: with
        why, or with nothing where another machine has still to say why. ``on_ready``: all have joined."""
        self._on_end = on_end
        self._on_ready = on_ready
        for peer in self.peers:
            peer.socket.settimeout(1.0)
        self._thread.start()

    def broadcast(self, **message: Any):
        """Send a message to every peer."""
        for peer in self.peers:
            peer.send(message)

    def conclude(self, silence: str, failures: list[RankFailure]) -> tuple[str, list[RankFailure]]:
        """Tell the others what is known here of the end of the ranks, and return all that is known anywhere.
        Machine 0 waits for the others' reports, and the others for its summary."""
        if not self._reported:
            self._reported = True
            self.broadcast(report={"silence": silence, "failures": [asdict(each) for each in failures]})
        leads = self.machines.index == 0
        wanted = "report" if leads else "summary"
        with self._changed:
            self._changed.wait_for(
                lambda: all(p.gone or p.looks > SLOW or wanted in p.said for p in self.peers),
                REPORT_SECONDS if leads else 2 * REPORT_SECONDS,
            )
        reports = [peer.said[wanted] for peer in self.peers if wanted in peer.said]
        sentences = [silence, *(str(each["silence"]) for each in reports)]
        silence = next(filter(None, sentences), "")
        known = {each.rank: each for each in failures}
        known |= {fields["rank"]: RankFailure(**fields) for each in reports for fields in each["failures"]}
        summary = {"silence": silence, "failures": [asdict(each) for each in known.values()]}
        if leads:
            self.broadcast(summary=summary)
        return silence, list(known.values())

    def close(self, why: str = ""):
        """Say goodbye, or ``why`` this machine ends its ranks, and hang up. More than once is fine."""
        if not self._stopped.is_set():
            self.broadcast(**({"left": why} if why else {"bye": True}))
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        for peer in self.peers:
            peer.socket.close()
        if self._listener is not None:
            self._listener.close()

    def _watch(self):
        while not self._stopped.is_set():
            began = time.monotonic()
            self.broadcast(beat=True)
            received_from: set[int] = set()
            while (left := began + LOOK_SECONDS - time.monotonic()) > 0:
                received_from |= self._receive(left)
            for peer in self.peers:
                peer.looks = 0 if peer.index in received_from else peer.looks + 1
                if peer.looks * LOOK_SECONDS >= self._limit and not peer.gone:
                    what = f"{peer.name} has been silent for {peer.looks * LOOK_SECONDS:.0f} s"
                    self._lost(peer, f"{what} (its link is cut, or it has stopped)")
            with self._changed:
                self._changed.notify_all()  # who waits for a report looks at silence, too

    def _receive(self, seconds: float) -> set[int]:
        """Take what comes within ``seconds``; return the machines of which something came."""
        live = {peer.socket: peer for peer in self.peers if not peer.gone}
        ready, _, _ = select.select(list(live), [], [], min(seconds, LOOK_SECONDS / 4))
        for peer in (live[each] for each in ready):
            try:
                for line in peer.read():
                    self._take(peer, line)
            except OSError as error:
                self._lost(peer, f"{peer.name} is lost ({error}): its launcher has ended")
        return {live[each].index for each in ready}

    def _take(self, peer: Peer, line: dict):
        with self._changed:
            peer.said |= line
            self._changed.notify_all()
        if "ready" in line:
            self._on_ready()
        if "left" in line:
            self._lost(peer, f"{peer.name} has left: {line['left']}")
        if "bye" in line:
            peer.gone = True
        if "report" in line:
            self._on_end("")

    def _lost(self, peer: Peer, why: str):
        with self._changed:
            was_gone = peer.gone
            peer.gone = True
            self._changed.notify_all()
        if not was_gone and "report" not in peer.said and "summary" not in peer.said:
            self._on_end(why)
