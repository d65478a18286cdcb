"""How many messages a run on a warm backend costs, and what is found out without one."""

import select

import pytest
import torch
from fake_backend import TOKEN, FakeBackend, reply

from backend.client import pool
from backend.client.auto.model_choice import ModelChoice
from backend.client.client import BackendClient
from backend.client.pool import Backend
from backend.config import ParallelConfig
from backend.protocol import Failure, Load, Loaded, Result, Sample, framing

CONFIG = ParallelConfig(device="cpu")


@pytest.fixture
def warm(tmp_path, monkeypatch):
    """warm(handler) -> a Backend that the pool has at hand and whose ranks are ``handler``."""
    fake = FakeBackend(tmp_path)
    monkeypatch.setattr(pool, "_backends", {})

    def start(handler) -> Backend:
        backend = Backend(CONFIG, BackendClient(fake.start(handler), TOKEN))
        pool._backends[CONFIG.topology()] = backend
        return backend

    yield start
    pool.close_all()
    fake.close()


def wait_readable(backend: Backend):
    assert select.select([backend.client._socket], [], [], 60)[0]


def test_a_warm_run_is_load_then_sample(warm):
    """As the nodes do with an unchanged graph (test_nodes_messages.py, tests/comfy/test_sent_messages.py)."""
    received = []

    def ranks(connection):
        while True:
            received.append(type(framing.receive(connection)))
            reply(connection, Loaded("m", "flux") if received[-1] is Load else Result())

    backend = warm(ranks)
    backend.load("/m.safetensors")
    received.clear()
    assert pool.backend_at_hand(CONFIG).alive()
    again = pool.backend_for(CONFIG)
    again.load("/m.safetensors", keep={ModelChoice("/m.safetensors")})
    again.sample(Sample("m", "euler", 1.0, 7, tensors={"noise": torch.zeros(1, 4)}))
    assert again is backend and received == [Load, Sample]


@pytest.mark.parametrize("last_words", [(), (Failure("out of memory"),)])
def test_a_backend_that_ended_between_runs_is_replaced_with_a_warning(warm, monkeypatch, last_words):
    def ranks(connection):
        for message in last_words:
            reply(connection, message)

    backend, another = warm(ranks), object.__new__(Backend)
    wait_readable(backend)
    monkeypatch.setattr(pool, "_launch", lambda config, *_: another)
    warnings = []
    try:
        assert pool.backend_for(CONFIG, warn=warnings.append) is another
    finally:
        pool._backends.clear()
    assert backend.client.closed and not backend.alive()
    assert len(warnings) == 1


def test_unread_bytes_are_not_taken_for_the_next_reply(warm):
    def ranks(connection):
        reply(connection, Loaded("a late reply", "flux"))
        connection.recv(1)

    backend = warm(ranks)
    wait_readable(backend)
    assert not backend.alive()


def test_a_backend_at_work_is_alive(warm):
    backend = warm(lambda connection: connection.recv(1))
    with backend._busy:
        assert backend.alive()
    assert backend.alive()
