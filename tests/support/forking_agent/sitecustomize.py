"""With this folder in PYTHONPATH, torchrun's agents fork the ranks of this pack (forked_ranks.py). Where
there is a server of agents (agent_server.py) they are forks themselves, as are launchers, clients and readers
of headers. /proc shows the agent's command line for ranks, and Python's hash seed is the same on all: tests
for which that matters use real_launches. Python itself imports this file as it starts (the documentation of
``site``)."""

import os
import sys

AGENT = ["-m", "torch.distributed.run"]
#: What reads headers (backend/client/auto/preflight.py), what starts a backend from a terminal, and what
#: clients that are a few lines have in them.
READER = ["-m", "backend.preflight"]
LAUNCHER = "scripts/serve.py start"
CLIENT = "\nfrom backend.client"


def is_forked() -> bool:
    """Is this process to be a fork where there is a server of them?"""
    words = sys.orig_argv[1:3]
    is_client = words[:1] == ["-c"] and CLIENT in words[1]
    return words in (AGENT, READER) or is_client or " ".join(words).endswith(LAUNCHER)


if sys.platform == "linux" and is_forked():
    import agent_server
    import forked_ranks

    path = os.environ.get(agent_server.VARIABLE)
    code = agent_server.ask(path, sys.orig_argv) if path else None
    if code is not None:
        os._exit(code)
    if sys.orig_argv[1:3] == AGENT and forked_ranks.is_of_this_pack(os.environ):
        forked_ranks.fork_ranks()
