"""Commands for a terminal, without ComfyUI: python -m backend.cli COMMAND."""

from ..config import ConfigError
from ..errors import UnsupportedError
from ..protocol import BackendError, RefusedError

#: What ends a command, or one request of several, with a sentence of its own.
FAILURES = (ConfigError, UnsupportedError, RefusedError, BackendError, OSError)
