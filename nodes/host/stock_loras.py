"""LoRAs that ComfyUI's own loaders add to the MODEL of Parallel Model, handed to the ranks as a file."""

import atexit
import functools
import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

import comfy.utils
import comfy.weight_adapter
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ...backend.client.private_folder import PrivateFolder, private_folder
from ...backend.errors import reason
from ...backend.protocol import RefusedError
from ...backend.runtime.whole_files import replace_file

#: In front of a weight's name in ComfyUI's model.
PREFIX = "diffusion_model."
#: Most bytes of files that the MODEL of the last one does not name: temporary files may lie in memory.
MAX_BYTES = 8 << 30
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


def write(patches: dict, shapes: dict[str, list[int]], others: Collection[str] = ()) -> str | None:
    """Write patches of ComfyUI's ``add_patches`` as a LoRA file and return its path; None where they change
    nothing of the transformer.

    ``shapes``: the transformer's weights by ComfyUI's names. ``others``: files that the same MODEL names,
    which stay where they are. RefusedError for what is no plain LoRA.
    """
    tensors: dict[str, Tensor] = {}
    products = defaultdict(list)
    for key, patch in patches.items():
        whole, *part = [key] if isinstance(key, str) else key  # (name, rows, what is done to them)
        offset, function, *_ = [*part, None, None]
        name = whole.removeprefix(PREFIX)
        if name not in shapes:  # of a text encoder, which is patched in ComfyUI
            continue
        if function not in (None, comfy.utils.swap_scale_shift):
            raise _refusal(name, "a LoRA whose rows are put in another order")
        if isinstance(patch, comfy.weight_adapter.LoRAAdapter):
            up, down = _factors(name, patch)
            products[name].append(((function(up) if function else up, down), offset))
        elif function is not None:
            raise _refusal(name, "a difference whose rows are put in another order")
        elif (change := _whole_difference(patch)) is not None and offset is None:
            tensors[PREFIX + _difference(name)] = change
        else:
            raise _refusal(name, f"a patch of the kind {_kind(patch)}")
    for name, of_weight in products.items():
        module = PREFIX + name.removesuffix(".weight")
        up, down = _joined(of_weight, shapes[name])
        tensors |= {f"{module}.lora_up.weight": up, f"{module}.lora_down.weight": down}
    return _saved(tensors, others) if tensors else None


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
        f"{name} gets {what}, which cannot be handed to the ranks behind Parallel Model; {_REMEDY}."
    )


def _factors(name: str, adapter: comfy.weight_adapter.LoRAAdapter) -> tuple[Tensor, Tensor]:
    """Return up (rows, rank), scaled by alpha, and down (rank, columns)."""
    up, down, alpha, mid, dora_scale, reshape = adapter.weights
    for value, what in ((mid, "Tucker"), (dora_scale, "DoRA"), (reshape, "a reshaping")):
        if value is not None:
            raise _refusal(name, f"{what} LoRA")
    # a convolution is a matrix for ComfyUI, too
    up = up.flatten(1)
    down = down.flatten(1)
    return (up.float() * (alpha / down.shape[0]) if alpha is not None else up), down


def _joined(
    products: list[tuple[tuple[Tensor, Tensor], tuple[int, int, int] | None]], shape: list[int]
) -> tuple[Tensor, Tensor]:
    """Return one product of several that are added, each to rows (dimension, first, count) of a weight."""
    ups = []
    for (up, _), offset in products:
        if offset is not None:
            _, first, count = offset
            up = torch.nn.functional.pad(up, (0, 0, first, shape[0] - first - count))
        ups.append(up)
    dtype = max((up.dtype for up in ups), key=lambda dtype: dtype.itemsize)
    up = torch.cat([up.to(dtype) for up in ups], dim=1)
    return up.contiguous(), torch.cat([down.to(dtype) for (_, down), _ in products]).contiguous()


def _saved(tensors: dict[str, Tensor], others: Collection[str] = ()) -> str:
    """Write a file whose name is a digest of its content, unless it is there: whole or not at all."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    path = Path(folder(), f"{digest.hexdigest()[:24]}.safetensors")
    if path.exists():
        # not when it was changed, by which ranks know what they hold
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        return str(path)
    path.parent.mkdir(mode=0o700, exist_ok=True)  # a cleaner of old temporary files may have been here
    values = {name: value.contiguous() for name, value in tensors.items()}
    try:
        replace_file(path, functools.partial(save_file, values))
    except (SafetensorError, OSError) as error:  # the disk is full
        raise RefusedError(
            f"A LoRA of ComfyUI's loader could not be handed to the ranks: {path.parent} cannot be written "
            f"({reason(error)}); make room there, or set TMPDIR to a folder of another disk."
        ) from None
    _remove_oldest({str(path), *others})
    return str(path)


def _remove_oldest(named: Collection[str]):
    """Keep the files ``named``, and of the rest those that were used last, MAX_BYTES at most. Who needs
    another one again writes it; ranks that read one have it open."""
    rest = [path for path in Path(folder()).glob("*.safetensors") if str(path) not in named]
    left = MAX_BYTES
    for each in sorted(rest, key=lambda path: -path.stat().st_atime):
        left -= each.stat().st_size
        if left < 0:
            each.unlink()
