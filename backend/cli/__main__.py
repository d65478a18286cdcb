"""Runs one command: python -m backend.cli COMMAND --help."""

import importlib
import signal
import sys

from . import FAILURES

#: Command -> its module and function: (arguments of the command line) -> exit status. No other command's
#: module is imported: that of sample has every model, which takes seconds.
COMMANDS = {
    "start": ("start", "main"),
    "status": ("status", "main"),
    "stop": ("status", "stop"),
    "bench": ("bench", "main"),
    "sample": ("sample", "main"),
}


def main(arguments: list[str]) -> int:
    """Run the command that ``arguments`` name; 1 and one sentence where it fails, 2 for no such command."""
    if not arguments or arguments[0] not in COMMANDS:
        print(f"usage: python -m backend.cli {{{','.join(COMMANDS)}}} [--help]", file=sys.stderr)
        return 2
    module, function = COMMANDS[arguments[0]]
    try:
        return getattr(importlib.import_module(f".{module}", __package__), function)(arguments[1:])
    except FAILURES as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
