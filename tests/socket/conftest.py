"""Fixtures of several files of socket tests."""

import pytest
from fake_backend import FakeBackend
from handshakes import TOKEN

from backend.protocol import Welcome
from backend.serving.server import Server


@pytest.fixture
def server(tmp_path):
    """Rank 0's server at a path of its own, with nothing behind it."""
    tmp_path.chmod(0o700)
    server = Server(
        f"unix:{tmp_path}/s", TOKEN, Welcome(1, "cpu", {}, [1]), models=lambda: {"m": "/m.safetensors"}
    )
    server.path = str(tmp_path / "s")
    yield server
    server.listener.close()


@pytest.fixture
def serve(tmp_path):
    """serve(handler, kind="unix") -> address, see FakeBackend.start."""
    fake = FakeBackend(tmp_path)
    yield fake.start
    fake.close()
