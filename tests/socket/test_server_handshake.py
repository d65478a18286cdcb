"""Rank 0's socket before the token: proofs, nonces, and frames that come too early."""

import time
from dataclasses import make_dataclass

import pytest
from handshakes import TOKEN, answer, closed, connect, greeted

from backend import protocol
from backend.protocol import Challenge, Failure, Hello, Load, Ping, Pong, Proof, Welcome, framing, handshake
from backend.protocol.messages import version_of
from backend.serving.server import HELLO_SECONDS, MAX_CLIENTS


def test_wrong_token_is_told_and_closed(server, capfd):
    client = connect(server)
    assert "token is not this backend's" in answer(client, "wrong").message
    assert closed(client)
    assert capfd.readouterr().err == "A client was not let in: it does not know this backend's token.\n"
    assert "token is not this backend's" in answer(connect(server), "wrong").message
    assert not capfd.readouterr().err  # nobody fills the disk with that line
    greeted(server)


def test_a_proof_that_is_sent_back_proves_nothing(server):
    """Neither the backend's own proof for this client, nor one with the token for the backend's role."""
    client, nonce = connect(server), handshake.new_nonce()
    framing.send(client, Hello(nonce))
    framing.send(client, Proof(framing.receive(client).proof))
    assert "token" in framing.receive(client).message and closed(client)
    assert "token" in answer(connect(server), role=handshake.BACKEND).message


def test_a_recorded_handshake_is_of_no_use_later(server):
    client, nonce = connect(server), handshake.new_nonce()
    framing.send(client, Hello(nonce))
    recorded = Proof(handshake.proof(TOKEN, handshake.CLIENT, nonce, framing.receive(client).nonce))
    framing.send(client, recorded)
    assert isinstance(framing.receive(client), Welcome)
    again = connect(server)
    framing.send(again, Hello(nonce))
    framing.receive(again)
    framing.send(again, recorded)
    assert "token" in framing.receive(again).message and closed(again)


@pytest.mark.parametrize("digits", [0, 1, 63])
def test_the_beginning_of_a_proof_proves_nothing(server, digits):
    """Of none of it, whoever connects would be let in."""
    client, nonce = connect(server), handshake.new_nonce()
    framing.send(client, Hello(nonce))
    proof = handshake.proof(TOKEN, handshake.CLIENT, nonce, framing.receive(client).nonce)
    framing.send(client, Proof(proof[:digits]))
    refused = framing.receive(client)
    assert isinstance(refused, Failure) and "token" in refused.message and closed(client)


@pytest.mark.parametrize("first", [Hello(""), Hello("0" * 63), Hello("Z" * 64), Hello("\u0660" * 64)])
def test_a_nonce_has_one_form(server, first):
    client = connect(server)
    framing.send(client, first)
    assert "64 hexadecimal digits" in framing.receive(client).message and closed(client)


def test_another_version_is_told(server):
    client = connect(server)
    framing.send(client, Hello(handshake.new_nonce(), protocol.VERSION + 1))
    assert "restart both" in framing.receive(client).message and closed(client)


def test_a_message_that_changes_is_another_version():
    """Nobody has to remember it: other fields, other types and other messages have another number."""
    added = make_dataclass("Ping", [("deep", bool, False)])
    typed = make_dataclass("Ping", [("deep", int, False)])
    messages = protocol.MESSAGES
    without = {name: cls for name, cls in messages.items() if name != "Ping"}
    others = [messages | {"Ping": added}, messages | {"Ping": typed}, without]
    assert len({protocol.VERSION, *map(version_of, others)}) == 4
    assert protocol.VERSION == version_of(dict(reversed(messages.items())))


@pytest.mark.parametrize("name, more", [("OF_RANKS", ("later",)), ("AXES", {"later": "later_degree"})])
def test_a_setting_or_a_degree_that_is_new_is_another_version(monkeypatch, name, more):
    """A client reads all of them from a Welcome, which has no field for each."""
    known = getattr(protocol.messages, name)
    monkeypatch.setattr(protocol.messages, name, known | more if name == "AXES" else known + more)
    assert version_of(protocol.MESSAGES) != protocol.VERSION


@pytest.mark.parametrize(
    "first", [Ping(), Load("/etc/passwd"), protocol.Shutdown()], ids=lambda m: type(m).__name__
)
def test_nothing_works_before_the_token(server, first):
    client = connect(server)
    framing.send(client, first)
    assert isinstance(framing.receive(client), Failure)
    assert server.jobs.next(0.05) is None


def test_large_frame_before_the_token_is_refused(server):
    client = connect(server)
    client.sendall(framing.PREFIX.pack(framing.MAGIC, 100, 1 << 30))
    assert "limit" in framing.receive(client).message


def test_large_frame_in_the_place_of_a_proof_is_refused(server):
    """It is not waited for, though this client has said Hello."""
    client = connect(server)
    framing.send(client, Hello(handshake.new_nonce()))
    assert isinstance(framing.receive(client), Challenge)
    client.sendall(framing.PREFIX.pack(framing.MAGIC, 100, 1 << 30))
    assert "limit" in framing.receive(client).message and closed(client)


def test_silent_peers_do_not_keep_a_client_out(server):
    silent = [connect(server) for _ in range(MAX_CLIENTS)]
    began = time.monotonic()
    client = greeted(server)
    assert closed(silent[0]) and time.monotonic() - began < HELLO_SECONDS
    framing.send(client, Ping())
    assert framing.receive(client) == Pong(["m"])


def test_a_proof_that_is_no_text(server):
    client = connect(server)
    framing.send(client, Hello(handshake.new_nonce()))
    framing.receive(client)
    header = b'{"type": "Proof", "proof": "\\ud800"}'
    client.sendall(framing.PREFIX.pack(framing.MAGIC, len(header), 0) + header)
    assert "token" in framing.receive(client).message


@pytest.mark.parametrize(
    "header", [b"[" * 4000, b'{"type": "Hello", "nonce": ' + b"9" * 4000 + b"}"], ids=["nesting", "number"]
)
def test_a_header_that_breaks_parsers(server, header):
    client = connect(server)
    client.sendall(framing.PREFIX.pack(framing.MAGIC, len(header), 0) + header)
    assert isinstance(framing.receive(client), Failure) and closed(client)


def test_a_body_before_the_token_is_refused(server):
    client = connect(server)
    client.sendall(
        framing.PREFIX.pack(framing.MAGIC, 18, 16)
        + b'{"type": "Result"}'
        + framing.bodies.LENGTH.pack(1 << 40)
        + bytes(8)
    )
    assert "shorter than its table" in framing.receive(client).message and closed(client)


def test_a_slow_greeting_loses_its_place(server, monkeypatch):
    monkeypatch.setattr("backend.serving.server.HELLO_SECONDS", 0.3)
    client, began = connect(server), time.monotonic()
    with pytest.raises(OSError):
        for byte in b"".join(framing.encode(Hello("0" * 64))) * 100:
            client.sendall(bytes([byte]))
            time.sleep(0.05)
    assert time.monotonic() - began < 60


def test_proofs_are_compared_in_a_time_that_says_nothing(monkeypatch):
    """A comparison that ends at the first difference would show how much of a proof is right."""
    compared, compare = [], handshake.hmac.compare_digest

    def noted(*both: bytes) -> bool:
        compared.append(both)
        return compare(*both)

    monkeypatch.setattr(handshake.hmac, "compare_digest", noted)
    nonces = handshake.new_nonce(), handshake.new_nonce()
    right = handshake.proof(TOKEN, handshake.CLIENT, *nonces)
    assert handshake.is_proof(right, TOKEN, handshake.CLIENT, *nonces)
    assert not handshake.is_proof("0" * len(right), TOKEN, handshake.CLIENT, *nonces)
    assert compared == [(right.encode(), right.encode()), (b"0" * len(right), right.encode())]
