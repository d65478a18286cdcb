"""Runs one command: python -m backend.cli COMMAND --help."""

import sys
from collections.abc import Callable

from ..config import ConfigError
from ..protocol import BackendError, RefusedError
from . import bench, sample, start, status

#: Command -> (arguments of the command line -> exit status).
COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "start": start.main,
    "status": status.main,
    "stop": status.stop,
    "bench": bench.main,
    "sample": sample.main,
}


def main(arguments: list[str]) -> int:
    """Run the command that ``arguments`` name; 1 and one sentence where it fails, 2 for no such command."""
    if not arguments or arguments[0] not in COMMANDS:
        print(f"usage: python -m backend.cli {{{','.join(COMMANDS)}}} [--help]", file=sys.stderr)
        return 2
    try:
        return COMMANDS[arguments[0]](arguments[1:])
    except (ConfigError, RefusedError, BackendError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
