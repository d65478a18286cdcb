"""A backend's socket in a thread, for tests of the client: it asks for the token and runs a handler in place
of ranks."""

import socket
import threading

from parallel_dit.backend import frames
from parallel_dit.backend.protocol import Failure, Hello, ProtocolError, Welcome

TOKEN = "secret"
WELCOME = Welcome(world_size=1, device="cpu", degrees={}, pids=[])


def reply(connection, message):
    connection.sendall(b"".join(frames.encode(message)))


class FakeBackend:
    """``start(handler)`` -> address; ``handler(connection)`` runs once a client has shown the token."""

    def __init__(self, folder):
        self.folder = folder
        self.sockets = []

    def start(self, handler, kind="unix") -> str:
        if kind == "unix":
            server = socket.socket(socket.AF_UNIX)
            server.bind(str(self.folder / "s"))
            address = f"unix:{self.folder / 's'}"
        else:
            server = socket.create_server(("127.0.0.1", 0))
            address = f"tcp:127.0.0.1:{server.getsockname()[1]}"
        server.listen()
        self.sockets.append(server)
        threading.Thread(target=self._serve, args=(server, handler), daemon=True).start()
        return address

    def close(self):
        for server in self.sockets:
            server.close()

    @staticmethod
    def _serve(server, handler):
        connection, _ = server.accept()
        with connection:
            try:
                hello = frames.receive(connection, frames.MAX_HELLO)
            except ProtocolError:
                return
            if hello != Hello(TOKEN):
                reply(connection, Failure("the token is wrong"))
                return
            reply(connection, WELCOME)
            handler(connection)
