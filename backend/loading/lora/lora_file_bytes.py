"""What ranks will hold of a LoRA file next to quantized weights, by its header alone, whatever the model, for
plans of ComfyUI's process. Ranks count what they hold (lora_products.py)."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from ...quantization.lora_bytes import LoraBytes
from .lora_spellings import KEY, TEXT_ENCODER

#: Role -> shape of a file's tensor.
Shapes = Mapping[str, Sequence[int]]
#: Bytes of a number on the ranks, and of a factor of a row or column (DoRA).
NUMBER, SCALE_BYTES = 2, 4
#: Numbers in the matrices of a LoHa or LoKr for one of the matrix: with more, the matrix itself costs less.
MAX_FACTORS = 0.5
#: End of a module's name in single files -> parameters of which its matrix has the rows: each is next to a
#: factor of the columns on the ranks.
PIECES = {"qkv": 3, "qkv_proj": 3, "kv_proj": 2, "kv_linear": 2, "gate_up": 2}
#: The first layer of single blocks: queries, keys, values and an MLP of four times their rows. Flux.2's, with
#: an MLP of six times, is one parameter.
FIRST, FIRST_PIECES, FIRST_ROWS = "linear1", 4, 7


def file_bytes(shapes: Mapping[str, Sequence[int]]) -> LoraBytes:
    """Count what is held of a file with tensors of these ``shapes``, of whose modules each is taken for a
    quantized matrix of its own, or of those that it is known to hold (PIECES)."""
    modules: dict[str, dict] = defaultdict(dict)
    total = LoraBytes()
    for key, shape in shapes.items():
        if TEXT_ENCODER.match(key):
            continue
        match = KEY.fullmatch(key)
        if match is None or match.lastgroup is None:
            total = total.and_of(LoraBytes(NUMBER * math.prod(shape)))
        else:
            modules[match["stem"]][match.lastgroup] = shape
    for stem, roles in modules.items():
        total = total.and_of(_held(stem, roles))
    return total


def _pieces(stem: str, rows: int, columns: int) -> int:
    """Return of how many parameters a module's matrix has the rows."""
    if stem.endswith(FIRST):
        return FIRST_PIECES if rows == FIRST_ROWS * columns else 1
    ends = [end for end in PIECES if stem.lower().endswith(end)]
    return PIECES[max(ends, key=len)] if ends else 1


def _held(stem: str, roles: Shapes) -> LoraBytes:
    """Count what is held of the module ``stem``."""
    if "difference" in roles:
        shape = roles["difference"]
        return LoraBytes(copies=NUMBER * math.prod(shape) if len(shape) == 2 else 0)
    is_lokr = any(role.startswith("lokr") for role in roles)
    lokr = [sides(roles, name) for name in ("lokr_w1", "lokr_w2")] if is_lokr else []  # (rows, columns) each
    rank = 0
    if "hada_w1_a" in roles:
        rows, columns = sides(roles, "hada_w1")
        rank = math.prod(matrix(roles.get(f"hada_w{i}_b", ()))[0] for i in (1, 2))
    elif is_lokr:
        rows, columns = (one * two for one, two in zip(*lokr))
    elif {"up", "down"} <= roles.keys():
        (rows, _), (rank, columns) = matrix(roles["up"]), matrix(roles["down"])
    else:
        return LoraBytes(NUMBER * sum(math.prod(shape) for shape in roles.values()))
    most = MAX_FACTORS * rows * columns
    pieces = _pieces(stem, rows, columns)
    scales = SCALE_BYTES * _factors_of_magnitudes(roles, rows, columns * pieces)
    copy = LoraBytes(copies=NUMBER * rows * columns)
    if is_lokr:
        (rows1, columns1), (rows2, columns2) = lokr
        inner = matrix(roles["lokr_w2_b"])[0] * (rows2 + columns2) if "lokr_w2_b" in roles else math.inf
        numbers = rows1 * columns1 + int(min(inner, rows2 * columns2))
        again = (min(pieces, rows1) - 1) * (numbers - rows1 * columns1)
        if numbers > most:
            return copy
        # the weight's own scales, and the Kronecker product's (lora_products.added_bytes)
        return LoraBytes(factors=2 * scales, uncut=NUMBER * (numbers + again))
    factors = rank * (rows + columns)
    if "up" not in roles and factors > most:
        return copy
    factors += rank * (pieces - 1) * columns
    return LoraBytes(NUMBER * factors + scales)


def _factors_of_magnitudes(roles: Shapes, rows: int, columns: int) -> int:
    """Count the rows or columns that magnitudes multiply, of the stored weight or of a Kronecker product."""
    if "dora_scale" not in roles:
        return 0
    return rows if matrix(roles["dora_scale"]) == (rows, 1) else columns


def sides(roles: Shapes, name: str) -> tuple[int, int]:
    """Return rows and columns of a matrix that is whole, or a product of two."""
    if name in roles:
        return matrix(roles[name])
    return matrix(roles.get(f"{name}_a", ()))[0], matrix(roles.get(f"{name}_b", ()))[1]


def matrix(shape: Sequence[int]) -> tuple[int, int]:
    """View a shape as rows and everything else: (n,) as (n, 1), a convolution as (out, in h w)."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)
