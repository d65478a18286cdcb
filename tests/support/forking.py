"""Whether backends fork their agents and ranks (forking_agent/)."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forking_agent.agent_server import VARIABLE
from pytest import MonkeyPatch

from backend.client.launching.rank_environment import sanitized_environment
from backend.config import ParallelConfig

#: In PYTHONPATH it makes torchrun's agents, and these their ranks, forks of what has imported everything.
FOLDER = str(Path(__file__).parent / "forking_agent")
#: Room for an agent's command line, with the folders that it may load from.
PADDING = "-" * 20000


@contextmanager
def agent_server() -> Iterator[str]:
    """The socket of a server of agents, until the end."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "agents")
        command = [sys.executable, str(Path(FOLDER, "agent_server.py")), str(path), PADDING]
        here = sanitized_environment(dict(os.environ), ParallelConfig(device="cpu"), "cpu")
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=here) as server:
            while not path.exists() and server.poll() is None:
                time.sleep(0.01)
            yield str(path)
            server.kill()


@contextmanager
def living_fork() -> Iterator[None]:
    """A fork of this process that lives until the end, with all that forks have."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(reading, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.write(writing, b"x")
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


def fork(patched: MonkeyPatch, server: str):
    """Have agents of ``server``, and their ranks, forked that are started from now on."""
    patched.setenv("PYTHONPATH", FOLDER, prepend=os.pathsep)
    patched.setenv(VARIABLE, server)


def launch_really(patched: MonkeyPatch):
    """Have ranks that are started from now on import everything themselves, as users' do."""
    places = os.environ["PYTHONPATH"].split(os.pathsep)
    patched.setenv("PYTHONPATH", os.pathsep.join(place for place in places if place != FOLDER))
