"""Rank 0's socket: authenticated clients, one queue of requests, replies that never hold up the ranks."""

import os
import queue
import socket
import stat
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil

from .. import protocol
from ..protocol import ProtocolError, handshake, socket_options
from ..protocol.framing import receive, send
from ..protocol.handshake import HELLO_SECONDS, MAX_HELLO
from .job_queue import Job, JobQueue

#: Least time between two lines in the log on clients that fail the handshake: they must not fill the disk.
STRANGER_LOG_SECONDS = 10.0
#: Connections at a time, and requests of one that may wait; a graph uses one of each.
MAX_CLIENTS = 16
MAX_WAITING = 16
#: How long a client may take to say something for which there is no place.
FULL_SECONDS = 1.0
#: How long a client that leaves may take to read what is still to be written.
LEAVE_SECONDS = 5.0


class Connection:
    """One connection: a reading thread that feeds the queue and a writing thread that empties the outbox."""

    def __init__(self, connection: socket.socket, server: "Server"):
        self.connection = connection
        self.server = server
        self.outbox: queue.Queue = queue.Queue()
        self.jobs: list[Job] = []
        self.gone = False
        self.writer = threading.Thread(target=self._write, daemon=True)

    def serve(self):
        """Read requests until the connection closes; then cancel all jobs of this client."""
        try:
            self._greet()
            self.writer.start()
            self.server.members[self] = None
            while True:
                self._handle(receive(self.connection))
        except ProtocolError as error:
            self.outbox.put(protocol.Failure(str(error)))
        except OSError:
            pass  # the client went away: nobody is left to be told
        finally:
            self.leave()

    def leave(self):
        """Cancel what is under way, write what is left, and give the place back."""
        self.gone = True
        self.server.members.pop(self, None)
        self.server.strangers.pop(self, None)
        for job in self.jobs:
            job.cancelled.set()
        self.outbox.put(None)
        if self.writer.is_alive():
            self.writer.join(LEAVE_SECONDS)
        else:
            self._write()  # it never got in: write why
        self.hang_up()  # ends the write to a client that does not read
        self.connection.close()
        self.server.clients.release()

    def _greet(self):
        # one deadline for all: a peer that sends a byte now and then must not keep its place
        deadline = threading.Timer(HELLO_SECONDS, self.hang_up)
        deadline.start()
        try:
            self._let_in()
        finally:
            deadline.cancel()
            self.server.strangers.pop(self, None)  # a member cannot be turned out
        send(self.connection, self.server.welcome)

    def _let_in(self):
        """Prove to the peer that we know the token, and have it prove the same. Raises ProtocolError."""
        hello = receive(self.connection, limit=MAX_HELLO)
        if not isinstance(hello, protocol.Hello) or not handshake.is_nonce(hello.nonce):
            raise ProtocolError("a connection begins with Hello and 64 hexadecimal digits; it is closed.")
        if hello.version != protocol.VERSION:
            raise ProtocolError(
                f"client and backend are of different versions of the pack (protocols {hello.version:x} and "
                f"{protocol.VERSION:x}); restart both, ComfyUI and ranks, from the same one."
            )
        nonce = handshake.new_nonce()
        token = self.server.token
        ours = handshake.proof(token, handshake.BACKEND, client_nonce=hello.nonce, backend_nonce=nonce)
        send(self.connection, protocol.Challenge(nonce, ours))
        try:
            answer = receive(self.connection, limit=MAX_HELLO)
        except OSError:
            self.server.log_stranger("did not answer this backend's proof; its token may be another")
            raise
        if not isinstance(answer, protocol.Proof) or not handshake.is_proof(
            answer.proof, token=token, role=handshake.CLIENT, client_nonce=hello.nonce, backend_nonce=nonce
        ):
            self.server.log_stranger("does not know this backend's token")
            raise ProtocolError("the token is not this backend's; connections without it are closed.")

    def _handle(self, message):
        self.jobs = [job for job in self.jobs if job.message is not None]
        if isinstance(message, protocol.Ping):
            self.outbox.put(protocol.Pong(sorted(self.server.models())))
        elif isinstance(message, protocol.Status):
            self.outbox.put(self.server.status())
        elif isinstance(message, protocol.Cancel):
            self._cancel()
        elif isinstance(message, protocol.Shutdown) and message.reason:
            self.server.send_to_all(protocol.Failure(message.reason, fatal=True))
        elif _can_wait(message) and self.server.running_for not in (None, self):
            # else who asks, in the midst of a graph, waits for a request of somebody else's
            self.outbox.put(protocol.Result({"left": [], "freed": False}))
        elif len(self.jobs) == MAX_WAITING:
            raise ProtocolError(f"{MAX_WAITING} requests of this connection wait already.")
        else:
            job = Job(message, self)
            self.jobs.append(job)
            self.server.jobs.put(job)

    def _cancel(self):
        """Cancel the jobs of this client: at once those that only wait, unless an earlier one has to be
        answered first, which a cancelled one is before its memory has gone back; what runs ends with its
        step."""
        for job in self.jobs:
            job.cancelled.set()
        with self.server.jobs.taking:
            for job in [each for each in self.jobs if not each.is_answered]:
                if job.running or not isinstance(job.message, protocol.WITHDRAWABLE):
                    break
                job.reply(protocol.Cancelled(0))
                self.server.jobs.finish(job)

    def _write(self):
        while (message := self.outbox.get()) is not None:
            try:
                send(self.connection, message)
            except ProtocolError as error:  # a reply that has no frame
                self.outbox.put(protocol.Failure(str(error)))
            except OSError:
                return  # the reading thread sees the same and cleans up

    def hang_up(self):
        """End both directions; the connection's thread cleans up."""
        with suppress(OSError):  # the client was faster
            self.connection.shutdown(socket.SHUT_RDWR)


class Server:
    """Listens at ``address`` ("unix:PATH" or "tcp:HOST:PORT") and queues the jobs of its clients."""

    def __init__(
        self,
        address: str,
        token: str,
        welcome: protocol.Welcome,
        models,
        of_rank=lambda rank: {"weight_bytes": 0},
        machines: Sequence[int] = (),
    ):
        """``models()``: name -> path of what is loaded; ``of_rank(rank)``: what Report.ranks says further;
        ``machines``: the number of every rank's machine, 0 being this one."""
        self.machines = machines or [0] * welcome.world_size
        #: The last refusal.
        self.last_error = ""
        self._started = time.monotonic()
        self.of_rank = of_rank
        self.token = token
        self.welcome = welcome
        self.models = models
        self.jobs = JobQueue()
        self.clients = threading.BoundedSemaphore(MAX_CLIENTS)
        #: Clients that have not proved anything yet, in the order in which they came.
        self.strangers: dict[Connection, None] = {}
        #: Clients that were let in.
        self.members: dict[Connection, None] = {}
        self._next_log = 0.0
        self.listener = listen(address)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while self.listener.fileno() >= 0:
            try:
                connection, _ = self.listener.accept()
                socket_options.prepare(connection)
            except OSError:
                time.sleep(0.1)  # the client left before it was in, or this process has too many files open
                continue
            if not self._has_place():
                _turn_away(connection)
                continue
            client = Connection(connection, self)
            self.strangers[client] = None
            try:
                threading.Thread(target=client.serve, daemon=True).start()
            except RuntimeError:  # this system starts no more threads: the next client may find one
                client.leave()

    def _has_place(self) -> bool:
        """Take a place for one more peer, if need be that of the one that has proved nothing the longest."""
        if self.clients.acquire(blocking=False):
            return True
        for client in list(self.strangers)[:1]:
            client.hang_up()
            return self.clients.acquire(timeout=HELLO_SECONDS)
        return False

    def log_stranger(self, what: str):
        """Write to the log that a client ``what`` and was not let in, unless the last such line is new."""
        now = time.monotonic()
        if now >= self._next_log:
            self._next_log = now + STRANGER_LOG_SECONDS
            print(f"A client was not let in: it {what}.", file=sys.stderr)

    def send_to_all(self, message):
        """Send a message to every client, from any thread."""
        for client in list(self.members):
            client.outbox.put(message)

    def write_out(self):
        """Write what waits for the clients, in LEAVE_SECONDS at most. Nothing is written after it."""
        members = list(self.members)
        for client in members:
            client.outbox.put(None)
        deadline = time.monotonic() + LEAVE_SECONDS
        for client in members:
            client.writer.join(max(0.0, deadline - time.monotonic()))

    @property
    def running_for(self) -> Connection | None:
        """Return the client whose request is under way."""
        job = self.jobs.running
        return job.client if job is not None else None

    def status(self) -> protocol.Report:
        """Return how the backend is, from any thread."""
        now = time.monotonic()
        kind, since = self.jobs.under_way
        return protocol.Report(
            seconds=now - self._started,
            models=self.models(),
            ranks=[self._rank(rank, pid) for rank, pid in enumerate(self.welcome.pids)],
            running=kind,
            running_seconds=now - since if kind else 0.0,
            waiting=self.jobs.qsize(),
            answered=dict(self.jobs.answered),
            last_error=self.last_error,
        )

    def _rank(self, rank: int, pid: int) -> dict:
        machine = self.machines[rank]
        found = {"rank": rank, "machine": machine, "pid": pid, **self.of_rank(rank)}
        # another machine's process number may be another process's here
        return found | {"resident_bytes": _resident(pid) if machine == 0 else 0}


def listen(address: str) -> socket.socket:
    """Listen at "unix:PATH" or "tcp:HOST:PORT", where an empty HOST is 127.0.0.1."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        folder = os.path.dirname(where)
        if stat.S_IMODE(os.stat(folder).st_mode) & 0o077:
            raise PermissionError(
                f"the socket's folder {folder} can be entered by other users; make it private (chmod 700)."
            )
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(where)
    else:
        host, _, port = where.rpartition(":")
        # an empty host would be every interface of this machine; who wants that writes 0.0.0.0
        listener = socket.create_server((host or "127.0.0.1", int(port)))
    listener.listen()
    return listener


def _resident(pid: int) -> int:
    """Return the bytes of memory of a process of this machine; 0 where it has ended."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def _can_wait(message) -> bool:
    """Return whether a message only gives memory back to others, of a model that its client keeps."""
    if isinstance(message, protocol.Unload):
        return message.park and not message.waits
    return isinstance(message, protocol.Release)


def _turn_away(connection: socket.socket):
    """Answer the first bytes of a client for which there is no place, and hang up."""
    connection.settimeout(FULL_SECONDS)
    with connection, suppress(OSError):
        # of its Hello, one small frame: what is not read would end the connection before the answer is seen.
        # A whole one may never come, and nobody is let in meanwhile
        connection.recv(MAX_HELLO)
        why = f"{MAX_CLIENTS} clients are connected, and there is place for no more; end one of them."
        send(connection, protocol.Failure(why))
