"""What a file's header says of its transformer: JSON under ``config``, in safetensors and GGUF alike."""

import json
import math
from collections.abc import Mapping

from ...errors import UnsupportedError, quoted, reason


def transformer_config(strings: Mapping[str, str]) -> dict:
    """Return the entries of ``transformer`` in the header's ``config``; {} where there are none.

    Raises UnsupportedError where it is no JSON object.
    """
    text = strings.get("config", "{}")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"no JSON ({reason(error)})") from None
    transformer = config.get("transformer", {}) if isinstance(config, dict) else None
    if not isinstance(transformer, dict):
        raise _wrong(f"{quoted(text)}, without an object that describes the transformer")
    return transformer


def multiplier(stated: Mapping, name: str) -> float | None:
    """Return the number ``name`` by which a model multiplies or divides; None where it is not stated."""
    value = stated.get(name)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise _wrong(f"wrong: {name} is {quoted(value)}, and it is a number above 0")
    return value


def _wrong(what: str) -> UnsupportedError:
    return UnsupportedError(f"the header's config is {what}; it was damaged: download the file again.")
