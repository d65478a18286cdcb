"""LoRAs that ComfyUI's own loaders add to the MODEL of Parallel Model, handed to the ranks as a file."""

import atexit
import functools
import hashlib
import os
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import comfy.utils
import comfy.weight_adapter
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ...backend.client.launching.private_folder import PrivateFolder, private_folder
from ...backend.errors import reason
from ...backend.loading.lora.lora_spellings import stem_of_rows
from ...backend.protocol import RefusedError
from ...backend.runtime.whole_files import replace_file

#: In front of a weight's name in ComfyUI's model.
PREFIX = "diffusion_model."
#: Most bytes of files that the MODEL of the last one does not name: temporary files may lie in memory.
MAX_BYTES = 8 << 30
#: Dimension, first row and number of rows of a part of a weight.
Offset = tuple[int, int, int]
_REMEDY = "add the file with Parallel LoRA, before Parallel Model, or use ComfyUI's own loader"


@functools.cache
def _private() -> PrivateFolder:
    folder = private_folder()
    atexit.register(folder.close)
    return folder


def folder() -> str:
    """Return where the files are: a folder of this process alone, which is removed with it. Every ComfyUI of
    an install empties ComfyUI's own temporary folder, when it starts and when it ends."""
    return str(_private().path.resolve())


class Product(NamedTuple):
    """A LoRA's ``up`` @ ``down`` on a weight, or on rows of it; ``function`` puts its rows in order."""

    up: Tensor
    down: Tensor
    alpha: float | None
    offset: Offset | None
    function: Callable[[Tensor], Tensor] | None

    def matrices(self) -> tuple[Tensor, Tensor]:
        """Return up, its rows in order, and down; a convolution is a matrix for ComfyUI, too."""
        up = self.up.flatten(1)
        if self.function:
            up = self.function(up)
        return up, self.down.flatten(1)


#: Products by the weight's name in ComfyUI's model (without PREFIX); whole differences by the file's keys.
Changes = tuple[dict[str, list[Product]], dict[str, Tensor]]
#: Changes by the ids of their tensors -> these tensors, while they live, and the file that has them.
_written: dict[tuple, tuple[list[weakref.ref], str]] = {}


def write(
    patches: dict,
    shapes: Mapping[str, Sequence[int]],
    parts: Mapping[str, Sequence[int]] = MappingProxyType({}),
    others: Collection[str] = (),
) -> str | None:
    """Write patches of ComfyUI's ``add_patches`` as a LoRA file and return its path; None where they change
    nothing of the transformer. Tensors stay as they are stored, and of the same ones again nothing is read:
    loaders of ComfyUI hold them while a strength is tried out.

    ``shapes``: the transformer's weights by ComfyUI's names. ``parts``: where in their rows parameters begin
    and end, of those that hold several. ``others``: files that the same MODEL names, which stay where they
    are. RefusedError for what is no plain LoRA.
    """
    changes = _sorted_out(patches, shapes)
    products, differences = changes
    if not products and not differences:
        return None
    for key, (held, _) in list(_written.items()):
        if any(each() is None for each in held):
            del _written[key]
    key = _identity(changes, shapes, parts)
    if key in _written and (path := Path(_written[key][1])).exists():
        _touch(path)
        return str(path)
    tensors = dict(differences)
    for name, of_weight in products.items():
        tensors |= _of_weight(name, of_weight, shapes[name], parts.get(name, ()))
    path = _saved(tensors, others)
    _written[key] = [weakref.ref(each) for each in _held(changes)], path
    return path


def _sorted_out(patches: dict, shapes: Mapping[str, Sequence[int]]) -> Changes:
    """Return what patches add to the transformer. RefusedError for what is no plain LoRA."""
    products = defaultdict(list)
    differences = {}
    for key, patch in patches.items():
        whole, *part = [key] if isinstance(key, str) else key  # (name, rows, what is done to them)
        offset, function, *_ = [*part, None, None]
        name = whole.removeprefix(PREFIX)
        if name not in shapes:  # of a text encoder, which is patched in ComfyUI
            continue
        if function not in (None, comfy.utils.swap_scale_shift):
            raise _refusal(name, "a LoRA whose rows are put in another order")
        if isinstance(patch, comfy.weight_adapter.LoRAAdapter):
            products[name].append(Product(*_factors(name, patch), offset, function))
        elif function is not None:
            raise _refusal(name, "a difference whose rows are put in another order")
        elif (change := _whole_difference(patch)) is not None and offset is None:
            differences[PREFIX + _difference(name)] = change
        else:
            raise _refusal(name, f"a patch of the kind {_kind(patch)}")
    return products, differences


def _held(changes: Changes) -> list[Tensor]:
    """Return the tensors of changes."""
    products, differences = changes
    factors = [each for of_weight in products.values() for product in of_weight for each in product[:2]]
    return factors + list(differences.values())


def _identity(
    changes: Changes, shapes: Mapping[str, Sequence[int]], parts: Mapping[str, Sequence[int]]
) -> tuple:
    """Tell changes of the same tensors, while these live, from others."""
    products, differences = changes
    of_products = (
        (
            name,
            *shapes[name],
            *parts.get(name, ()),
            *((id(each.up), id(each.down), *each[2:]) for each in of_weight),
        )
        for name, of_weight in products.items()
    )
    return tuple(of_products), tuple((key, id(change)) for key, change in differences.items())


def _whole_difference(patch) -> Tensor | None:
    """Return the tensor of a patch ("diff", (tensor,)), or (tensor,), which ComfyUI takes for the same; None
    of another patch."""
    match patch:
        case (Tensor() as change,) | ("diff", (Tensor() as change,)):
            return change
    return None


def _kind(patch) -> str:
    """Name the kind of a patch, in a word."""
    match patch:
        case (str() as kind, *_):
            return kind
        case tuple():
            return "of no name"
    return type(patch).__name__.removesuffix("Adapter")


def _difference(name: str) -> str:
    """Return the key of a parameter's difference, without the parameter's prefix. Those that are neither
    weight nor bias, as a block's modulation, are named whole."""
    if name.endswith(".bias"):
        return f"{name.removesuffix('.bias')}.diff_b"
    return f"{name.removesuffix('.weight')}.diff"


def _refusal(name: str, what: str) -> RefusedError:
    return RefusedError(
        f"{name} gets {what}, which cannot be handed to the ranks of Parallel Model; {_REMEDY}."
    )


def _factors(name: str, adapter: comfy.weight_adapter.LoRAAdapter) -> tuple[Tensor, Tensor, float | None]:
    """Return up, down and alpha, as they are stored."""
    up, down, alpha, mid, dora_scale, reshape = adapter.weights
    for value, what in ((mid, "Tucker"), (dora_scale, "DoRA"), (reshape, "a reshaping")):
        if value is not None:
            raise _refusal(name, f"{what} LoRA")
    return up, down, alpha


def _of_weight(
    name: str, products: list[Product], shape: Sequence[int], edges: Sequence[int]
) -> dict[str, Tensor]:
    """Return key -> tensor for what is added to a weight: each parameter's own where rows are of whole ones,
    whose first and last are at ``edges``, else one product."""
    module = PREFIX + name.removesuffix(".weight")
    spans = [(each.offset[1], sum(each.offset[1:])) for each in products if each.offset]
    are_parts = all(set(span) <= set(edges) for span in spans) and all(
        last <= first for (_, last), (first, _) in pairwise(sorted(spans))
    )
    if are_parts and len(spans) == len(products):
        stems = [stem_of_rows(module, *span) for span in spans]
        each = [_named(stem, product) for stem, product in zip(stems, products)]
    elif len(products) == 1 and not spans:
        each = [_named(module, products[0])]
    else:
        _check_rows(name, products, shape)
        each = [_named(module, _joined(products, shape))]
    return {key: value for tensors in each for key, value in tensors.items()}


def _check_rows(name: str, products: list[Product], shape: Sequence[int]):
    """Refuse products that have not the rows for which they are. ComfyUI takes keys and values of Lumina 2
    for as many rows as its queries, which are three times as many."""
    for product in products:
        _, first, count = product.offset or (0, 0, shape[0])
        if len(product.up) != count or first + count > shape[0]:
            what = f"a LoRA of {len(product.up)} rows for its rows {first} to {first + count} of {shape[0]}"
            raise _refusal(name, what)


def _named(stem: str, product: Product) -> dict[str, Tensor]:
    up, down = product.matrices()
    tensors = {f"{stem}.lora_up.weight": up, f"{stem}.lora_down.weight": down}
    return tensors if product.alpha is None else tensors | {f"{stem}.alpha": torch.tensor(product.alpha)}


def _joined(products: list[Product], shape: Sequence[int]) -> Product:
    """Return one product of several that are added, each to its rows of a weight of this ``shape``."""
    ups, downs = [], []
    for product in products:
        up, down = product.matrices()
        if product.alpha is not None and product.alpha != len(down):
            up = up.float() * (product.alpha / len(down))
        if product.offset is not None:
            _, first, count = product.offset
            up = torch.nn.functional.pad(up, (0, 0, first, shape[0] - first - count))
        ups.append(up)
        downs.append(down)
    return Product(_cat(ups, 1), _cat(downs, 0), alpha=None, offset=None, function=None)


def _cat(factors: list[Tensor], dim: int) -> Tensor:
    """Concatenate factors in the type that they are stored in; float32 where these are several."""
    is_one_type = len({each.dtype for each in factors}) == 1
    return torch.cat(factors if is_one_type else [each.float() for each in factors], dim)


def _touch(path: Path):
    """Have a file used last. When it was changed, by which ranks know what they hold, stays as it is."""
    os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _saved(tensors: dict[str, Tensor], others: Collection[str] = ()) -> str:
    """Write a file whose name is a digest of its content, unless it is there: whole or not at all."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    path = Path(folder(), f"{digest.hexdigest()[:24]}.safetensors")
    if path.exists():
        _touch(path)
        return str(path)
    path.parent.mkdir(mode=0o700, exist_ok=True)  # a cleaner of old temporary files may have been here
    try:
        replace_file(path, functools.partial(save_file, _apart(tensors)))
    except (SafetensorError, OSError) as error:  # the disk is full
        raise RefusedError(
            f"A LoRA of ComfyUI's loader could not be handed to the ranks: {path.parent} cannot be written "
            f"({reason(error)}); make room there, or set TMPDIR to a folder of another disk."
        ) from None
    _remove_oldest({str(path), *others})
    return str(path)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in memory of their own: no file holds one memory under two names."""
    seen = set()
    apart = {}
    for name, value in tensors.items():
        value = value.contiguous()
        apart[name] = value.clone() if value.data_ptr() in seen else value
        seen.add(value.data_ptr())
    return apart


def _remove_oldest(named: Collection[str]):
    """Keep the files ``named``, and of the rest those that were used last, MAX_BYTES at most. Who needs
    another one again writes it; ranks that read one have it open."""
    rest = [path for path in Path(folder()).glob("*.safetensors") if str(path) not in named]
    left = MAX_BYTES
    for each in sorted(rest, key=lambda path: -path.stat().st_atime):
        left -= each.stat().st_size
        if left < 0:
            each.unlink()
