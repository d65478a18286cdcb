"""Chooses which layers multiply by quantized activations (natively), and which by the dequantized weight."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import UnsupportedError, some
from ..hardware.gpu_kernels import Capability
from ..protocol.load_choices import MATMULS
from ..runtime.torch_version import has_torch, torch_version
from . import kernels
from .formats import PLAIN_FLOAT8, Format, Settings, dtype_name
from .kernels import AUTO, NATIVE, WEIGHT_ONLY, Kernel, MatmulChoice
from .packed_weight import PackedWeight

#: A format and the type of its inputs, as files and torch name them.
Product = tuple[str, str]


@dataclass(frozen=True)
class Rule:
    """When a format is multiplied natively.

    capability: the least of an NVIDIA GPU; multiple: of it, rows and columns must be; torch: the least
    version; everywhere: ComfyUI does so on other devices too, not only where hardware is made for it;
    on_cpu: a CPU has a product of it, else multiplies what its blocks stand for.
    """

    kernel: Kernel
    capability: Capability
    multiple: int = 1
    torch: tuple[int, int] = (0, 0)
    everywhere: bool = False
    on_cpu: bool = True


#: Name in files -> rule, as ComfyUI has them (comfy.ops.pick_operations, comfy.model_management).
RULES = {
    "int8_tensorwise": Rule(kernels.int8, (7, 5), everywhere=True),
    "float8_e4m3fn": Rule(kernels.float8, (8, 9), multiple=16),
    "mxfp8": Rule(kernels.mxfp8, (10, 0), multiple=32, torch=(2, 10), on_cpu=False),
    "nvfp4": Rule(kernels.nvfp4, (10, 0), multiple=32, torch=(2, 8), on_cpu=False),
}
#: Kernel -> name in files.
NATIVE_FORMATS: dict[Kernel | None, str] = {rule.kernel: kind for kind, rule in RULES.items()}


@dataclass(frozen=True)
class Matrix:
    """A quantized matrix as its file describes it, and its pieces on all ranks, which choose alike.

    settings: of the file, with "scales", how many a float8 weight has. rows: of every rank's piece. edges:
    columns where any rank's piece begins or ends. dtype: of the inputs.
    """

    format: Format
    settings: Settings
    rows: tuple[int, ...]
    edges: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16

    @property
    def product(self) -> Product:
        """What ranks try before they multiply so (native_trial.py)."""
        return str(self.settings.get("format")), dtype_name(self.dtype)

    @property
    def is_precise(self) -> bool:
        """Whether the file asks for inputs that are not quantized, or stores the weight in full precision."""
        asked = self.settings.get("full_precision_matrix_mult")
        return bool(asked) or self.settings.get("format") == "scaled plain"


def column_unit(form: Format, settings: Settings) -> int:
    """Return how many neighbouring columns must not be cut apart: a block's, and a kernel's unit."""
    rule = RULES.get(str(settings.get("format")))
    return math.lcm(form.block(settings), rule.multiple if rule else 1)


def capability_of(device: torch.device) -> Capability | None:
    """Return the compute capability of an NVIDIA GPU; None on other devices. Of several ranks the least
    decides, since those that add up products must choose alike."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


def choose(
    matrix: Matrix,
    mode: str,
    device: torch.device,
    capability: Capability | None = None,
    refused: Mapping[Product, str] = {},
) -> MatmulChoice:
    """Choose how a layer multiplies on ``device``. ``mode`` is one of MATMULS; ``refused``: what any rank
    does not multiply natively, and why (native_trial.py)."""
    if mode == WEIGHT_ONLY:
        return MatmulChoice(None, "as chosen")
    rule = RULES.get(matrix.product[0])
    why = _file_objection(matrix, mode)
    if rule is None or why:
        return MatmulChoice(None, why)
    why = refused.get(matrix.product) or why_not_native(rule, device)
    why = why or _device_objection(rule, mode, device, capability) or _shape_objection(matrix, rule)
    if why:
        return MatmulChoice(None, why)
    if device.type == "cpu":
        return MatmulChoice(rule.kernel, f"{matrix.format.short} on this CPU", dequantizes=not rule.on_cpu)
    return MatmulChoice(rule.kernel, f"{matrix.format.short} on this GPU{_slower(rule)}")


def _slower(rule: Rule) -> str:
    """Return why a product on this GPU is slower than it could be; empty where it is not."""
    if rule.kernel is kernels.float8:  # of which the inputs alone are quantized by small kernels
        return ""
    why = kernels.small_kernels(kernels.FUSED[rule.kernel])
    return f", slowly, by torch's kernels: {why}" if why else ""


def wanted(
    matrices: Iterable[Matrix], mode: str, device: torch.device, capability: Capability | None
) -> list[Product]:
    """Return what would be multiplied natively if every rank can: the same whatever is installed here."""
    if mode == WEIGHT_ONLY:
        return []
    products = set()
    for matrix in matrices:
        rule = RULES.get(matrix.product[0])
        if rule is None or _file_objection(matrix, mode):
            continue
        if not (_device_objection(rule, mode, device, capability) or _shape_objection(matrix, rule)):
            products.add(matrix.product)
    return sorted(products)


def native_formats(dtype: torch.dtype, device: torch.device, capability: Capability | None) -> list[Product]:
    """Return what AUTO multiplies natively on a device, of inputs in ``dtype``, if it can."""
    name = dtype_name(dtype)
    kinds = [kind for kind, rule in RULES.items() if not _device_objection(rule, AUTO, device, capability)]
    return [(kind, name) for kind in kinds]


def why_not_native(rule: Rule, device: torch.device) -> str:
    """Return why what is installed here has no kernel; empty where it has. On other machines it may be
    another."""
    why = kernels.kitchen()[1]
    if not why and device.type != "cpu" and not has_torch(*rule.torch):
        why = f"it needs torch {'.'.join(map(str, rule.torch))}, and {torch_version()} is installed"
    return why


def _file_objection(matrix: Matrix, mode: str) -> str:
    """Return why a layer is not multiplied natively by what its file says of it; empty where it is."""
    kind = matrix.settings.get("format")
    if matrix.is_precise:
        return "the file asks for it"
    if kind not in RULES:
        return f"{kind} has no native kernel"
    if matrix.format.short == "fp8" and matrix.settings.get("scales", 1) != 1:
        return "its rows have scales of their own"
    if matrix.format is PLAIN_FLOAT8 and mode == AUTO:
        return "without scales, as in ComfyUI"
    return ""


def _device_objection(rule: Rule, mode: str, device: torch.device, have: Capability | None) -> str:
    """Return why this device has no kernel for it; empty where it has."""
    if device.type == "cpu":
        return "" if rule.everywhere or mode == NATIVE else "this CPU has no kernel for it"
    if device.type != "cuda" or (have is None and not rule.everywhere):
        return "only NVIDIA GPUs have a kernel for it"
    if have is None or have >= rule.capability:
        return ""
    least = ".".join(map(str, rule.capability))
    return f"it needs compute capability {least}, and the ranks' GPUs have {have[0]}.{have[1]}"


def _shape_objection(matrix: Matrix, rule: Rule) -> str:
    """Return why a kernel cannot multiply a matrix of this shape; empty where it can."""
    unit = column_unit(matrix.format, matrix.settings)
    inside = next((edge for edge in matrix.edges if edge % unit), None)
    if inside is not None:
        return f"its columns begin or end at {inside}, inside {unit} that are multiplied together"
    odd = next((rows for rows in matrix.rows if rows % rule.multiple), None)
    return "" if odd is None else f"{odd} rows are no multiple of {rule.multiple}"


def choose_all(
    name: str,
    matrices: Mapping[str, Matrix],
    mode: str,
    device: torch.device,
    capability: Capability | None,
    refused: Mapping[Product, str] = {},
) -> dict[str, MatmulChoice]:
    """Choose for every quantized layer of the checkpoint ``name``. Raises UnsupportedError where ``mode`` is
    native and a layer cannot multiply so, or is none of MATMULS."""
    if mode not in MATMULS:
        raise UnsupportedError(f"matmul is {mode!r:.100}; choose {', '.join(MATMULS)}.")
    how = (mode, device, capability, refused)
    choices = {layer: choose(matrix, *how) for layer, matrix in matrices.items()}
    if mode != NATIVE:
        return choices
    unable = {
        layer: choice.why
        for layer, choice in choices.items()
        if choice.kernel is None and not matrices[layer].is_precise
    }
    if not matrices:
        raise UnsupportedError(f"matmul is native, but {name} has no quantized layers; choose auto.")
    if unable and kernels.kitchen()[1] in unable.values():
        why = f"matmul is native, but {kernels.kitchen()[1]} where the ranks run"
        raise UnsupportedError(f"{why}; {kernels.remedy()}, or choose auto or weight only.")
    if unable:
        layer, why = next(iter(unable.items()))
        count = f"{len(unable)} of {len(matrices)} quantized layers of {name}"
        raise UnsupportedError(
            f"matmul is native, but {count} cannot multiply so, first {some([layer])}: {why}; choose auto or "
            f"weight only."
        )
    return choices


def summary(transformer: nn.Module, held_bytes: Callable[[nn.Parameter], int]) -> list[dict]:
    """Count quantized layers by format and multiplication; ``held_bytes``: of a parameter on this rank."""
    layers: Counter[tuple[str, str]] = Counter()
    stored: Counter[tuple[str, str]] = Counter()
    for weight in transformer.modules():
        if isinstance(weight, PackedWeight):
            kind = (weight.format_name, str(weight.choice))
            layers[kind] += 1
            stored[kind] += sum(map(held_bytes, weight.parameters()))
    return [
        {"format": kind[0], "layers": count, "bytes": stored[kind], "multiplication": kind[1]}
        for kind, count in layers.most_common()
    ]
