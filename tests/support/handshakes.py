"""Clients of a server without ranks: greeted, or with a proof of their own making."""

import socket

from backend.protocol import Hello, Proof, Welcome, framing, handshake

TOKEN = "correct horse"


def connect(server) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(10)
    client.connect(server.path)
    return client


def answer(client, token=TOKEN, role=handshake.CLIENT):
    """The server's answer to a proof made with ``token`` for ``role``."""
    nonce = handshake.new_nonce()
    framing.send(client, Hello(nonce))
    challenge = framing.receive(client)
    assert handshake.is_proof(challenge.proof, TOKEN, handshake.BACKEND, nonce, challenge.nonce)
    framing.send(client, Proof(handshake.proof(token, role, nonce, challenge.nonce)))
    return framing.receive(client)


def greeted(server) -> socket.socket:
    client = connect(server)
    assert isinstance(answer(client), Welcome)
    return client


def closed(client) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True
