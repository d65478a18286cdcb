"""Fixtures of several files of socket tests."""

import forking
import pytest
from fake_backend import FakeBackend
from handshakes import TOKEN

from backend.protocol import Welcome
from backend.serving.server import Server


@pytest.fixture(scope="session")
def agents():
    """The socket of a process that forks agents."""
    with forking.agent_server() as path:
        yield path


@pytest.fixture(scope="module", autouse=True)
def forked_ranks(agents):
    """Agents and ranks of these tests are forked, but for those of real_launches, of another Python, and of
    commands as a user types them."""
    with pytest.MonkeyPatch.context() as patched:
        forking.fork(patched, agents)
        yield


@pytest.fixture(scope="module")
def real_launches(forked_ranks):
    """Ranks of a module are processes that import everything themselves, as users start them."""
    with pytest.MonkeyPatch.context() as patched:
        forking.launch_really(patched)
        yield


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
