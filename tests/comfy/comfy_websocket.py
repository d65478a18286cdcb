"""The little of a websocket that following ComfyUI's messages takes: connect, and read frames. Standard library only."""

import base64
import os
import socket
import struct


class WebSocket:
    """Reads what ``ws://host:port/path`` sends; ``receive(seconds)`` -> (is_text, bytes), or None in the given time."""

    def __init__(self, host: str, port: int, path: str):
        self._socket = socket.create_connection((host, port), 10)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self._buffer = b""
        while b"\r\n\r\n" not in self._buffer:
            self._buffer += self._socket.recv(4096)
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        assert b" 101 " in head.split(b"\r\n")[0], head

    def receive(self, seconds: float):
        self._socket.settimeout(seconds)
        try:
            first, second = self._take(2)
            size = second & 127
            if size == 126:
                size, = struct.unpack("!H", self._take(2))
            elif size == 127:
                size, = struct.unpack("!Q", self._take(8))
            payload = self._take(size)
        except TimeoutError:
            return None
        return first & 15 == 1, payload

    def close(self):
        self._socket.close()

    def _take(self, count: int) -> bytes:
        # nothing leaves the buffer before all of it is there, so that a timeout between two frames loses nothing
        while len(self._buffer) < count:
            data = self._socket.recv(1 << 16)
            assert data, "the server hung up"
            self._buffer += data
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken
