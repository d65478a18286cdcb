"""What clients that have gone leave on ranks that serve others: models that nobody names, and requests."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from backend.protocol import LORAS, Failure, Load, Ping, Release, Result, Sample, Shutdown, Unload
from backend.rank.admission import InsufficientMemory
from backend.rank.leader import Leader
from backend.rank.served_models import NamedModels, ServedFile
from backend.serving.job_queue import Job
from backend.serving.server import Connection

ALONE = [Unload("m"), Release([0])]
OTHERS = [Load("/m"), Sample("m", "euler", 1.0, 7)]


def client() -> Connection:
    return Connection(cast(Any, None), cast(Any, SimpleNamespace(last_error="")))


class Ranks(Leader):
    """Rank 0, alone, with ``models`` loaded; a Sample has room next to ``room`` of them."""

    def __init__(self, models: list[str], room: int):
        self.files = {model: ServedFile(f"/{model}", cast(Any, None)) for model in models}
        self.named, self.room = NamedModels(), room
        self.mesh = SimpleNamespace(world_size=1)
        held = {model: SimpleNamespace(parked_on=frozenset()) for model in models}
        self.engine = SimpleNamespace(models=held)
        self.control = SimpleNamespace(broadcast=lambda message: None)
        self.ran = []

    def unload(self, message: Unload):
        del self.files[message.model]

    def sample(self, job: Job):
        if len(self.files) > self.room:
            raise InsufficientMemory("rank 0 needs more.", {0: 1})
        self.ran.append(job.message)
        job.reply(Result())


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    def handler(leader, job, message):
        return lambda: leader.sample(job)

    monkeypatch.setattr(
        "backend.rank.leader.HANDLERS", {type(each): (handler, "it") for each in ALONE + OTHERS}
    )


def test_nobody_has_named_a_model_that_is_no_longer_loaded():
    """Somebody else who loads it again frees it whole."""
    ranks = Ranks(["gone", "loaded"], room=2)
    ranks.named[here := client()] = {"gone", "loaded"}
    ranks.called = {("gone", "off"), ("loaded", "off")}
    ranks.reports, ranks.admission = {}, cast(Any, SimpleNamespace(forget=lambda: None))
    del ranks.engine.models["gone"]
    ranks.forget_unloaded()
    assert not ranks.called
    assert ranks.named[here] == {"loaded"} and list(ranks.files) == ["loaded"]
    assert ranks.named.take_off(Unload("gone"), client()) == Unload("gone")


def test_models_of_clients_that_have_gone_leave_for_those_that_are_there():
    """The oldest first, and no more than has to."""
    ranks = Ranks(["old", "older", "mine", "new"], room=3)
    here, gone = client(), client()
    ranks.named |= {here: {"mine"}, gone: {"mine", "old", "older", "new"}}
    gone.gone = True
    ranks.run(Job(Sample("mine", "euler", 1.0, 7), here))
    assert list(ranks.files) == ["older", "mine", "new"] and here.outbox.get_nowait() == Result()
    ranks.room = 1
    ranks.run(Job(Sample(f"mine{LORAS}x", "euler", 1.0, 7), here))
    assert list(ranks.files) == ["mine"] and here.outbox.get_nowait() == Result()


def test_parked_models_stay_and_a_request_is_not_run_again_for_each():
    """What is in host memory is in nobody's way. One that ran out of memory in its midst runs once more."""
    ranks = Ranks(["parked", "one", "two"], room=1)
    ranks.engine.models["parked"].parked_on = frozenset({0})
    runs = []

    def sample(job):
        runs.append(list(ranks.files))
        raise InsufficientMemory("rank 0 ran out of memory in the middle of a request")

    ranks.sample = sample
    here = client()
    ranks.run(Job(Sample("own", "euler", 1.0, 7), here))
    assert runs == [["parked", "one", "two"], ["parked"]] and isinstance(here.outbox.get_nowait(), Failure)


def test_parked_models_of_clients_that_have_gone_leave_while_nothing_runs():
    """Not those of connected clients, nor those on a device, which the next client may name at once."""
    ranks = Ranks(["parked", "used", "on a device"], room=3)
    for model in ("parked", "used"):
        ranks.engine.models[model].parked_on = frozenset({0})
    here, gone = client(), client()
    ranks.named |= {here: {"used"}, gone: {"parked", "used", "on a device"}}
    gone.gone = True
    told = []
    ranks.control.broadcast = told.append
    jobs = [None, Job(Shutdown(), here)]
    queue = SimpleNamespace(next=lambda _: jobs.pop(0))
    ranks.server = cast(Any, SimpleNamespace(jobs=queue, write_out=lambda: None))
    ranks.lead()
    assert list(ranks.files) == ["used", "on a device"] and told == [Ping(), Unload("parked"), Shutdown()]


def test_models_that_a_connected_client_has_loaded_stay():
    """Nor does the request's own leave, whoever loaded it."""
    ranks = Ranks(["of another", "own"], room=1)
    here, other = client(), client()
    ranks.named[other] = {"of another"}
    ranks.run(Job(Sample("own", "euler", 1.0, 7), here))
    assert list(ranks.files) == ["of another", "own"]
    assert here.outbox.get_nowait() == Failure("rank 0 needs more.", lacking=[[0, 1]])


def test_a_model_that_another_client_has_loaded_stays_with_it(monkeypatch):
    """Who unloads it has done with it; it gives way in host memory, and leaves with the last of them."""
    monkeypatch.setattr("backend.rank.leader.HANDLERS", {Unload: (Leader.on_unload, "it")})
    ranks, told = Ranks(["m"], room=1), []
    here, other = client(), client()
    ranks.named |= {here: {"m"}, other: {"m"}}

    def unload(message):
        told.append(message)
        if not message.park:
            ranks.engine.models.pop(message.model)
        return [0]

    ranks.unload = unload
    replies = []
    for message, who in ((Unload("m", True, [0]), here), (Unload("m"), here), (Unload("m"), other)):
        ranks.run(Job(message, who))
        replies.append(who.outbox.get_nowait().stats)
    assert told == [Unload("m", True, [0], keeps=True), Unload("m", True, keeps=True), Unload("m")]
    assert [reply["freed"] for reply in replies] == [False, True, True]
    assert all(reply["left"] == [0] and reply["dropped"] == [] for reply in replies)
    assert ranks.named[here] == ranks.named[other] - {"m"} and not ranks.engine.models


def test_a_model_that_another_client_has_loaded_yields_to_nobody():
    named, here, other = NamedModels(), client(), client()
    named |= {here: {"m", "mine", "ours"}, other: {"ours"}}
    message = named.take_off(Unload("m", True, yields=["ours", 5, "mine"]), here)
    assert message == Unload("m", True, yields=["mine"])
    other.gone = True
    assert named.take_off(Unload("m", True, yields=["ours"]), here).yields == ["ours"]


@pytest.mark.parametrize("message", ALONE + OTHERS, ids=lambda message: type(message).__name__)
def test_requests_of_clients_that_have_gone_do_not_run(message):
    """But those that make room."""
    ranks = Ranks([], room=1)
    gone = client()
    gone.gone = True
    ranks.run(Job(message, gone))
    assert ranks.ran == [message] * (message in ALONE)
