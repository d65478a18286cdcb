"""Checks that a configuration fits the tensors next to it, before a transformer is built from it: building
takes time for every layer, and memory for tables."""

import inspect
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...errors import UnsupportedError, quoted, reason
from ...models.key_layout import Shapes
from ...models.patterns import matches
from .header_limits import is_number

#: Entries (patterns) that are numbers to compute with, and count nothing.
NUMBERS = ("*theta*", "*period*", "*base*", "*max_position*", "*scale*", "*factor*", "*_id")
#: Entries that count blocks, of which each has tensors in the file.
BLOCKS = ("*layers", "*blocks", "*depth")
#: Blocks that a configuration may count beyond those that the file names.
SPARE_BLOCKS = 128
#: What any count may be, however small the file's tensors are (sampling rates, lengths of tables).
COUNT = 16_384
#: What any number may be that counts nothing.
NUMBER = 1e12
#: Entries of a list, and depth of nested lists.
LENGTH = 4_096
NESTED = 4
#: Sides of the grid for which some classes compute a table of positions with a row for each cell.
SIDES = (("sample_height", "sample_width"), ("sample_size",) * 2, ("pos_embed_max_size",) * 2)
#: Longest of these sides, and values of such a table (Stable Diffusion 3.5's has 226 million).
SIDE = 1_024
TABLE = 1 << 28
#: Classes that mean rows of a table by pos_embed_max_size.
SIZED_BY_TOKENS = ("AuraFlowTransformer2DModel",)
#: Parameters that may lack tensors in the file (some families replace layers).
SPARE_PARAMETERS = 1_024


def check_config(name: str, transformer: str, config: Mapping, shapes: Shapes):
    """Refuse a configuration that counts more than the ``shapes`` in the file ``name`` (UnsupportedError)."""
    widest = max((side for shape in shapes.values() for side in shape), default=0)
    numbers = {int(word) for key in shapes for word in key.split(".") if is_number(word)}
    most = max(COUNT, widest)
    for entry, value in config.items():
        if matches(entry, NUMBERS):
            limit = NUMBER
            what = "more than any model has"
        elif matches(entry, BLOCKS) and isinstance(value, int):
            limit = len(numbers) + SPARE_BLOCKS
            what = f"but its file has tensors of {len(numbers)} blocks"
        else:
            limit = most
            what = f"but no tensor of its file has more than {widest:,} rows or columns"
        if not _largest(name, entry, value) <= limit:
            raise _wrong_entry(name, entry, value, what)
    _check_width(name, config, most)
    _check_tables(name, transformer, config, most)


def _wrong(name: str, what: str) -> UnsupportedError:
    what = f"the configuration of {quoted(name)} {what}"
    return UnsupportedError(f"{what}; it belongs to another model, or was damaged: download it again.")


def _wrong_entry(name: str, entry: str, value, what: str) -> UnsupportedError:
    return _wrong(name, f"says {quoted(entry)} is {quoted(value)}, {what}")


def _largest(name: str, entry: str, value, depth: int = 0) -> float:
    """Return the largest absolute number in ``value``, in lists of lists too; NaN counts as infinite. Raises
    UnsupportedError for lists that are longer or deeper than any model's."""
    if isinstance(value, (int, float)):
        return math.inf if value != value else abs(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if not isinstance(value, (list, tuple)):
        return 0
    if len(value) > LENGTH or depth >= NESTED:
        raise UnsupportedError(
            f"the configuration of {quoted(name)} has a list of {len(value):,} entries under "
            f"{quoted(entry)}, or lists in lists; no model has that: download it again."
        )
    return max((_largest(name, entry, each, depth + 1) for each in value), default=0)


def _check_width(name: str, config: Mapping, most: int):
    for heads in config:
        if not heads.endswith("num_attention_heads"):
            continue
        size = heads.replace("num_attention_heads", "attention_head_dim")
        width = _product(config, heads, size)
        if width is not None and width > most:
            what = f"of {config[size]} each, but no tensor of its file is as wide"
            raise _wrong_entry(name, heads, config[heads], what)


def _check_tables(name: str, transformer: str, config: Mapping, most: int):
    """Refuse a grid with longer sides, or, without rotation, a larger table of positions than any model's."""
    patch = config.get("patch_size")
    patch = patch if isinstance(patch, int) and patch > 0 else 1
    width = _product(config, "num_attention_heads", "attention_head_dim") or most
    frames = _product(config, "sample_frames") or 1
    rotates = config.get("use_rotary_positional_embeddings")
    for sides in SIDES:
        cells = _product(config, *sides)
        if sides[0] == "pos_embed_max_size":
            cells = None if transformer in SIZED_BY_TOKENS else cells
        elif cells:
            cells = frames * cells // patch**2
        if not cells:
            continue
        is_too_long = max(config[side] for side in sides) > SIDE
        if is_too_long or (cells * width > TABLE and not rotates):
            what = "which makes a larger table of positions than any model has"
            raise _wrong_entry(name, sides[0], config[sides[0]], what)


def _product(config: Mapping, *entries: str) -> int | None:
    values = [value for entry in entries if isinstance(value := config.get(entry), int)]
    return math.prod(values) if len(values) == len(entries) else None


def build(name: str, cls: type, config: Mapping, tensors: int) -> nn.Module:
    """Build a ``cls`` with what it takes of ``config``, for a file of ``tensors`` (UnsupportedError)."""
    accepted = inspect.signature(cls.__init__).parameters
    try:
        with _few_parameters(name, tensors):
            return cls(**{key: value for key, value in config.items() if key in accepted})
    except UnsupportedError:
        raise
    except Exception as error:  # whatever a class raises that is given what it was not made for
        what = f"makes no {cls.__name__} ({type(error).__name__}: {reason(error)})"
        raise _wrong(name, what) from error


@contextmanager
def _few_parameters(name: str, tensors: int) -> Iterator[None]:
    """Refuse a transformer, while it is built, once it has more parameters than ``tensors`` can fill."""
    left = most = tensors + SPARE_PARAMETERS

    def count(module, key, parameter):
        nonlocal left
        left -= 1
        if left < 0:
            what = f"makes a transformer of more than {most:,} parameters"
            raise _wrong(name, f"{what}, which the tensors of its file cannot fill")

    with register_module_parameter_registration_hook(count):
        yield
