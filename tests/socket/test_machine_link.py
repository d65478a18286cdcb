"""The launchers' connection between machines (client/machines/machine_link.py), on loopback, without
ranks."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import machine_pair
import pytest
from machine_pair import BEGIN, HELLO, PATIENCE, TOKEN, GaveUp

from backend.client.exit_report import RankFailure, cause_among
from backend.client.machines import machine_link, machine_rendezvous
from backend.client.silence import SILENT_SECONDS
from backend.config import ConfigError
from backend.protocol import BackendError


@pytest.fixture
def machines():
    return machine_pair.two_machines()


@pytest.fixture
def joined(machines):
    """Links of both, once they have found each other."""
    with ThreadPoolExecutor() as pool:
        head = pool.submit(machine_rendezvous.gather, machines[0], TOKEN, HELLO, BEGIN, PATIENCE)
        other, begin = machine_rendezvous.join(machines[1], TOKEN, HELLO, PATIENCE)
        links = head.result(), other
    assert begin == BEGIN
    yield links
    for link in links:
        link.close()


class Ends:
    """Keeps what a link says to end for."""

    def __init__(self):
        self.said: list[str] = []
        self.ready = threading.Event()
        self._came = threading.Event()

    def __call__(self, sentence: str):
        self.said.append(sentence)
        self._came.set()

    def wait(self) -> str:
        assert self._came.wait(PATIENCE)
        return self.said[0]


def watched(links) -> list[Ends]:
    ends = [Ends(), Ends()]
    for link, end in zip(links, ends):
        link.watch(end, end.ready.set)
    return ends


def test_all_machines_say_the_same_cause(joined):
    """A rank of machine 1 was killed; machine 0's fails by it, and that is no cause."""
    ends = watched(joined)
    joined[0].broadcast(ready=True)
    assert ends[1].ready.wait(PATIENCE)
    killed = RankFailure(1, -9, machine="machine 1 (b)")
    follows = RankFailure(0, 1, "RuntimeError: Connection closed by peer", 5.0, machine="machine 0 (a)")
    with ThreadPoolExecutor() as pool:
        other = pool.submit(joined[1].conclude, "", [killed])
        assert ends[0].wait() == ""  # it has still to say why
        found = [joined[0].conclude("", [follows]), other.result()]
    for silence, failures in found:
        assert silence == "" and "rank 1 on machine 1 (b) was killed by SIGKILL" in str(cause_among(failures))


def test_a_machine_that_is_not_heard_of_is_silent(joined):
    assert joined[0]._limit == SILENT_SECONDS == 10
    joined[0]._limit = 1.0
    ends = Ends()
    joined[0].watch(ends, ends.ready.set)  # machine 1 says nothing
    assert "machine 1 (127.0.0.1) has been silent for 1 s (its link is cut" in ends.wait()
    time.sleep(1.5)
    assert len(ends.said) == 1


@pytest.mark.parametrize("why", ["", "no GPU"], ids=["killed", "with a reason"])
def test_a_machine_that_leaves(joined, why):
    ends = watched(joined)
    if why:
        joined[1].close(why)
    else:
        joined[1].peers[0].socket.shutdown(socket.SHUT_RDWR)
    assert f"has left: {why}" in ends[0].wait() if why else "its launcher has ended" in ends[0].wait()


def test_a_goodbye_is_no_fault(joined):
    ends = watched(joined)
    joined[1].close()
    time.sleep(1.5)
    assert ends[0].said == []


def lines_of(peer: machine_link.Peer, count: int) -> list[dict]:
    peer.socket.settimeout(PATIENCE)
    found: list[dict] = []
    while len(found) < count:
        found += peer.read()
    return found


def test_lines_of_several_threads_stay_whole(joined):
    """A report is longer than the socket's buffers, and the other thread beats while it is sent."""
    sender, receiver = joined[0].peers[0], joined[1].peers[0]
    sender.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    report = {"report": "x" * (machine_link.MAX_LINE // 2)}
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(lambda: [sender.send(report) for _ in range(20)])

        def beat() -> int:
            beats = 0
            while not sent.done():
                sender.send({"beat": True})
                beats += 1
            sender.send({"bye": True})
            return beats

        beats = pool.submit(beat)
        found: list[dict] = []
        while {"bye": True} not in found[-1:]:
            found += lines_of(receiver, 1)
    assert found.count(report) == 20 and found.count({"beat": True}) == beats.result()


def test_a_line_that_a_slow_link_took_half_of_is_finished(joined):
    sender, receiver = joined[0].peers[0], joined[1].peers[0]
    sender.socket.settimeout(0.1)
    text = "x" * (machine_link.MAX_LINE // 2)
    for _ in range(40):  # nobody reads
        sender.send({"report": text})
    with ThreadPoolExecutor() as pool:
        found = pool.submit(lines_of, receiver, 41)
        sender.socket.settimeout(PATIENCE)
        sender.send({"beat": True})
        assert found.result() == [{"report": text}] * 40 + [{"beat": True}]


def test_garbage_ends_the_connection(joined):
    ends = watched(joined)
    joined[1].peers[0].socket.sendall(b"GET / HTTP/1.1\n")
    assert "it sent what is no JSON" in ends[0].wait()


@pytest.mark.parametrize(
    "token, hello, index, says",
    [
        ("5" * 64, HELLO, 1, "does not know this token"),
        (TOKEN, {**HELLO, "pack": "2"}, 1, "this machine has pack 2, machine 0 pack 1; install the same"),
        (TOKEN, {"pack": "1"}, 1, "this machine has diffusers unknown, machine 0 diffusers 3; install"),
        (TOKEN, {**HELLO, "torch": "2"}, 1, "this machine has torch 2, machine 0 torch unknown; install"),
        (TOKEN, HELLO, 7, "--node-rank 7 is taken, or none of 1 to 1"),
    ],
    ids=["token", "version", "absent", "further", "number"],
)
def test_who_is_not_let_in_is_told_why(machines, token, hello, index, says):
    stop = threading.Event()

    def check():
        if stop.is_set():
            raise GaveUp

    with ThreadPoolExecutor() as pool:
        head = pool.submit(machine_rendezvous.gather, machines[0], TOKEN, HELLO, BEGIN, PATIENCE, check)
        with pytest.raises(BackendError, match=says):
            machine_rendezvous.join(replace(machines[1], index=index), token, hello, PATIENCE)
        stop.set()
        with pytest.raises(GaveUp):
            head.result()


def test_machine_0_says_who_was_not_let_in(machines, capsys):
    """As of a machine with another token, whose launcher alone would know why. The last one is said."""
    said = ""
    with ThreadPoolExecutor() as pool:
        head = pool.submit(machine_rendezvous.gather, machines[0], TOKEN, HELLO, BEGIN, 3)
        for count, hello, token in ((1, HELLO, "5" * 64), (2, {**HELLO, "pack": "2"}, TOKEN)):
            with pytest.raises(BackendError):
                machine_rendezvous.join(machines[1], token, hello, PATIENCE)
            while said.count("was not let in") < count and not head.done():  # each has a thread of its own
                said += capsys.readouterr().err
                time.sleep(0.01)
        with pytest.raises(BackendError, match="and this token; 127.0.0.1 was not let in: it has pack 2"):
            head.result()
    assert said.count("127.0.0.1 was not let in: it ") == 2


def test_a_machine_that_starts_again_before_all_are_there_is_let_in(machines):
    """Its first launcher has ended while machine 2 was still missing."""
    three = [replace(machine, count=3) for machine in machines]
    three.append(replace(three[1], index=2))
    with ThreadPoolExecutor() as pool:
        head = pool.submit(machine_rendezvous.gather, three[0], TOKEN, HELLO, BEGIN, PATIENCE)
        with pytest.raises(BackendError, match="still waits for other machines"):
            machine_rendezvous.join(three[1], TOKEN, HELLO, 1)
        others = [
            pool.submit(machine_rendezvous.join, machine, TOKEN, HELLO, PATIENCE) for machine in three[1:]
        ]
        links = [head.result(), *(other.result()[0] for other in others)]
    assert {peer.index for peer in links[0].peers} == {1, 2}
    for link in links:
        link.close()


def test_an_endpoint_of_another_network_is_refused(machines, monkeypatch):
    """The others would look for machine 0 there, where it does not listen."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.1.2.3", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
    port = machines[0].link_port - 1
    with pytest.raises(ConfigError, match=f"is 10.1.2.3, but --interface lo is 127.0.0.1 .*127.0.0.1:{port}"):
        machine_rendezvous.gather(machines[0], TOKEN, HELLO, BEGIN, 1)


@pytest.mark.parametrize("after, whose", [(0, "torchrun"), (1, "the launchers")])
def test_a_port_that_is_taken_is_named(machines, after, whose):
    """29500 is torchrun's own default: another training may hold it."""
    port = machines[0].link_port - 1 + after
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ConfigError, match=f"{port} of {whose}"):
        machine_rendezvous.gather(machines[0], TOKEN, HELLO, BEGIN, 1)


def test_who_does_not_come_is_named(machines):
    with pytest.raises(
        BackendError, match="machine 1 of 2 has not joined in 1 s; start it with --node-rank 1"
    ):
        machine_rendezvous.gather(machines[0], TOKEN, HELLO, BEGIN, 1)
    with pytest.raises(BackendError, match="machine 0 was not reached"):
        machine_rendezvous.join(machines[1], TOKEN, HELLO, 1)
