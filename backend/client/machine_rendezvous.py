"""How the launchers of a backend's machines find each other.

Machine 0 listens on its interface to the others, which connect to it. Both ends prove that they know the
token (protocol/handshake.py), which never travels. Imports neither ComfyUI nor torch.
"""

import socket
import sys
import time
from typing import Any

from ..config import ConfigError
from ..protocol import BackendError, handshake
from .machine_link import MAX_LINE, Check, Link, Peer
from .machines import Machines

#: The label of a machine's proof begins with this, so that none made on a backend's socket fits.
ROLE = "machine"
#: A machine that connects must prove itself within so many seconds.
HELLO_SECONDS = 5.0


def gather(machines: Machines, token: str, hello: dict, begin: dict, seconds: float, check: Check) -> Link:
    """On machine 0: wait until every other machine has joined, send each ``begin``, and return the link.
    ``hello``: what must be the same on all, such as versions. Raises BackendError or ConfigError."""
    _check_endpoint(machines)
    _listener(machines.address, machines.link_port - 1, "torchrun").close()
    listener = _listener(machines.address, machines.link_port, "the launchers")
    listener.settimeout(0.1)
    peers: dict[int, Peer] = {}
    refused = ""
    deadline = time.monotonic() + seconds
    while missing := _missing(machines, peers):
        check()
        if time.monotonic() > deadline:
            listener.close()
            names = ", ".join(map(str, missing))
            raise BackendError(
                f"machine {names} of {machines.count} has not joined in {seconds:.0f} s; start it with "
                f"--node-rank {missing[0]} --rdzv-endpoint {machines.endpoint} and this token{refused}."
            )
        try:
            connection, (host, _) = listener.accept()
        except OSError:
            continue
        _missing(machines, peers)  # a launcher that has ended may be the one that comes again
        try:
            peer = _let_in(connection, host, machines, token, hello, peers)
        except OSError as error:
            connection.close()
            before = refused
            refused = f"; {host} was not let in: {error}"
            if refused != before:
                print(refused[2:], file=sys.stderr, flush=True)
            continue
        peers[peer.index] = peer
    for peer in peers.values():
        peer.send({"begin": begin})
    return Link(machines, list(peers.values()), listener)


def _missing(machines: Machines, peers: dict[int, Peer]) -> list[int]:
    """Drop machines whose launcher has ended, and return the numbers of those that are not there."""
    for index, peer in list(peers.items()):
        if peer.has_hung_up():
            peers.pop(index).socket.close()
    return [index for index in range(1, machines.count) if index not in peers]


def _check_endpoint(machines: Machines):
    """Refuse an endpoint that is an address of another network than the interface, where the others would
    find nobody. Debian has a machine's own name at 127.0.1.1, wherever others find it."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(machines.host, None, socket.AF_INET)}
    except OSError:
        return  # a name that others know: the link says whether they come
    if machines.address not in found and not any(str(each).startswith("127.") for each in found):
        raise ConfigError(
            f"--rdzv-endpoint {machines.endpoint} is {', '.join(sorted(map(str, found)))}, but --interface "
            f"{machines.interface} is {machines.address} on this machine; give every machine "
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


def _let_in(
    connection: socket.socket, host: str, machines: Machines, token: str, hello: dict, peers: dict[int, Peer]
) -> Peer:
    """Return a machine that has proved itself. OSError for one that has not, or may not join."""
    peer = Peer(connection, -1, host)
    index = peer.ask(ROLE, HELLO_SECONDS)
    theirs = peer.ask("nonce", HELLO_SECONDS)
    if not isinstance(index, int) or not isinstance(theirs, str) or not handshake.is_nonce(theirs):
        raise ConnectionError("it is no launcher")
    nonce = handshake.new_nonce()
    peer.send({"nonce": nonce, "proof": handshake.proof(token, f"{ROLE} 0", theirs, nonce)})
    proof = str(peer.ask("proof", HELLO_SECONDS))
    if not handshake.is_proof(proof, token, f"{ROLE} {index}", theirs, nonce):
        raise ConnectionError("it does not know the token")
    refusal = ""
    if not 1 <= index < machines.count or index in peers:
        refusal = f"--node-rank {index} is taken, or none of 1 to {machines.count - 1}"
    elif peer.said.get("hello") != hello:
        theirs, ours = _differing(peer.said.get("hello"), hello)
        refusal = f"this machine has {theirs}, machine 0 {ours}; install the same on both"
    if refusal:
        peer.send({"refused": refusal})
        raise ConnectionError(refusal.replace("this machine", "it"))
    peer.index = index
    peer.name = f"machine {index} ({host})"
    return peer


def _differing(theirs: Any, ours: dict) -> tuple[str, str]:
    """Return what two machines have and the other has not, in words."""
    theirs = theirs if isinstance(theirs, dict) else {}
    names = [name for name in ours | theirs if theirs.get(name) != ours.get(name)]
    mine, other = ([f"{n} {has.get(n, 'unknown')!s:.40}" for n in names] for has in (theirs, ours))
    return ", ".join(mine), ", ".join(other)


def join(machines: Machines, token: str, hello: dict, seconds: float, check: Check) -> tuple[Link, dict]:
    """On another machine: connect to machine 0 and wait until all have joined; return the link and what
    machine 0 says to ``begin``. Raises BackendError or ConfigError."""
    deadline = time.monotonic() + seconds
    target = (machines.host, machines.link_port)
    while True:
        check()
        try:
            connection = socket.create_connection(target, 2.0, (machines.address, 0))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                why = f"machine 0 was not reached at {target[0]}:{target[1]} in {seconds:.0f} s ({error})"
                raise BackendError(f"{why}; start it, and let this machine reach that port.") from None
            time.sleep(0.2)
    peer = Peer(connection, 0, machines.leader)
    nonce = handshake.new_nonce()
    peer.send({ROLE: machines.index, "nonce": nonce, "hello": hello})
    try:
        theirs = str(peer.ask("nonce", HELLO_SECONDS))
        proof = str(peer.ask("proof", HELLO_SECONDS))
        if not handshake.is_proof(proof, token, f"{ROLE} 0", nonce, theirs):
            raise BackendError(f"{peer.name} does not know this token, so nothing was sent to it.")
        peer.send({"proof": handshake.proof(token, f"{ROLE} {machines.index}", nonce, theirs)})
        begin = _wait_for_begin(peer, deadline, check)
    except OSError as error:
        connection.close()
        raise BackendError(
            f"{peer.name} did not let this machine in ({error}); compare the tokens."
        ) from None
    except BaseException:
        connection.close()  # machine 0 is not to wait for us
        raise
    return Link(machines, [peer]), begin


def _wait_for_begin(peer: Peer, deadline: float, check: Check) -> dict:
    while not peer.said.keys() & {"begin", "refused"}:
        check()
        try:
            peer.ask("begin", 0.5, MAX_LINE)
        except TimeoutError:
            if time.monotonic() > deadline:
                raise BackendError(f"{peer.name} still waits for other machines.") from None
    if "refused" in peer.said:
        raise BackendError(f"{peer.name} refused: {peer.said['refused']}.")
    return peer.said["begin"]
