"""The little of a websocket that following ComfyUI's messages and driving a browser take: connect, read
frames, and write texts. Standard library only."""

import base64
import os
import socket


class WebSocket:
    """Reads what ``ws://host:port/path`` sends; ``receive(seconds)`` -> (is_text, bytes), or None in the
    given time."""

    def __init__(self, host: str, port: int, path: str):
        self._socket = socket.create_connection((host, port), 10)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._buffer = b""
        while b"\r\n\r\n" not in self._buffer:
            self._buffer += self._socket.recv(4096)
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        assert b" 101 " in head.split(b"\r\n")[0], head

    def receive(self, seconds: float):
        self._socket.settimeout(seconds)
        try:
            self._fill(2)
            start, size = 2, self._buffer[1] & 127
            if size >= 126:
                start += 2 if size == 126 else 8
                self._fill(start)
                size = int.from_bytes(self._buffer[2:start], "big")
            self._fill(start + size)
        except TimeoutError:
            return None  # what has arrived of the frame stays in the buffer
        frame, self._buffer = self._buffer[: start + size], self._buffer[start + size :]
        return frame[0] & 15 == 1, frame[start:]

    def send(self, text: str):
        """Write a text, masked, as a client has to."""
        data = text.encode()
        size = len(data)
        if size < 126:
            head = bytes([0x81, 0x80 | size])
        elif size < 1 << 16:
            head = bytes([0x81, 0x80 | 126]) + size.to_bytes(2, "big")
        else:
            head = bytes([0x81, 0x80 | 127]) + size.to_bytes(8, "big")
        # the mask is four zeros: whoever reads this is a program of ours on this machine
        self._socket.settimeout(30)
        self._socket.sendall(head + bytes(4) + data)

    def close(self):
        self._socket.close()

    def _fill(self, count: int):
        while len(self._buffer) < count:
            data = self._socket.recv(1 << 16)
            assert data, "the server hung up"
            self._buffer += data
