"""A backend's socket in a thread, for tests of the client: it shakes hands and runs a handler in place
of ranks."""

import socket
import threading
from contextlib import suppress

import torch

from backend.protocol import Challenge, Failure, Proof, ProtocolError, Sample, Welcome, framing, handshake

TOKEN = "secret"
WELCOME = Welcome(world_size=1, device="cpu", degrees={}, pids=[])


def reply(connection, message):
    connection.sendall(b"".join(framing.encode(message)))


class FakeBackend:
    """``start(handler)`` -> address; ``handler(connection)`` runs once a client has proved itself and has
    ``welcome``."""

    def __init__(self, folder):
        self.folder = folder
        self.sockets = []

    def start(self, handler, kind="unix", welcome=WELCOME) -> str:
        if kind == "unix":
            server = socket.socket(socket.AF_UNIX)
            server.bind(str(self.folder / "s"))
            address = f"unix:{self.folder / 's'}"
        else:
            server = socket.create_server(("127.0.0.1", 0))
            address = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        server.listen()
        self.sockets.append(server)
        threading.Thread(target=self._serve, args=(server, handler, welcome), daemon=True).start()
        return address

    def close(self):
        for server in self.sockets:
            server.close()

    @staticmethod
    def _serve(server, handler, welcome):
        connection, _ = server.accept()
        with connection, suppress(ConnectionError):  # the client hangs up: its test is over
            if let_in(connection):
                reply(connection, welcome)
                handler(connection)


def let_in(connection, token: str = TOKEN) -> bool:
    """The backend's side of the handshake; False where the client is not let in."""
    try:
        hello = framing.receive(connection, handshake.MAX_HELLO)
        nonce = handshake.new_nonce()
        reply(connection, Challenge(nonce, handshake.proof(token, handshake.BACKEND, hello.nonce, nonce)))
        answer = framing.receive(connection, handshake.MAX_HELLO)
    except (ProtocolError, ConnectionError):
        return False
    if answer != Proof(handshake.proof(token, handshake.CLIENT, hello.nonce, nonce)):
        reply(connection, Failure("the token is wrong"))
        return False
    return True


def sample_message(**tensors):
    return Sample(
        model="m", sampler="euler", cfg=1.0, seed=7, tensors=tensors or {"noise": torch.zeros(1, 4)}
    )
