"""How the launchers of a backend's machines find each other: machine 0 listens on its interface, the others
connect to it. Both ends prove that they know the token (protocol/handshake.py), which never travels."""

import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from ...config import ConfigError
from ...protocol import BackendError, handshake
from ...protocol.handshake import HELLO_SECONDS
from ...runtime.callbacks import nothing
from ..durations import READY_SECONDS
from .machine_link import MAX_LINE, Check, Link, Peer
from .machines import Machines

#: The label of a machine's proof begins with this, so that none made on a backend's socket fits.
ROLE = "machine"
#: Connections that have not proved themselves; of more the oldest is closed.
MAX_HANDSHAKES = 64


def gather(
    machines: Machines,
    token: str,
    hello: dict,
    begin: dict,
    seconds: float = READY_SECONDS,
    check: Check = nothing,
) -> Link:
    """Wait, on machine 0, until all others have joined, send each ``begin``, and return the link.
    ``hello``: what must be the same on all, such as versions. Raises BackendError or ConfigError."""
    _check_endpoint(machines)
    _listener(machines.address, machines.link_port - 1, "torchrun").close()
    listener = _listener(machines.address, machines.link_port, "the launchers")
    listener.settimeout(0.1)
    handshakes = _Handshakes(machines, token, hello)
    try:
        _wait_for_all(handshakes, listener, seconds, check)
    except BaseException:
        listener.close()
        handshakes.close()
        raise
    handshakes.end()
    peers = list(handshakes.peers.values())
    for peer in peers:
        peer.send({"begin": begin})
    return Link(machines, peers, listener)


def _wait_for_all(handshakes: "_Handshakes", listener: socket.socket, seconds: float, check: Check):
    machines = handshakes.machines
    deadline = time.monotonic() + seconds
    while missing := handshakes.missing():
        check()
        if time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise BackendError(
                f"machine {names} of {machines.count} has not joined in {seconds:.0f} s; start it with "
                f"--node-rank {missing[0]} --rdzv-endpoint {machines.endpoint} and this token"
                f"{handshakes.refused}."
            )
        try:
            connection, (host, _) = listener.accept()
        except OSError:
            continue
        handshakes.start(connection, host)


class _Handshakes:
    """Lets machines in. Each connection has a thread of its own: whoever says nothing keeps no other out."""

    def __init__(self, machines: Machines, token: str, hello: dict):
        self.machines = machines
        self.peers: dict[int, Peer] = {}
        #: Who was not let in last, and why, for a message; empty while nobody was refused.
        self.refused = ""
        self._token = token
        self._hello = hello
        self._lock = threading.Lock()
        self._pending: list[socket.socket] = []
        self._ended = False

    def start(self, connection: socket.socket, host: str):
        """Begin a handshake; it takes HELLO_SECONDS at most."""
        with self._lock:
            if len(self._pending) >= MAX_HANDSHAKES:
                _hang_up(self._pending.pop(0))
            self._pending.append(connection)
        thread = threading.Thread(target=self._run, args=(connection, host), name="handshake", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # of too many threads
            self._forget(connection)
            connection.close()

    def missing(self) -> list[int]:
        """Drop machines whose launcher has ended, and return the numbers of those that are not there. Once
        none is missing, nobody else is let in."""
        with self._lock:
            self._drop_ended()
            missing = [index for index in range(1, self.machines.count) if index not in self.peers]
            self._ended = not missing
        return missing

    def end(self):
        """End the handshakes that are under way."""
        with self._lock:
            self._ended = True
            for connection in self._pending:
                _hang_up(connection)

    def close(self):
        """End all handshakes, and hang up on the machines that were let in."""
        self.end()
        for peer in self.peers.values():
            peer.socket.close()

    def _drop_ended(self):
        for index, peer in list(self.peers.items()):
            if peer.has_hung_up():
                self.peers.pop(index).socket.close()

    def _run(self, connection: socket.socket, host: str):
        peer = None
        try:
            proved = _proved(connection, host, self._token)
            with self._lock:
                if connection not in self._pending:
                    raise ConnectionError("too many others waited")
                self._admit(proved)
                self._pending.remove(connection)  # else end() would hang up on it
                peer = proved
        except OSError as error:
            self._say(f"; {host} was not let in: {error}")
        finally:
            self._forget(connection)
            if peer is None:
                connection.close()

    def _forget(self, connection: socket.socket):
        with self._lock:
            if connection in self._pending:
                self._pending.remove(connection)

    def _admit(self, peer: Peer):
        """Count a machine that has proved itself among the others. ConnectionError where it may not join."""
        if self._ended:
            raise ConnectionError("all machines had joined")
        self._drop_ended()  # a launcher that has ended may be the one that comes again
        refusal = ""
        if not 1 <= peer.index < self.machines.count or peer.index in self.peers:
            refusal = f"--node-rank {peer.index} is taken, or none of 1 to {self.machines.count - 1}"
        elif peer.said.get("hello") != self._hello:
            theirs, ours = _differing(peer.said.get("hello"), self._hello)
            refusal = f"this machine has {theirs}, machine 0 {ours}; install the same on both"
        if refusal:
            peer.send({"refused": refusal})
            raise ConnectionError(refusal.replace("this machine", "it"))
        peer.socket.settimeout(HELLO_SECONDS)
        self.peers[peer.index] = peer

    def _say(self, refused: str):
        with self._lock:
            is_new = refused != self.refused and not self._ended
            if is_new:
                self.refused = refused
        if is_new:  # a terminal that is not read keeps nobody else out
            print(refused[2:], file=sys.stderr, flush=True)


def _hang_up(connection: socket.socket):
    """Wake the thread that waits for what a connection says; it closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _check_endpoint(machines: Machines):
    """Refuse an endpoint that is an address of another network than the interface, where the others would
    find nobody. Debian has a machine's own name at 127.0.1.1, wherever others find it."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(machines.host, None, socket.AF_INET)}
    except OSError:
        return  # a name that others know: the link says whether they come
    if machines.address not in addresses and not any(str(each).startswith("127.") for each in addresses):
        raise ConfigError(
            f"--rdzv-endpoint {machines.endpoint} is {', '.join(sorted(map(str, addresses)))}, but "
            f"--interface {machines.interface} is {machines.address} on this machine; give every machine "
            f"{machines.address}:{machines.link_port - 1}."
        )


def _listener(address: str, port: int, whose: str) -> socket.socket:
    try:
        return socket.create_server((address, port))
    except OSError as error:
        raise ConfigError(
            f"the port {address}:{port} of {whose} cannot be opened ({error.strerror}); end what listens "
            f"there, or give every machine another --rdzv-endpoint."
        ) from None


def _proved(connection: socket.socket, host: str, token: str) -> Peer:
    """Return a machine that has proved itself in HELLO_SECONDS. OSError for one that has not."""
    deadline = time.monotonic() + HELLO_SECONDS
    peer = Peer(connection, index=-1, name=host)

    def ask(key: str) -> Any:
        return peer.ask(key, deadline - time.monotonic())

    index = ask(ROLE)
    theirs = ask("nonce")
    if not isinstance(index, int) or not isinstance(theirs, str) or not handshake.is_nonce(theirs):
        raise ConnectionError("it is no launcher")
    nonce = handshake.new_nonce()
    own = handshake.proof(token, f"{ROLE} 0", client_nonce=theirs, backend_nonce=nonce)
    peer.send({"nonce": nonce, "proof": own})
    proof = str(ask("proof"))
    if not handshake.is_proof(proof, token, f"{ROLE} {index}", client_nonce=theirs, backend_nonce=nonce):
        raise ConnectionError("it does not know the token")
    peer.index = index
    peer.name = f"machine {index} ({host})"
    return peer


def _differing(theirs: Any, ours: dict) -> tuple[str, str]:
    """Return what two machines have and the other has not, in words."""
    theirs = theirs if isinstance(theirs, dict) else {}
    names = [name for name in ours | theirs if theirs.get(name) != ours.get(name)]
    mine, other = ([f"{n} {has.get(n, 'unknown')!s:.40}" for n in names] for has in (theirs, ours))
    return ", ".join(mine), ", ".join(other)


def join(machines: Machines, token: str, hello: dict, seconds: float = READY_SECONDS) -> tuple[Link, dict]:
    """Connect this machine, which is not the first, to machine 0, and wait until all have joined; return the
    link and what machine 0 says to ``begin``. Raises BackendError or ConfigError."""
    deadline = time.monotonic() + seconds
    said = ""
    while True:
        peer = _connected(machines, deadline, seconds)
        try:
            silence = _prove(peer, machines, token, hello)
            if not silence:
                return Link(machines, [peer]), _wait_for_begin(peer, deadline)
        except OSError as error:
            peer.socket.close()
            what = f"what listens at {machines.host}:{machines.link_port} is no launcher ({error})"
            raise BackendError(f"{what}; compare --rdzv-endpoint with machine 0's.") from None
        except BaseException:
            peer.socket.close()  # machine 0 is not to wait for us
            raise
        peer.socket.close()
        what = f"{peer.name} has not answered at port {machines.link_port}: {silence}"
        if time.monotonic() > deadline:
            raise BackendError(f"{what}; see what its launcher says, and whether another one listens there.")
        if what != said:
            print(f"{what}; trying again.", file=sys.stderr, flush=True)
        said = what
        time.sleep(0.2)


def _connected(machines: Machines, deadline: float, seconds: float) -> Peer:
    """Return a connection to machine 0's port. Raises BackendError where there is none by the deadline."""
    target = (machines.host, machines.link_port)
    while True:
        try:
            connection = socket.create_connection(target, 2.0, (machines.address, 0))
            return Peer(connection, index=0, name=f"machine 0 ({machines.host})")
        except OSError as error:
            if time.monotonic() > deadline:
                why = f"machine 0 was not reached at {target[0]}:{target[1]} in {seconds:.0f} s ({error})"
                raise BackendError(f"{why}; start it, and let this machine reach that port.") from None
            time.sleep(0.2)


def _prove(peer: Peer, machines: Machines, token: str, hello: dict) -> str:
    """Have machine 0 prove itself, and then prove this machine; return why it has not answered, which others
    who connect there can bring about, empty where it has. Raises BackendError where it does not know the
    token, and OSError where it is no launcher."""
    deadline = time.monotonic() + HELLO_SECONDS
    nonce = handshake.new_nonce()
    peer.send({ROLE: machines.index, "nonce": nonce, "hello": hello})
    try:
        theirs = str(peer.ask("nonce", HELLO_SECONDS))
        proof = str(peer.ask("proof", deadline - time.monotonic()))
    except (TimeoutError, ConnectionResetError) as error:
        return str(error)
    if not handshake.is_proof(proof, token, f"{ROLE} 0", client_nonce=nonce, backend_nonce=theirs):
        raise BackendError(f"{peer.name} does not know this token, so nothing was sent to it.")
    own = handshake.proof(token, f"{ROLE} {machines.index}", client_nonce=nonce, backend_nonce=theirs)
    peer.send({"proof": own})
    return ""


def _wait_for_begin(peer: Peer, deadline: float) -> dict:
    while not peer.said.keys() & {"begin", "refused"}:
        try:
            peer.ask("begin", 0.5, MAX_LINE)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise BackendError(f"{peer.name} still waits for other machines.") from None
        except OSError as error:
            what = f"{peer.name} has ended before every machine had joined ({error})"
            raise BackendError(f"{what}; see what it says, and start it and this machine again.") from None
    if "refused" in peer.said:
        raise BackendError(f"{peer.name} refused: {peer.said['refused']}.")
    return peer.said["begin"]
