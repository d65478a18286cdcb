"""The error of everything that users can put right; standard library only."""


class UnsupportedError(ValueError):
    """A request, file or model that cannot run; the message says what, why, the values and the remedy. The
    backend stays warm."""
