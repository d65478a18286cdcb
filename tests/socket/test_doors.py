"""Who can reach what of a started backend: every listening socket of the process tree, what a stranger does
with them, where the token is, and what a listener hears that a graph names."""

import ipaddress
import json
import os
import re
import resource
import secrets
import select
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_backend import TOKEN, WELCOME, reply
from torch.distributed import TCPStore

from backend.client import client as client_module
from backend.client import pool
from backend.client.client import BackendClient
from backend.client.open_socket import CONNECT_SECONDS, open_socket
from backend.config import ConfigError, ParallelConfig
from backend.protocol import BackendError, Challenge, Failure, framing, handshake
from backend.protocol.messages import VERSION
from backend.rank import start
from backend.serving.server import listen

pytestmark = pytest.mark.usefixtures("real_launches")  # whose environments and doors are looked at

#: The nodes' side of a backend and nothing else; it answers each line with the ranks that run then.
PARENT = """
import sys; sys.path.insert(0, {root!r})
import json
from backend.client import pool
from backend.config import ParallelConfig
backend = pool.backend_for(ParallelConfig(ulysses_degree=2, device="cpu"))
print(json.dumps([backend.process._token, str(backend.process.folder)]), flush=True)
for line in sys.stdin:
    backend = pool.backend_for(ParallelConfig(device="cpu", **json.loads(line)))
    print(json.dumps(backend.welcome.pids), flush=True)
pool.close_all()
"""


class Started:
    """A process that has started a backend: ``token``, ``folder``, and the ids of ``processes``, its own
    first, the agent and the ranks after it."""

    def __init__(self):
        code = PARENT.format(root=str(Path(__file__).parents[2]))
        self.parent = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.token, self.folder = json.loads(self.parent.stdout.readline())
        self.processes = tree(self.parent.pid)

    def ranks(self, **degrees) -> list[int]:
        """Process ids of the ranks once they run ``degrees``, new ones where the old ones are gone."""
        print(json.dumps(degrees), file=self.parent.stdin, flush=True)
        return json.loads(self.parent.stdout.readline())

    def close(self):
        self.parent.stdin.close()
        self.parent.wait(60)


@pytest.fixture(scope="module")
def started():
    ours = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (ours[1], ours[1]))
    started = Started()
    resource.setrlimit(resource.RLIMIT_CORE, ours)
    yield started
    started.close()


def tree(pid: int) -> list[int]:
    """``pid`` and every process that comes from it."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [pid, *(found for child in children.split() for found in tree(int(child)))]


def sockets(pid: int) -> set[str]:
    """Inodes of the sockets that a process holds."""
    links = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def table(name: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]


def ip_listeners(pids) -> list[tuple[str, int]]:
    """(address, port) of every TCP socket of ``pids`` that listens, and of every UDP one."""
    held, found = set().union(*map(sockets, pids)), []
    for name, state in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
        for row in table(name):
            if row[3] == state and row[9] in held:
                host, port = row[1].split(":")
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                found.append((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


def unix_listeners(pids) -> list[str]:
    """Paths of the unix sockets of ``pids`` that listen."""
    held, accepts = set().union(*map(sockets, pids)), 0x10000
    return [" ".join(row[7:]) for row in table("unix") if row[6] in held and int(row[3], 16) & accepts]


def test_no_process_listens_on_a_network(started):
    assert len(started.processes) == 4  # this one's child, the agent, two ranks
    ours = socket.create_server(("0.0.0.0", 0))  # such a door is seen
    assert ("0.0.0.0", ours.getsockname()[1]) in ip_listeners([os.getpid()])
    ours.close()
    listeners = ip_listeners(started.processes)
    assert listeners and not [host for host, _ in listeners if host != "127.0.0.1"]
    assert unix_listeners(started.processes) == [f"{started.folder}/backend.sock"]
    folder = os.stat(started.folder)
    assert stat.S_IMODE(folder.st_mode) == 0o700 and folder.st_uid == os.getuid()


def test_token_and_configuration_are_in_no_place_that_others_read(started):
    for pid in started.processes:
        for name in ("environ", "cmdline"):
            text = Path(f"/proc/{pid}/{name}").read_bytes()
            assert text and started.token.encode() not in text and b'"ulysses_degree"' not in text
    for path in Path(started.folder).rglob("*"):
        assert not path.is_file() or started.token.encode() not in path.read_bytes()


def test_a_rank_that_crashes_leaves_no_dump_of_its_memory(started):
    """Which holds weights and the token, and would lie in the private folder for a day."""
    parent, _, *ranks = started.processes
    _, hard = resource.prlimit(parent, resource.RLIMIT_CORE)
    assert [resource.prlimit(pid, resource.RLIMIT_CORE) for pid in ranks] == [(0, hard)] * 2
    assert resource.prlimit(parent, resource.RLIMIT_CORE)[0] != 0 or hard == 0  # such a limit is seen


#: A foreign process that takes every port for a rendezvous store and puts a pickle there that makes a file.
#: It prints the ports at which a store answered; it does not wait long for the others.
STRANGER = """
import base64, json, os, pickle, sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore

class Touch:
    def __reduce__(self):
        return os.mknod, (sys.argv[1],)

def poison(host, port):
    store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    found.append(port)
    for key in store.list_keys():
        store.set(key.removeprefix("/"), base64.b64encode(pickle.dumps(Touch())))

found, places = [], json.loads(sys.argv[2])
threads = [threading.Thread(target=poison, args=place, daemon=True) for place in places]
for thread in threads:
    thread.start()
time.sleep(6)
print(json.dumps(found), flush=True)
os._exit(0)
"""


def test_a_stranger_at_every_port_runs_nothing(started, tmp_path):
    """What listens is no store, and noise at it takes no rank away, nor the groups that come later."""
    before, marker = started.ranks(ulysses_degree=2), tmp_path / "code has run"
    places = [("127.0.0.1", port) for _, port in ip_listeners(started.processes)]
    ours = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # such a store is found
    given = json.dumps([*places, ("127.0.0.1", ours.port)])
    command = [sys.executable, "-c", STRANGER, str(marker), given]
    stores = json.loads(subprocess.run(command, stdout=subprocess.PIPE, timeout=120).stdout)
    assert ours.port in stores
    stores.remove(ours.port)
    deadline = time.monotonic() + 12  # an agent looks into its store every 5 s
    while stores and not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not marker.exists() and not stores
    for place in places:
        with socket.create_connection(place, 2) as noise:
            noise.sendall(os.urandom(4096))
    assert started.ranks(cfg_degree=2) == started.ranks(ulysses_degree=2) == before


def test_a_host_that_is_left_out_is_this_machine():
    for address in ("tcp::0", "tcp:0"):
        with listen(address) as listener:
            host, port = listener.getsockname()
            assert host == "127.0.0.1"
            for there in (f"tcp::{port}", f"tcp:{port}"):
                with open_socket(there) as connected:
                    assert connected.getpeername() == (host, port)


def test_a_graph_names_listed_addresses_only(monkeypatch):
    token, stranger = secrets.token_hex(32), Listener(frame(Challenge("0" * 64, "0" * 64)))
    monkeypatch.setenv("PARALLEL_DIT_TOKEN", token)
    config = ParallelConfig(address=stranger.address)
    for allowed in ("", f"{stranger.address}0,tcp:127.0.0.1", stranger.address.upper()):
        monkeypatch.setenv("PARALLEL_DIT_ADDRESSES", allowed)
        with pytest.raises(ConfigError, match=f"{stranger.address}', which PARALLEL_DIT_ADDRESSES does not"):
            pool.backend_for(config)
    monkeypatch.delenv("PARALLEL_DIT_ADDRESSES")
    with pytest.raises(ConfigError, match="does not list"):
        pool.backend_for(config)
    assert not stranger.was_called()
    monkeypatch.setenv("PARALLEL_DIT_ADDRESSES", f"unix:/run/b, {stranger.address}")
    with pytest.raises(BackendError, match="not know our token"):
        pool.backend_for(config)
    heard = stranger.stop()
    assert b"Hello" in heard and not [at for at in range(57) if token[at : at + 8].encode() in heard]


class Listener:
    """A stranger that listens: it sends ``answers``, one for each message, and keeps what it was sent."""

    def __init__(self, *answers: bytes):
        self.heard, self.answers = b"", answers
        self.server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp:127.0.0.1:{self.server.getsockname()[1]}"
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        connection, _ = self.server.accept()
        for answer in self.answers:
            self.heard += connection.recv(1 << 16)
            connection.sendall(answer)
        while more := connection.recv(1 << 16):
            self.heard += more

    def stop(self) -> bytes:
        """All that it has heard, once the client has hung up."""
        self.thread.join(10)
        self.server.close()
        return self.heard

    def was_called(self) -> bool:
        """Whether somebody has connected by now."""
        waiting = select.select([self.server], [], [], 0.2)[0]
        return bool(waiting or self.heard)


def frame(message) -> bytes:
    return b"".join(framing.encode(message))


@pytest.mark.parametrize(
    "answer, words",
    [
        (frame(Challenge("0" * 64, "0" * 64)), "not know our token"),
        (frame(Challenge("", "")), "not know our token"),
        (frame(Challenge("0" * 64, "\u00e9")), "not know our token"),
        (frame(WELCOME), "Welcome where Challenge belongs"),
        (frame(Failure("no")), r"in: no\."),
        (framing.PREFIX.pack(framing.MAGIC, 5000, 0), "limit of 4096"),
        (framing.PREFIX.pack(framing.MAGIC, 100, 1 << 30), "limit of 4096"),
    ],
    ids=["wrong proof", "no proof", "no digits", "no challenge", "refusal", "long header", "long body"],
)
def test_a_stranger_that_listens_learns_nothing_of_the_token(answer, words):
    token, stranger = secrets.token_hex(32), Listener(answer)
    with pytest.raises(BackendError, match=words):
        BackendClient(stranger.address, token)
    heard = stranger.stop()
    hello = rb'(?s).{16}\{"type": "Hello", "nonce": "([0-9a-f]{64})", "version": %d\}' % VERSION
    nonce = re.fullmatch(hello, heard)
    assert nonce  # that and nothing else: no byte depends on the token
    again = Listener(answer)
    with pytest.raises(BackendError):
        BackendClient(again.address, token)
    assert nonce[1] not in again.stop()  # a nonce is used once


def test_a_proof_of_ours_is_not_taken_for_the_backends():
    """The stranger asks a backend of our token as a client would, or sends the client's role back."""
    server = socket.create_server(("127.0.0.1", 0))

    def reflect():
        connection, _ = server.accept()
        hello = framing.receive(connection)
        wrong = handshake.proof(TOKEN, handshake.CLIENT, hello.nonce, hello.nonce)
        reply(connection, Challenge(hello.nonce, wrong))
        connection.recv(1)

    threading.Thread(target=reflect, daemon=True).start()
    with pytest.raises(BackendError, match="not know our token"):
        BackendClient(f"tcp:127.0.0.1:{server.getsockname()[1]}", TOKEN)
    server.close()


@pytest.mark.parametrize("drip", [b"", b"P"], ids=["silent", "slow"])
def test_a_stranger_does_not_keep_the_client(monkeypatch, drip):
    monkeypatch.setattr(client_module, "GREET_SECONDS", 0.5)
    stranger, began = Listener(drip), time.monotonic()
    with pytest.raises(BackendError, match="did not let this client in"):
        BackendClient(stranger.address, TOKEN)
    assert time.monotonic() - began < CONNECT_SECONDS
    stranger.stop()


def test_a_token_that_is_given_by_hand(tmp_path, monkeypatch):
    path, token = tmp_path / "token", secrets.token_hex(32)
    path.write_text(token + "\n")
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="read by other users; chmod 600"):
        start.own_token(str(path))
    path.chmod(0o600)
    assert start.own_token(str(path)) == token
    for short in ("", "x" * 31):
        monkeypatch.setenv("PARALLEL_DIT_TOKEN", short)
        with pytest.raises(ConfigError, match=f"has {len(short)} characters.*could be guessed.*at least 32"):
            start.own_token(None)
    monkeypatch.setenv("PARALLEL_DIT_TOKEN", token)
    assert start.own_token(None) == token


def test_ranks_of_several_machines_need_the_gpus_of_their_own(monkeypatch):
    def device(ranks, here, **config):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        return start._device(ParallelConfig(**config))

    monkeypatch.setattr(start.torch.cuda, "device_count", int)
    monkeypatch.setattr(start.mesh.dist, "is_nccl_available", lambda: True)
    assert device(32, 16, ulysses_degree=32, device="cpu") == "cpu"
    with pytest.raises(ConfigError, match="ulysses_degree 2 = 2 ranks, but torchrun started 4"):
        device(4, 4, ulysses_degree=2)
    monkeypatch.setattr(start.torch.cuda, "device_count", lambda: 8)
    assert device(16, 8, ulysses_degree=16) == "cuda"
    with pytest.raises(
        ConfigError, match="this machine would run 9 of the 18 ranks and has 8 GPUs; change --nnodes"
    ):
        device(18, 9, ulysses_degree=18)
    with pytest.raises(
        ConfigError, match="run 17 of the 34 ranks, and at most 16 on the CPU; change --nnodes"
    ):
        device(34, 17, ulysses_degree=34, device="cpu")
