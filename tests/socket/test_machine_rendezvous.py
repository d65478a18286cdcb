"""How launchers of several machines meet where strangers connect, too, or machine 0 does not answer."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import machine_pair
import pytest
from machine_pair import BEGIN, HELLO, PATIENCE, TOKEN, GaveUp

from backend.client.machines import machine_link, machine_rendezvous
from backend.protocol import BackendError


@pytest.fixture
def machines():
    return machine_pair.two_machines()


def stranger(machines, data: bytes) -> socket.socket:
    """Return a connection to machine 0, once it listens, that has sent ``data``."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            found = socket.create_connection(("127.0.0.1", machines[0].link_port))
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    found.sendall(data)
    return found


@pytest.mark.parametrize("data", [b"[" * 4000 + b"\n", b"\xff\n", b"9" * 4000 + b"\n"])
def test_a_stranger_does_not_end_machine_0(machines, data):
    """Lists in lists, no text, no message: before any proof."""
    with ThreadPoolExecutor() as pool:
        head = pool.submit(machine_rendezvous.gather, machines[0], TOKEN, HELLO, BEGIN, PATIENCE)
        with stranger(machines, data) as connection:
            connection.settimeout(PATIENCE)
            assert connection.recv(1) == b"", "it is not let in"
        other, begin = machine_rendezvous.join(machines[1], TOKEN, HELLO, PATIENCE)
        for link in (other, head.result()):
            link.close()
    assert begin == BEGIN


@pytest.mark.parametrize("strangers", [2, machine_rendezvous.MAX_HANDSHAKES + 1])
def test_connections_that_say_nothing_keep_no_machine_out(machines, monkeypatch, strangers):
    """Whoever reaches the port can hold as many: nothing is to wait for one of them."""
    monkeypatch.setattr(machine_rendezvous, "HELLO_SECONDS", 600.0)
    with ThreadPoolExecutor() as pool, ExitStack() as held:
        head = pool.submit(machine_rendezvous.gather, machines[0], TOKEN, HELLO, BEGIN, PATIENCE)
        for _ in range(strangers):
            held.enter_context(stranger(machines, b""))
        other, begin = machine_rendezvous.join(machines[1], TOKEN, HELLO, PATIENCE)
        for link in (other, head.result()):
            link.close()
    assert begin == BEGIN


def test_a_handshake_has_one_deadline(machines, monkeypatch, capsys):
    """Not one for each of its lines."""
    monkeypatch.setattr(machine_rendezvous, "HELLO_SECONDS", 1.0)
    asked = []
    ask = machine_link.Peer.ask

    def noting(peer, key, seconds, *limit):
        asked.append(seconds)
        return ask(peer, key, seconds, *limit)

    monkeypatch.setattr(machine_link.Peer, "ask", noting)
    with ThreadPoolExecutor() as pool:
        head = pool.submit(machine_rendezvous.gather, machines[0], TOKEN, HELLO, BEGIN, 3)
        with stranger(machines, b'{"machine": 1}\n') as connection:
            time.sleep(0.5)
            connection.sendall(b'{"nonce": "%s"}\n' % (b"a" * 64))
            connection.settimeout(PATIENCE)
            while connection.recv(1 << 16):
                pass
        with pytest.raises(BackendError, match="127.0.0.1 was not let in: "):
            head.result()
    assert len(asked) == 3 and asked[2] < 0.6


@pytest.mark.parametrize("end", ["silent", "hangs up"])
def test_a_machine_0_that_does_not_answer_is_asked_again(machines, monkeypatch, end, capsys):
    """Its launcher may be another one soon; that tokens differ is said where they do."""
    monkeypatch.setattr(machine_rendezvous, "HELLO_SECONDS", 0.5)
    with (
        ThreadPoolExecutor() as pool,
        socket.create_server(("127.0.0.1", machines[0].link_port)) as first,
    ):
        other = pool.submit(machine_rendezvous.join, machines[1], TOKEN, HELLO, PATIENCE)
        with first.accept()[0] as connection:
            if end == "silent":
                connection.settimeout(PATIENCE)
                while connection.recv(1 << 16):
                    pass
        first.close()
        monkeypatch.setattr(machine_rendezvous, "HELLO_SECONDS", 60.0)
        head = machine_rendezvous.gather(machines[0], TOKEN, HELLO, BEGIN, PATIENCE)
        for link in (other.result()[0], head):
            link.close()
    said = capsys.readouterr().err
    assert "machine 0 (127.0.0.1) has not answered at port" in said and "token" not in said
    with socket.create_server(("127.0.0.1", machines[0].link_port)):
        monkeypatch.setattr(machine_rendezvous, "HELLO_SECONDS", 0.2)
        with pytest.raises(BackendError, match="has not answered .*see what its launcher says"):
            machine_rendezvous.join(machines[1], TOKEN, HELLO, 0.5)


def test_who_waits_says_that_machine_0_has_ended(machines, monkeypatch):
    """The tokens were right, and machine 2 is still missing."""
    three = [replace(machine, count=3) for machine in machines]
    proved = threading.Event()

    def check():
        if proved.is_set():
            raise GaveUp

    def wait(*arguments):
        proved.set()
        return wait_for_begin(*arguments)

    wait_for_begin = machine_rendezvous._wait_for_begin
    monkeypatch.setattr(machine_rendezvous, "_wait_for_begin", wait)

    with ThreadPoolExecutor() as pool:
        head = pool.submit(machine_rendezvous.gather, three[0], TOKEN, HELLO, BEGIN, PATIENCE, check)
        with pytest.raises(BackendError, match="has ended before every machine had joined .it has hung up"):
            machine_rendezvous.join(three[1], TOKEN, HELLO, PATIENCE)
        with pytest.raises(GaveUp):
            head.result()


def test_what_is_no_launcher_is_named(machines):
    with socket.create_server(("127.0.0.1", machines[0].link_port)) as server, ThreadPoolExecutor() as pool:
        other = pool.submit(machine_rendezvous.join, machines[1], TOKEN, HELLO, PATIENCE)
        with server.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            with pytest.raises(BackendError, match="is no launcher .it sent what is no JSON"):
                other.result()
