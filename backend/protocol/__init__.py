"""What client and rank 0 say to each other: messages, framing, bodies of tensors."""

from .messages import *  # noqa: F403  # the messages are this package's interface
from .protocol_errors import *  # noqa: F403  # and its errors
