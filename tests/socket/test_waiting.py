"""What a client is told while its request waits for another client's, and that it can leave the queue."""

import threading

import pytest
from handshakes import TOKEN, greeted

from backend import protocol
from backend.client import client as client_module
from backend.client import connected, step_timer
from backend.client.client import BackendClient
from backend.client.pool import Backend
from backend.config import ParallelConfig
from backend.protocol import (
    Begun,
    Cancelled,
    Failure,
    Load,
    Loaded,
    Progress,
    Result,
    Sample,
    Waiting,
    framing,
)
from backend.serving import job_queue

SAMPLE = Sample("m", "euler", 1.0, 0)
RESULT = Result()


@pytest.fixture(autouse=True)
def every_step_is_told(monkeypatch):
    monkeypatch.setattr(job_queue, "WAITING_SECONDS", 0.0)
    monkeypatch.setattr(connected, "SHOWN_SECONDS", 0.0)


def asked(client, message):
    """A client whose request the server has queued."""
    framing.send(client, message)
    framing.send(client, protocol.Ping())
    found = []
    while not isinstance(reply := framing.receive(client), protocol.Pong):
        found.append(reply)
    return found


def test_who_waits_is_told_for_how_long_and_when_it_begins(server):
    busy, second, third = (greeted(server) for _ in range(3))
    assert asked(busy, SAMPLE) == []
    runs = server.jobs.next(5)
    runs.total = 20
    assert asked(second, Load("/a")) == [Waiting("Sample", 0, 20)]
    assert asked(third, SAMPLE) == [Waiting("Sample", 0, 20, before=1)]
    runs.reply(Progress(8, 20))
    assert framing.receive(second) == Waiting("Sample", 8, 20)
    assert framing.receive(third) == Waiting("Sample", 8, 20, before=1)
    runs.reply(RESULT)
    server.jobs.finish(runs)
    runs = server.jobs.next(5)
    assert framing.receive(second) == Begun()
    assert framing.receive(third) == Waiting("Load")
    runs.reply(Loaded("m", "flux"))
    server.jobs.finish(runs)
    runs = server.jobs.next(5)
    runs.reply(RESULT)
    assert [framing.receive(third) for _ in range(2)] == [Begun(), RESULT]


def test_what_waits_for_nobody_else_has_its_replies_alone(server):
    """A warm run, and requests of one client after another: not a message more than before. One after its own
    is told by the replies of that one."""
    client, idle = greeted(server), greeted(server)
    for message, answer in ((Load("/a"), Loaded("m", "flux")), (SAMPLE, RESULT)):
        assert asked(client, message) == []
        job = server.jobs.next(5)
        assert asked(client, message) == []
        job.reply(Progress(1, 2))
        job.reply(answer)
        server.jobs.finish(job)
        job = server.jobs.next(5)
        job.reply(answer)
        server.jobs.finish(job)
        assert [framing.receive(client) for _ in range(3)] == [Progress(1, 2), answer, answer]
    assert asked(idle, SAMPLE) == []


def test_who_leaves_the_queue_is_no_longer_before_others(server):
    busy, second, third = (greeted(server) for _ in range(3))
    asked(busy, SAMPLE)
    server.jobs.next(5)
    asked(second, Load("/a"))
    assert asked(third, SAMPLE) == [Waiting("Sample", before=1)]
    assert asked(second, protocol.Cancel()) == [Cancelled(0)]
    assert framing.receive(third) == Waiting("Sample") and server.jobs.qsize() == 1


@pytest.fixture
def waits(server):
    """A Backend of this server, which another client keeps busy with a request of 20 steps, and that job."""
    other = greeted(server)
    asked(other, SAMPLE)
    job = server.jobs.next(5)
    job.total = 20
    backend = Backend(ParallelConfig(address="tcp:host:1"), BackendClient(f"unix:{server.path}", TOKEN))
    yield backend, job
    other.close()
    backend.close()


def test_a_sampling_that_waits_says_so_and_can_be_cancelled(waits, server):
    backend, job = waits
    lines = []

    def should_cancel():
        if backend.wait_line and len(lines) < 2:
            lines.append(backend.wait_line)
            job.reply(Progress(19, 20))
        return backend.wait_line.endswith("1 step left")

    assert backend.sample(SAMPLE, should_cancel=should_cancel) is None
    line = "waiting for another client's request, "
    assert lines[0] == f"{line}20 steps left" and backend.alive() and server.jobs.qsize() == 0


def test_after_cancel_the_next_request_can_leave_the_queue_while_memory_goes_back(server, monkeypatch):
    """Rank 0 answers before its GPU has ended a step. Cancel of the next request waited for that, and then
    ended the ranks; an interrupt of a Load ended them at once. No time of the wait is a step's."""
    monkeypatch.setattr(client_module, "CANCEL_SECONDS", 10.0)
    looked = set()
    monkeypatch.setattr(step_timer.StepTimer, "look", lambda timer, waits: looked.add(waits))
    backend = Backend(ParallelConfig(address="tcp:host:1"), BackendClient(f"unix:{server.path}", TOKEN))
    running = []

    def answered():
        running.append(server.jobs.next(60))
        running[0].total = 20
        assert running[0].cancelled.wait(60)
        running[0].reply(Cancelled(1))

    ranks = threading.Thread(target=answered)
    ranks.start()
    assert backend.sample(SAMPLE, should_cancel=lambda: bool(running)) is None
    ranks.join()
    line = "waiting for the step of a cancelled request to end"
    looked.clear()
    tries = iter(range(50))  # ten a second

    def should_cancel():
        return backend.wait_line == line or next(tries, None) is None

    assert backend.sample(SAMPLE, should_cancel=should_cancel) is None
    assert True in looked and backend.alive()

    def check():
        if backend.wait_line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.load("/a", check=check)
    assert backend.alive() and server.jobs.qsize() == 0 and server.jobs.running is running[0]
    server.jobs.finish(running[0])
    assert backend.client.request(protocol.Ping()) == protocol.Pong(["m"])
    backend.close()


@pytest.mark.parametrize("known", [False, True], ids=["weights", "loaded already"])
def test_a_load_that_waits_is_interrupted_and_the_connection_stays(waits, server, known):
    """It hung up, and of a model that is loaded only after 20 seconds; the next run connected again."""
    backend, _ = waits
    if known:
        backend.models["/a", "default", "auto"] = "m"

    def check():
        if backend.wait_line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.load("/a", check=check)
    assert backend.alive() and server.jobs.qsize() == 0 and not backend.wait_line
    assert backend.client.request(protocol.Ping()) == protocol.Pong(["m"])


def test_an_unload_that_waits_is_interrupted_and_the_connection_stays(waits, server):
    """Its client hung up after 20 seconds, and the backend freed its models."""
    backend, _ = waits
    backend.models["/a", "default", "auto"] = "m"

    def check():
        if backend.wait_line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.unload(("/a", "default", "auto"), waits=True, check=check)
    assert backend.client.withdrawn and backend.alive() and server.jobs.qsize() == 0
    assert backend.client.request(protocol.Ping()) == protocol.Pong(["m"]) and not backend.client.withdrawn


@pytest.mark.parametrize("runs_on", [False, True], ids=["answered", "runs on"])
def test_an_interrupt_that_meets_an_unload_leaves_the_connection(waits, server, monkeypatch, runs_on):
    """It hung up, which ends ranks that nobody else uses. What the Unload did is noted."""
    monkeypatch.setattr("backend.client.client.WITHDRAW_SECONDS", 0.3)
    backend, job = waits
    backend.models["/a", "default", "auto"] = "m"

    def answer(mine):
        mine.reply(Result({"left": [0], "freed": True, "dropped": []}))
        server.jobs.finish(mine)

    def check():
        if backend.wait_line:
            server.jobs.finish(job)
            mine = server.jobs.next(5)
            assert mine.message == protocol.Unload("m")
            if runs_on:
                threading.Timer(1.0, answer, [mine]).start()
            else:
                answer(mine)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.unload(("/a", "default", "auto"), park=False, check=check)
    assert backend.alive() and not backend.client.withdrawn and not backend.models
    assert backend.client.request(protocol.Ping()) == protocol.Pong(["m"])


def test_a_load_that_is_interrupted_as_another_model_leaves_loads_nothing(waits, server):
    """The model that has left is no longer known, and the connection stays."""
    backend, job = waits
    backend.models |= {("/a", "default", "auto"): "m", ("/b", "default", "auto"): "n"}

    def check():
        if backend.wait_line:
            server.jobs.finish(job)
            mine = server.jobs.next(5)
            mine.reply(Result())
            server.jobs.finish(mine)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.load("/c", keep=[("/b", "default", "auto")], check=check)
    assert backend.alive() and [*backend.models.values()] == ["n"] and server.jobs.qsize() == 0


def test_an_interrupt_that_meets_the_begin_of_a_load_ends_the_connection(waits, server, monkeypatch):
    """As before: the ranks load."""
    monkeypatch.setattr("backend.client.client.WITHDRAW_SECONDS", 0.3)
    backend, job = waits

    def check():
        if backend.wait_line:
            server.jobs.finish(job)
            assert server.jobs.next(5).message == Load("/a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.load("/a", check=check)
    assert backend.closed


@pytest.mark.parametrize(
    "answer, stays",
    [(Loaded("m", "flux"), False), (Failure("it ends", fatal=True), False), (Failure("no model"), True)],
    ids=["loaded", "fatal", "refused"],
)
def test_an_interrupt_that_meets_the_end_of_a_load(waits, server, answer, stays):
    """What was loaded meanwhile nobody would unload; a backend that ends is not at hand for the next run."""
    backend, job = waits

    def check():
        if backend.wait_line:
            server.jobs.finish(job)
            mine = server.jobs.next(5)
            mine.reply(answer)
            server.jobs.finish(mine)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.load("/a", check=check)
    assert backend.closed != stays and backend.alive() == stays


def test_no_step_is_missed_while_another_client_is_served(waits, server, monkeypatch, caplog):
    """Steps that do not end were reported of ranks that had not begun."""
    monkeypatch.setattr(step_timer, "FIRST_SECONDS", 0.3)
    backend, job = waits
    backend.client._places = lambda done: "rank 0 in step 1"
    looks = []

    def end():
        server.jobs.finish(job)
        mine = server.jobs.next(5)
        mine.reply(RESULT)
        server.jobs.finish(mine)

    def should_cancel():
        looks.append(bool(backend.wait_line))
        if len(looks) == 8:
            threading.Thread(target=end).start()
        return False

    assert backend.sample(SAMPLE, should_cancel=should_cancel) == RESULT
    assert sum(looks) >= 5 and not caplog.messages
