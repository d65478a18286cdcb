"""With this folder in PYTHONPATH, torchrun's agents fork the ranks of this pack (forked_ranks.py), and are
forks themselves where there is a server of them (agent_server.py). /proc shows the agent's command line for
ranks, and Python's hash seed is the same on all: tests for which that matters use real_launches. Python
itself imports this file as it starts (the documentation of ``site``)."""

import os
import sys

AGENT = ["-m", "torch.distributed.run"]


if sys.orig_argv[1:3] == AGENT and sys.platform == "linux":
    import agent_server
    import forked_ranks

    path = os.environ.get(agent_server.VARIABLE)
    code = agent_server.ask(path, sys.orig_argv) if path else None
    if code is not None:
        os._exit(code)
    if forked_ranks.is_of_this_pack(os.environ):
        forked_ranks.fork_ranks()
