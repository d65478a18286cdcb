"""Rank 0's socket under attack, without ranks behind it."""

import os
import socket
import threading
import time

import pytest
import torch
from handshakes import TOKEN, closed, connect, greeted

from backend import protocol
from backend.client.client import BackendClient, HandshakeError
from backend.loading.staging import Download
from backend.protocol import BackendError, Failure, Load, Ping, Pong, Welcome, framing
from backend.serving.progress import Previews, progress
from backend.serving.server import MAX_CLIENTS, MAX_WAITING, listen


def test_garbage_closes_one_connection_only(server):
    good, bad = greeted(server), greeted(server)
    bad.sendall(os.urandom(4096))
    assert isinstance(framing.receive(bad), Failure)
    framing.send(good, Ping())
    assert framing.receive(good) == Pong(["m"])


def test_requests_of_two_clients_queue_and_answers_find_their_way(server):
    clients = [greeted(server), greeted(server)]
    for index, client in enumerate(clients):
        framing.send(client, Load(f"/{index}"))
    for _ in clients:
        job = server.jobs.next(5)
        job.reply(protocol.Loaded(job.message.path, "flux"))
        server.jobs.finish(job)
    for index, client in enumerate(clients):
        while isinstance(reply := framing.receive(client), (protocol.Waiting, protocol.Begun)):
            pass
        assert reply.model == f"/{index}"


@pytest.mark.parametrize(
    "message", [protocol.Release([0]), protocol.Unload("m", True)], ids=["cached", "weights"]
)
def test_who_gives_memory_back_does_not_wait_for_another_client(server, message):
    """In the midst of a graph, which cannot be cancelled then: nothing is given back."""
    here, other = greeted(server), greeted(server)
    framing.send(other, Load("/long"))
    job = server.jobs.next(5)
    framing.send(here, message)
    assert framing.receive(here) == protocol.Result({"left": [], "freed": False})
    framing.send(here, protocol.Unload("m", True, waits=True))  # for a request of its own
    server.jobs.finish(job)
    assert server.jobs.next(5).message.waits
    framing.send(here, message)
    assert server.jobs.next(5).message == message


def test_a_client_that_leaves_cancels_its_request(server):
    client = greeted(server)
    framing.send(client, Load("/a"))
    job = server.jobs.next(5)
    client.close()
    assert job.cancelled.wait(5)


def test_cancel_after_the_end_does_not_touch_the_next_request(server):
    client = greeted(server)
    framing.send(client, Load("/a"))
    server.jobs.finish(server.jobs.next(5))
    framing.send(client, protocol.Cancel())
    framing.send(client, Load("/b"))
    job = server.jobs.next(5)
    time.sleep(0.1)
    assert not job.cancelled.is_set()


def sample() -> protocol.Sample:
    return protocol.Sample("m", "euler", 1.0, 0, tensors={"noise": torch.zeros(1)})


def test_a_sample_that_waits_is_cancelled_at_once(server):
    """While another client's runs; it never reaches the ranks."""
    busy, waiting = greeted(server), greeted(server)
    framing.send(busy, sample())
    runs = server.jobs.next(5)
    framing.send(waiting, sample())
    framing.send(waiting, protocol.Cancel())
    assert framing.receive(waiting) == protocol.Waiting("Sample")
    assert framing.receive(waiting) == protocol.Cancelled(0)
    assert not runs.cancelled.is_set() and server.jobs.next(0.05) is None
    framing.send(waiting, sample())
    assert server.jobs.next(5) is not None


def test_answers_keep_their_order_when_a_running_sample_is_cancelled(server):
    client = greeted(server)
    for _ in range(2):
        framing.send(client, sample())
    first = server.jobs.next(5)
    framing.send(client, protocol.Cancel())
    assert first.cancelled.wait(5)
    first.reply(protocol.Cancelled(7))
    server.jobs.finish(first)
    assert framing.receive(client) == protocol.Cancelled(7)
    second = server.jobs.next(5)
    assert second is not None and second.cancelled.wait(5)


def status(client) -> protocol.Report:
    framing.send(client, protocol.Status())
    report = framing.receive(client)
    assert isinstance(report, protocol.Report)
    return report


def test_status_is_told_while_the_ranks_work(server):
    busy, asks = greeted(server), greeted(server)
    assert status(asks).running == "" and status(asks).models == {"m": "/m.safetensors"}
    for _ in range(2):
        framing.send(busy, sample())
    job = server.jobs.next(5)
    time.sleep(0.05)
    report = status(asks)
    assert (report.running, report.waiting, report.answered) == ("Sample", 1, {})
    assert 0.05 <= report.running_seconds <= report.seconds
    job.reply(Failure("cfg is NaN"))
    server.jobs.finish(job)
    report = status(asks)
    assert (report.running, report.answered, report.last_error) == ("", {"Sample": 1}, "cfg is NaN")


def test_status_has_the_memory_of_each_rank(server):
    server.welcome = Welcome(2, "cpu", {}, [os.getpid(), 1 << 30])
    server.machines = [0, 1]
    server.of_rank = lambda rank: {"weight_bytes": 1000 + rank}
    own, other = status(greeted(server)).ranks
    assert own["rank"] == 0 and own["weight_bytes"] == 1000 and own["resident_bytes"] > 1 << 20
    assert other["weight_bytes"] == 1001 and other["resident_bytes"] == 0  # of another machine


def test_too_many_connections_are_closed_and_places_come_back(server):
    crowd = [greeted(server) for _ in range(MAX_CLIENTS)]
    with pytest.raises(HandshakeError, match=f"not let this client in: {MAX_CLIENTS} clients are connected"):
        BackendClient(f"unix:{server.path}", TOKEN)
    assert closed(connect(server))  # one that says nothing does not hold up the others
    slow = connect(server)
    slow.sendall(b"P")  # nor does one that says it slowly
    assert isinstance(framing.receive(slow), Failure)
    crowd.pop().close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            BackendClient(f"unix:{server.path}", TOKEN).close()
            return
        except BackendError:  # the server has not seen yet that one left
            time.sleep(0.05)
    pytest.fail("a place was not given back")


def test_a_slow_reader_does_not_hold_up_replies(server):
    """Replies wait in the connection's own outbox: the thread of the ranks never blocks on a client."""
    client = greeted(server)
    framing.send(client, Load("/a"))
    job = server.jobs.next(5)
    done = threading.Event()
    threading.Thread(
        target=lambda: ([job.reply(protocol.Loaded("m" * 100000, "flux")) for _ in range(200)], done.set()),
        daemon=True,
    ).start()
    assert done.wait(60)
    assert not job.client_keeps_up


def test_a_client_that_leaves_unread_replies_gives_its_place_back(server, monkeypatch):
    """It shuts its sending side and never reads: the write to it would block for ever."""
    monkeypatch.setattr("backend.serving.server.LEAVE_SECONDS", 0.2)
    before, client = server.clients._value, greeted(server)
    framing.send(client, Load("/a"))
    job = server.jobs.next(5)
    for _ in range(20):  # more than a socket's buffer holds
        job.reply(protocol.Loaded("m", "x" * 1_000_000))
    client.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + 60
    while server.clients._value < before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.clients._value == before


def test_what_was_computed_is_written_before_the_ranks_end(server):
    """Somebody stops a backend behind a long request. A client that reads nothing does not hold it up."""
    waits, deaf = greeted(server), greeted(server)
    large = protocol.Result({}, {"samples": torch.zeros(1 << 22)})
    for client in (waits, deaf):
        framing.send(client, sample())
        server.jobs.next(5).reply(large)
    found = []
    reader = threading.Thread(target=lambda: found.append(framing.receive(waits)))
    reader.start()
    started = time.monotonic()
    server.write_out()
    reader.join(60)
    assert found[0].tensors["samples"].shape == (1 << 22,) and time.monotonic() - started < 60
    assert not any(client.writer.is_alive() for client in server.members if client.outbox.empty())


def test_a_flood_of_requests_is_stopped(server):
    flooding, good = greeted(server), greeted(server)
    for _ in range(MAX_WAITING + 1):
        framing.send(flooding, Load("/a"))
    assert "wait already" in framing.receive(flooding).message and closed(flooding)
    framing.send(good, Ping())
    assert framing.receive(good) == Pong(["m"])


def test_a_reply_that_cannot_be_written_is_a_failure(server):
    client = greeted(server)
    framing.send(client, Load("/a"))
    server.jobs.next(5).reply(protocol.Result({"seconds": float("inf")}))
    assert "cannot be written" in framing.receive(client).message
    framing.send(client, Ping())
    assert framing.receive(client) == Pong(["m"])


def test_accepting_goes_on_after_an_error(server, monkeypatch):
    accept, calls = server.listener.accept, []

    class Failing:
        fileno = server.listener.fileno

        def accept(self):
            calls.append(1)
            if len(calls) == 1:
                raise OSError("too many open files")
            return accept()

    whole, server.listener = server.listener, Failing()
    greeted(server).close()  # accepted by the call that waits already
    greeted(server).close()
    assert len(calls) >= 2
    server.listener = whole


def test_accepting_goes_on_where_no_thread_can_be_started(server, monkeypatch):
    """Nor is its place lost, or a stranger left that cannot be turned out."""
    scarce = [1]

    class Scarce(threading.Thread):
        def start(self):
            if scarce:
                scarce.pop()
                raise RuntimeError("can't start new thread")
            super().start()

    before = server.clients._value
    with monkeypatch.context() as patched:
        patched.setattr("backend.serving.server.threading.Thread", Scarce)
        assert closed(connect(server)) and not scarce
    with greeted(server):  # which has its place until it is closed
        assert server.clients._value == before - 1 and not server.strangers


def test_shared_folder_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="chmod 700"):
        listen(f"unix:{tmp_path}/s")


def test_previews_are_bounded():
    now = [0.0]
    previews = Previews(0.2, lambda: now[0])
    assert previews.due() and not previews.due()
    now[0] = 0.25
    assert previews.due()
    assert not Previews(0, lambda: 0.0).due()


def test_previews_are_counted_with_their_cost(server):
    now, client = [0.0], greeted(server)
    framing.send(client, Load("/a"))
    job, previews = server.jobs.next(5), Previews(0.2, lambda: now[0])

    def start():
        now[0] += 0.05
        return Download(torch.ones(1))

    for step in (1, 2):
        progress(job, step, 2, previews, start)
        assert framing.receive(client) == protocol.Progress(
            step, 2, {"x0": torch.ones(1)} if step == 1 else {}
        )
        now[0] += 0.1
    assert previews.stats == {"previews": 1, "preview_seconds": pytest.approx(0.05)}


def test_a_preview_on_its_way_goes_with_the_next_step():
    """One that arrives a step after it was started, as from a GPU: a step sends that of the one before."""
    step, started = [0], []

    class Coming(Download):
        def __init__(self):
            self.step = step[0]
            started.append(self.step)

        def arrived(self):
            return torch.full((1,), self.step) if step[0] > self.step else None

    previews, sent = Previews(1e-9, time.monotonic), []
    for step[0] in range(4):
        sent.append(previews.latest(Coming))
    assert sent == [{}, *({"x0": torch.full((1,), each)} for each in range(3))]
    assert started == [0, 1, 2, 3] and previews.count == 3


def test_one_preview_is_on_its_way_at_a_time():
    """A host that is far ahead of its GPU starts no second one."""
    started = []

    class Never(Download):
        def __init__(self):
            started.append(self)

        def arrived(self):
            return None

    previews = Previews(1e-9, time.monotonic)
    assert [previews.latest(Never) for _ in range(5)] == [{}] * 5
    assert len(started) == 1 and not previews.count
