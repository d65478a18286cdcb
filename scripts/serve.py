"""The commands of `python -m backend.cli`, from any folder: start, status, stop, bench, sample.

    python scripts/serve.py start --address unix:/run/pdit/backend.sock --token-file /run/pdit/token \\
        --config '{"ulysses_degree": 2}' --models ~/models
    python scripts/serve.py status --address ... --token-file ... [--prometheus]
    python scripts/serve.py stop --address ... --token-file ...

`... COMMAND --help` describes each.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from backend.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
