"""What ends a command, or one request of several, with a sentence of its own."""

from ..config import ConfigError
from ..errors import UnsupportedError
from ..protocol import BackendError, RefusedError

FAILURES = (ConfigError, UnsupportedError, RefusedError, BackendError, OSError)
