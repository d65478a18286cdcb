"""Durations that whoever starts ComfyUI sets by variables of the environment. Standard library only."""

import os

from ..config import ConfigError

#: A rank starts within seconds on a warm disk and minutes on a cold network one; so long none may be added to
#: those that are ready.
READY_SECONDS = 300.0


def duration(variable: str, unit: str, unset: str) -> float | None:
    """Return the positive number of an environment variable, None where it is unset or empty; ConfigError for
    anything else. ``unit``: of the number, in words; ``unset``: what happens without it."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ConfigError(
            f"{variable} is {text!r:.100}, which is no number of {unit}; set it to a positive number, or "
            f"unset it {unset}."
        )
    return number
