"""The client against a server in a thread that speaks the protocol, well or badly."""

import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from fake_backend import TOKEN, WELCOME, let_in, reply, sample_message

from backend import protocol
from backend.client import pool, step_timer
from backend.client.client import BackendClient, HandshakeError
from backend.config import MAX_RANKS, ConfigError, ParallelConfig
from backend.protocol import (
    BackendError,
    Cancel,
    Failure,
    Load,
    Loaded,
    Ping,
    Pong,
    Progress,
    RefusedError,
    Result,
    framing,
    handshake,
)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_request_and_reply(serve, kind):
    def handler(connection):
        assert framing.receive(connection) == Load("/m.safetensors", "bf16")
        reply(connection, Loaded("m", "flux", {"config": {"depth": 2}}))

    client = BackendClient(serve(handler, kind), TOKEN)
    assert client.welcome == WELCOME
    assert client.request(Load("/m.safetensors", "bf16")) == Loaded("m", "flux", {"config": {"depth": 2}})


def test_other_degrees_are_named_as_the_inputs(serve, monkeypatch):
    address = serve(lambda connection: None)
    monkeypatch.setenv("PARALLEL_DIT_ADDRESSES", address)
    monkeypatch.setenv("PARALLEL_DIT_TOKEN", TOKEN)
    with pytest.raises(
        ConfigError, match="runs with every degree 1, but Parallel Config has cfg_degree 2 x ring_degree 3; "
    ):
        pool.backend_for(ParallelConfig(cfg_degree=2, ring_degree=3, address=address))


def test_a_backend_that_starts_again_is_waited_for(serve, monkeypatch, tmp_path):
    """One that this process knows: a first address may be mistyped."""
    config = ParallelConfig(address=f"unix:{tmp_path}/s")
    monkeypatch.setenv("PARALLEL_DIT_ADDRESSES", config.address)
    monkeypatch.setenv("PARALLEL_DIT_TOKEN", TOKEN)
    with pytest.raises(BackendError, match="No backend listens at"):
        pool.backend_for(config)
    welcome = replace(WELCOME, degrees=config.degrees, settings=config.of_ranks)
    assert serve(lambda connection: None, welcome=welcome) == config.address
    first = pool.backend_for(config)
    while first.alive():  # it hangs up once its handler has ended
        time.sleep(0.01)
    (tmp_path / "s").unlink()
    checks, lines = [], []

    def check():
        checks.append(1)
        if len(checks) == 3:
            threading.Thread(
                target=serve, args=(lambda connection: connection.recv(1), "unix", welcome)
            ).start()

    try:
        again = pool.backend_for(config, check, show=lines.append)
        assert again is not first and again.alive() and len(checks) >= 3
        assert set(lines) == {f"waiting for the backend at {config.address}"}
    finally:
        pool.close_all()


def test_other_settings_of_the_ranks_are_named(serve, monkeypatch):
    """A graph cannot change them at an address, so it is told instead of ignored."""
    runs = ParallelConfig(ulysses_degree=2, shard_weights=True, shares="60,40")
    welcome = replace(WELCOME, degrees=runs.degrees, settings=runs.of_ranks)
    address = serve(lambda connection: None, welcome=welcome)
    monkeypatch.setenv("PARALLEL_DIT_ADDRESSES", address)
    monkeypatch.setenv("PARALLEL_DIT_TOKEN", TOKEN)
    asked = ParallelConfig(ulysses_degree=2, split_scheme="row", address=address)
    with pytest.raises(
        ConfigError,
        match="runs with split_scheme 'megatron', shard_weights True, shares '60,40', but Parallel Config "
        "has split_scheme 'row', shard_weights False, shares ''; set the same",
    ):
        pool.backend_for(asked)


def test_progress_on_the_way_to_a_reply(serve):
    def handler(connection):
        framing.receive(connection)
        for step in (1, 2):
            reply(connection, Progress(step, 2))
        reply(connection, Loaded("m", "flux"))

    seen = []
    client = BackendClient(serve(handler), TOKEN)
    assert (
        client.request(
            Load("/m"), on_progress=lambda progress: seen.append((progress.step, progress.total))
        ).model
        == "m"
    )
    assert seen == [(1, 2), (2, 2)]


def test_giving_up_in_progress_hangs_up(serve):
    def handler(connection):
        framing.receive(connection)
        reply(connection, Progress(1, 2))
        connection.recv(1)

    def stop(progress):
        raise KeyboardInterrupt

    client = BackendClient(serve(handler), TOKEN)
    with pytest.raises(KeyboardInterrupt):
        client.request(Load("/m"), on_progress=stop)
    assert client.closed


def test_wrong_token(serve):
    with pytest.raises(
        BackendError, match="did not let this client in.*not know our token.*PARALLEL_DIT_TOKEN"
    ):
        BackendClient(serve(lambda connection: None), "guess")


@pytest.mark.parametrize("proves, limit", [(False, handshake.MAX_HELLO), (True, framing.MAX_HEADER)])
def test_a_long_answer_in_the_handshake_is_not_read(proves, limit):
    """In the place of Challenge, or of Welcome: the client does not wait for what is announced."""
    server = socket.create_server(("127.0.0.1", 0))

    def answer():
        connection, _ = server.accept()
        with connection, suppress(ConnectionError):  # the client hangs up
            assert let_in(connection) if proves else framing.receive(connection)
            connection.sendall(framing.PREFIX.pack(framing.MAGIC, 100, 1 << 29))
            connection.recv(1)

    threading.Thread(target=answer, daemon=True).start()
    with server, pytest.raises(HandshakeError, match=f"let this client in: .* over the limit of {limit}\\.$"):
        BackendClient(f"tcp:127.0.0.1:{server.getsockname()[1]}", TOKEN)


def test_a_backend_of_as_many_ranks_as_there_may_be_welcomes(serve):
    """With the process and the device of each."""
    devices = [str(uuid.UUID(int=rank)) for rank in range(MAX_RANKS)]
    welcome = replace(WELCOME, world_size=MAX_RANKS, pids=[4_194_304] * MAX_RANKS, devices=devices)
    address = serve(lambda connection: None, welcome=welcome)
    assert BackendClient(address, TOKEN).welcome == welcome


def test_another_version_is_not_a_matter_of_the_token(server, monkeypatch):
    """Nor is it a lost connection, while the backend lives."""
    monkeypatch.setattr(protocol.messages, "VERSION", protocol.VERSION + 1)
    with pytest.raises(HandshakeError, match="of different versions of the pack .*; restart both") as refusal:
        BackendClient(f"unix:{server.path}", TOKEN)
    assert "PARALLEL_DIT_TOKEN" not in str(refusal.value) and str(refusal.value).endswith("same one.")


@pytest.mark.parametrize(
    "address", ["", "unix:", "tcp:host", "tcp:host:port", "tcp:host:70000", "http://host:80/"]
)
def test_bad_address(address):
    with pytest.raises(ConfigError, match="address is"):
        BackendClient(address, TOKEN)


def test_nobody_listens(tmp_path):
    with pytest.raises(FileNotFoundError):
        BackendClient(f"unix:{tmp_path / 'none'}", TOKEN)


def test_a_name_that_no_host_can_have_is_nobody():
    with pytest.raises(OSError, match="no host's name"):
        BackendClient(f"tcp:{'é' * 70}:7000", TOKEN)


def test_refusal_keeps_the_connection(serve):
    def handler(connection):
        framing.receive(connection)
        reply(connection, Failure("no such file"))
        framing.receive(connection)
        reply(connection, Pong(["m"]))

    client = BackendClient(serve(handler), TOKEN)
    with pytest.raises(RefusedError, match="^no such file$"):
        client.request(Load("/nowhere"))
    assert client.request(Ping()) == Pong(["m"])


def test_fatal_failure_closes(serve):
    def handler(connection):
        framing.receive(connection)
        reply(connection, Failure("rank 1 ran out of memory", fatal=True))
        time.sleep(1)

    client = BackendClient(serve(handler), TOKEN)
    with pytest.raises(BackendError, match="rank 1 ran out of memory"):
        client.request(Load("/m"))
    assert client.closed
    with pytest.raises(BackendError, match="is closed"):
        client.request(Ping())


@pytest.mark.parametrize(
    "message, word", [(Failure("rank 1 is silent.", fatal=True), "rank 1 is silent."), (Pong(), "")]
)
def test_the_last_word_of_a_backend_that_ends_is_read(serve, message, word):
    """It was sent to a client that waits for nothing, whose next request is told why there is nobody."""
    client = BackendClient(serve(lambda connection: reply(connection, message)), TOKEN)
    with client._socket.dup() as same:
        same.recv(1, socket.MSG_PEEK)  # it is here
    assert not client.is_open() and client.closed and client.last_word == word


def test_dropped_connection(serve):
    client = BackendClient(serve(lambda connection: framing.receive(connection)), TOKEN)
    with pytest.raises(BackendError, match="was lost"):
        client.sample(sample_message())
    assert client.closed


def test_sample_reports_progress(serve):
    def handler(connection):
        request = framing.receive(connection)
        for step in (1, 2):
            reply(connection, Progress(step, 2, {"x0": torch.full((1, 2), float(step))}))
        reply(connection, Result({"seconds": 1.5}, {"samples": request.tensors["noise"] + 1}))

    client = BackendClient(serve(handler), TOKEN)
    seen = []
    result = client.sample(sample_message(noise=torch.zeros(1, 2)), seen.append)
    assert [(p.step, p.total, p.tensors["x0"].tolist()) for p in seen] == [
        (1, 2, [[1.0, 1.0]]),
        (2, 2, [[2.0, 2.0]]),
    ]
    assert result.tensors["samples"].tolist() == [[1.0, 1.0]] and result.stats == {"seconds": 1.5}


def test_a_step_that_does_not_end_is_told(serve, monkeypatch, caplog):
    def handler(connection):
        framing.receive(connection)
        reply(connection, Progress(1, 2))
        while not caplog.messages:
            time.sleep(0.01)
        reply(connection, Result({}, {"samples": torch.zeros(1)}))

    monkeypatch.setattr(step_timer, "MIN_SECONDS", 0.0)
    client = BackendClient(serve(handler), TOKEN, steps_of_ranks=lambda done: f"rank 0 in step {done + 1}")
    assert client.sample(sample_message())
    assert len(caplog.messages) == 1 and "rank 0 in step 2." in caplog.text


def test_frame_in_pieces(serve):
    def handler(connection):
        framing.receive(connection)
        for byte in b"".join(framing.encode(Result({"n": 1}, {"samples": torch.arange(3.0)}))):
            connection.sendall(bytes([byte]))
            time.sleep(0.002)  # longer in all than POLL_SECONDS

    assert BackendClient(serve(handler), TOKEN).sample(sample_message()).tensors["samples"].tolist() == [
        0.0,
        1.0,
        2.0,
    ]


@pytest.mark.parametrize(
    "frame",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        framing.PREFIX.pack(framing.MAGIC, framing.MAX_HEADER + 1, 0),
        framing.PREFIX.pack(framing.MAGIC, 2, framing.MAX_BODY + 1),
        framing.PREFIX.pack(framing.MAGIC, 2, 0) + b"{}",
        framing.PREFIX.pack(framing.MAGIC, 17, 0) + b'{"type": "Pickle"}'[:17],
        framing.PREFIX.pack(b"PDT9", 2, 0) + b"{}",
    ],
    ids=["http", "long header", "long body", "no type", "unknown type", "another version"],
)
def test_frames_of_others_close(serve, frame):
    def handler(connection):
        framing.receive(connection)
        connection.sendall(frame)

    client = BackendClient(serve(handler), TOKEN)
    with pytest.raises(BackendError, match="was lost"):
        client.request(Ping())
    assert client.closed


def test_request_over_the_limit_is_refused(serve, monkeypatch):
    def handler(connection):
        assert framing.receive(connection, 1 << 20) == Ping()
        reply(connection, Pong())

    monkeypatch.setattr(framing, "MAX_BODY", 1000)
    client = BackendClient(serve(handler), TOKEN)
    with pytest.raises(RefusedError, match="too large"):
        client.sample(sample_message(noise=torch.zeros(1000)))
    assert client.request(Ping()) == Pong()


def test_same_tensor_twice_in_a_request(serve):
    """A graph may link one CONDITIONING to both inputs."""

    def handler(connection):
        names = sorted(framing.receive(connection).tensors)
        reply(connection, Result({"names": names}, {"samples": torch.zeros(1)}))

    both = torch.zeros(1, 3)
    result = BackendClient(serve(handler), TOKEN).sample(
        sample_message(**{"positive.y": both, "negative.y": both})
    )
    assert result.stats["names"] == ["negative.y", "positive.y"]


def test_what_is_done_meanwhile_is_done_once_and_its_errors_cancel(serve):
    def handler(connection):
        for _ in range(2):
            framing.receive(connection)
            reply(connection, Result({}, {"samples": torch.zeros(1)}))
        assert framing.receive(connection) == Cancel()
        assert framing.receive(connection) == Ping()
        reply(connection, Pong())

    def fails():
        raise ArithmeticError

    client, done = BackendClient(serve(handler), TOKEN), []
    assert client.sample(sample_message(), meanwhile=lambda: done.append(1)).tensors["samples"].tolist() == [
        0.0
    ] and done == [1]
    with pytest.raises(ArithmeticError):
        client.sample(sample_message(), meanwhile=fails)
    assert client.request(Ping()) == Pong()
