"""The client's end of a backend's socket: one request at a time, with progress and cancel while it runs."""

import math
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from .. import protocol
from ..errors import SHORT
from ..protocol import BackendError, Failure, RefusedError, framing, handshake
from ..protocol.messages import LORAS
from ..runtime.callbacks import never, nothing
from .interrupts import PATIENCE
from .launching import fork_guard
from .open_socket import open_socket
from .step_timer import StepTimer

#: How often a wait looks whether somebody wants to stop.
POLL_SECONDS = 0.1
#: The ranks' start before ``meanwhile``: on busy cores that would keep them from reading the request.
START_SECONDS = 0.01
#: A peer that takes or sends nothing for this long in the middle of a frame is gone.
FRAME_SECONDS = 60.0
#: A backend lets a client in within this long, also while its ranks work.
GREET_SECONDS = 30.0
#: Least of the longest wait for the end of the step that runs when Cancel is sent; a request of a model whose
#: steps take longer is given the time of CANCEL_STEPS of them, and a step that compiles COMPILED_SECONDS.
#: Ranks look for Cancel before each evaluation; their GPUs are up to two steps behind.
CANCEL_SECONDS = 120.0
CANCEL_STEPS = 3
#: Who may leave a cancelled request waits so long for its end.
LEAVE_SECONDS = 1.0
#: A request that waits for another client's leaves the queue within this long: no rank has a part in it.
WITHDRAW_SECONDS = 5.0
#: What the ranks compute with a model.
Request = protocol.Sample | protocol.ModelCall


@dataclass(frozen=True)
class Left:
    """A cancelled request that goes on: what its step does besides computing, when it was cancelled, and
    until when its end is waited for (monotonic seconds)."""

    reason: str
    since: float
    deadline: float


class HandshakeError(BackendError):
    """Who listens at the address has answered, but does not let this client in, or is no backend of ours."""

    __module__ = SHORT


class BackendClient:
    """A connection whose two ends have proved to each other that they know the token. One caller at a time.

    ``welcome`` says what runs behind it, ``check`` is as in ``request``; ``is_hung``: does the caller know
    that the ranks will not answer? ``steps_of_ranks``: as in StepTimer. Raises OSError where nobody listens
    at ``address``, BackendError where the peer hangs up or does not let us in.
    """

    def __init__(
        self,
        address: str,
        token: str,
        check=nothing,
        is_hung=never,
        steps_of_ranks: Callable[[int], str] = lambda done: "",
    ):
        self.address = address
        self.closed = False
        #: Why the backend ended, where it has said so between two requests.
        self.last_word = ""
        #: What the request under way waits for: another client's; None once it has begun.
        self.waiting: protocol.Waiting | None = None
        self.waits_since = 0.0
        #: The steps of the Sample or ModelCall under way.
        self.timer: StepTimer | None = None
        self.left: Left | None = None
        #: Whether the last request left the queue, without any effect.
        self.withdrawn = False
        #: The reply to an Unload that began before its interrupt could take it out of the queue: it is done.
        self.late_reply: protocol.Result | None = None
        self._is_hung = is_hung
        self._steps_of_ranks = steps_of_ranks
        #: Models of which a call has ended, and whether it compiled.
        self._called: set[tuple[str, str]] = set()
        #: Seconds of the longest step of each model so far, by the name without LoRAs.
        self._longest: dict[str, float] = {}
        self._socket = open_socket(address)
        fork_guard.hold(self._socket)  # else rank 0 would not see us end
        self._socket.settimeout(FRAME_SECONDS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self.welcome = self._greet(token, check)

    def request(self, message, check=nothing, on_progress=nothing, limit: int = framing.MAX_BODY):
        """Return the reply to a message that has one; Progress before it goes to ``on_progress``.

        ``check()`` is called about ten times a second. What either raises closes the connection, since the
        reply still to come could be taken for the next one's; not while the request waits for another
        client's, which it is taken out of the queue for; an Unload that begins first is waited for. Raises
        RefusedError where the backend stays as it was, BackendError where it ended. A reply of more than
        ``limit`` bytes is not read.
        """
        self.late_reply = None
        self.send(message)
        try:
            while (reply := self._next(limit)) is None or isinstance(reply, protocol.Progress):
                if reply is not None:
                    on_progress(reply)
                check()
        except BaseException:
            waits = not self.closed and self.waiting is not None
            can_leave = waits and isinstance(message, protocol.WITHDRAWABLE)
            if not (can_leave and self._has_left(message)):
                self.close()
            raise
        return self._accepted(reply)

    def sample(
        self, message: Request, on_progress=nothing, should_cancel=never, meanwhile=nothing, leaves=False
    ):
        """Run one Sample or ModelCall to its Result, or None where ``should_cancel`` stopped it;
        ``meanwhile()`` runs while the ranks work. Who ``leaves`` waits LEAVE_SECONDS for the end of what it
        cancels, and calls ``finish`` before anything else where that goes on (``left``).

        What ``on_progress(Progress)`` raises cancels the request, waits for its end and is raised again, so
        that the connection stays usable. Where the ranks hang, or their step does not end, it is closed, and
        at once where this process is to exit.
        """
        self.send(message)
        is_call = isinstance(message, protocol.ModelCall)
        warmup = 0 if is_call else message.warmup_steps
        has_compiled = is_call and (message.model, message.compile) in self._called
        compile = "off" if has_compiled else message.compile
        base = message.model.partition(LORAS)[0]
        longest = self._longest.get(base, 0.0)
        self.timer = timer = StepTimer(compile, self._steps_of_ranks, warmup, longest, not is_call)
        try:
            self._selector.select(START_SECONDS)
            meanwhile()
            while not should_cancel():
                reply = self._next()
                timer.look(waits=self.waiting is not None)
                if isinstance(reply, protocol.Progress):
                    timer.step()
                    on_progress(reply)
                elif reply is not None:
                    result = self._accepted(reply)
                    if is_call:
                        timer.step()  # which has no Progress
                        self._called.add((message.model, message.compile))
                    return result
        except (BackendError, RefusedError):
            raise
        except SystemExit:  # whoever ends us does not wait for a step
            self.close()
            raise
        except BaseException:
            self._cancel(timer, leaves)
            raise
        finally:
            self._longest[base] = timer.longest_without_compile
            self.timer = None
        self._cancel(timer, leaves)
        return None

    def send(self, message):
        """Send a message without waiting for a reply. Raises RefusedError for one that has no frame."""
        self._check_open()
        if not isinstance(message, protocol.Cancel):
            self.waiting = None
            self.withdrawn = False
        try:
            framing.send(self._socket, message)
        except protocol.ProtocolError as error:  # it has no frame, so nothing was sent
            raise RefusedError(f"The request cannot be sent: {error}") from error
        except OSError as error:
            raise self._lost(error) from error

    def is_open(self) -> bool:
        """Look at the socket between two requests, without sending anything; close it where the peer hung up.
        Unread bytes count as a hang-up: they would be taken for the next reply."""
        if self.closed:
            return False
        if not self._selector.select(0):
            return True
        # readable with no request under way: the end of the stream, an error, or a last word
        with suppress(BackendError, protocol.ProtocolError):
            word = self._next(framing.MAX_HEADER)
            self.last_word = word.message if isinstance(word, Failure) and word.fatal else ""
        self.close()
        return False

    def hang_up(self):
        """End both directions, from any thread; who waits for a reply gets BackendError and closes."""
        with suppress(OSError):  # the peer was faster, or it is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self):
        """Hang up; more than once is fine."""
        if not self.closed:
            self.closed = True
            self._selector.close()
            self.hang_up()
            self._socket.close()

    def _greet(self, token: str, check) -> protocol.Welcome:
        """Shake hands (handshake.py): the backend proves itself before anything secret is sent. Raises
        HandshakeError, and BackendError where the peer hangs up."""
        # one deadline for all of it: a listener that sends a byte now and then must not keep us
        deadline = threading.Timer(GREET_SECONDS, self.hang_up)
        deadline.start()
        try:
            ours = handshake.new_nonce()
            challenge = self._asked(protocol.Hello(ours), protocol.Challenge, check)
            nonces = {"client_nonce": ours, "backend_nonce": challenge.nonce}
            is_known = handshake.is_nonce(challenge.nonce) and handshake.is_proof(
                challenge.proof, token, handshake.BACKEND, **nonces
            )
            if not is_known:
                what = "it does not know our token, so nothing of ours was sent to it"
                remedy = "check that PARALLEL_DIT_TOKEN is the token that it was started with"
                raise BackendError(f"{what}; {remedy}")
            mine = handshake.proof(token, handshake.CLIENT, **nonces)
            # it has proved itself, and says a line of every rank
            return self._asked(protocol.Proof(mine), protocol.Welcome, check, framing.MAX_HEADER)
        except (BackendError, RefusedError) as error:
            self.close()
            cause = error.__cause__
            is_odd = isinstance(cause, protocol.ProtocolError)  # what no backend of ours says
            kind = BackendError if isinstance(cause, OSError) and not is_odd else HandshakeError
            why = str(cause if is_odd else error).rstrip(".")
            raise kind(f"The backend at {self.address} did not let this client in: {why}.") from error
        finally:
            deadline.cancel()

    def _asked(self, message, kind: type, check, limit: int = handshake.MAX_HELLO):
        """Return the answer of the class ``kind``, of at most ``limit`` bytes, to a handshake's message."""
        reply = self.request(message, check, limit=limit)
        if not isinstance(reply, kind):
            what = f"it answered {type(reply).__name__} where {kind.__name__} belongs"
            raise BackendError(f"{what}; it is another program, or of another version of the pack")
        return reply

    def finish(self):
        """Wait for the end of the request that is ``left``. Raises BackendError where the backend ends."""
        assert self.left is not None
        try:
            self._goes_on(self.left)
        finally:
            self.left = None

    def _cancel(self, timer: StepTimer, leaves: bool):
        """Ask the ranks to stop, whose steps ``timer`` has seen, and wait for it."""
        self.send(protocol.Cancel())
        now = time.monotonic()
        patience = max(CANCEL_SECONDS, CANCEL_STEPS * timer.likely, timer.compiling)
        left = Left(timer.reason, since=now, deadline=now + patience)
        if self._goes_on(left, LEAVE_SECONDS if leaves else patience):
            self.left = left

    def _goes_on(self, left: Left, seconds: float = math.inf) -> bool:
        """Wait for the end of a cancelled request; return whether it goes on after so many seconds. Hang up
        where the ranks hang, or do not end it by its deadline: no error, since it was cancelled anyway."""
        while (now := time.monotonic()) < left.deadline and not self._is_hung():
            if now >= left.since + seconds:
                return True
            try:
                reply = self._next()
            except BackendError:
                if self._is_hung():
                    return False  # and was ended for it
                raise
            if isinstance(reply, Failure) and reply.fatal:
                self._accepted(reply)
            if reply is not None and not isinstance(reply, protocol.Progress):
                return False
        self.close()
        return False

    def _has_left(self, message) -> bool:
        """Take a request that waits for another client's out of the queue. Return whether its end is read,
        and nothing of it is left (``withdrawn``): not where it began first and goes on, or has loaded what
        nobody here knows of, or where the backend ends. An Unload that began first goes on to its end."""
        began = time.monotonic()
        with suppress(BackendError, RefusedError):
            self.send(protocol.Cancel())
            while not self._is_hung():
                has_begun = self.waiting is None and isinstance(message, protocol.Unload)
                if time.monotonic() > began + (PATIENCE if has_begun else WITHDRAW_SECONDS):
                    return False
                reply = self._next()
                if reply is not None:
                    return self._is_end(reply, message)
        return False

    def _is_end(self, reply, message) -> bool:
        """Note what a request was answered that was to leave the queue. Return whether that ends it."""
        if isinstance(message, protocol.Unload) and isinstance(reply, protocol.Result):
            self.late_reply = reply
        elif isinstance(reply, Failure):
            self.withdrawn = not reply.fatal
        else:
            self.withdrawn = isinstance(reply, (protocol.Cancelled, protocol.Described))
        return self.withdrawn or self.late_reply is not None

    def _next(self, limit: int = framing.MAX_BODY):
        """Return the next message, all of it, or None where none begins within POLL_SECONDS, or where it is
        about what the request waits for (``waiting``)."""
        self._check_open()
        try:
            reply = framing.receive(self._socket, limit) if self._selector.select(POLL_SECONDS) else None
        except OSError as error:
            raise self._lost(error) from error
        if isinstance(reply, (protocol.Waiting, protocol.Begun)):
            if self.waiting is None:
                self.waits_since = time.monotonic()
            self.waiting = reply if isinstance(reply, protocol.Waiting) else None
            return None
        if reply is not None:
            self.waiting = None
        return reply

    def _check_open(self):
        if self.closed:
            raise BackendError(f"The connection to the backend at {self.address} is closed")

    def _lost(self, error: OSError) -> BackendError:
        self.close()
        return BackendError(f"The connection to the backend at {self.address} was lost ({error})")

    def _accepted(self, reply):
        if not isinstance(reply, Failure):
            return reply
        if not reply.fatal:
            refusal = RefusedError(reply.message)
            refusal.lacking = dict(reply.lacking)
            raise refusal
        self.close()
        raise BackendError(reply.message)
