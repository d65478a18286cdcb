"""LoRA files for the tiny Flux that no trainer should write, and what a refusal must say of each."""

from pathlib import Path

import torch
from loras import lora, randn
from safetensors.torch import save_file

MODULE = "double_blocks.0.img_attn.qkv"
STEM = f"diffusion_model.{MODULE}"
ROWS, COLUMNS, RANK = 768, 256, 3


def _with(value: float, *shape: int) -> torch.Tensor:
    x = randn(*shape)
    x.view(-1)[x.numel() // 2] = value
    return x


def _lora(**tensors) -> dict[str, torch.Tensor]:
    """A good LoRA, of which some roles are other ``tensors``, or none."""
    whole = {"lora_up.weight": randn(ROWS, RANK), "lora_down.weight": randn(RANK, COLUMNS)}
    names = {"up": "lora_up.weight", "down": "lora_down.weight"}
    whole |= {names.get(role, role): value for role, value in tensors.items()}
    return {key: value for key, value in whole.items() if value is not None}


def _loha(**tensors) -> dict[str, torch.Tensor]:
    whole = {f"hada_{w}_a": randn(ROWS, 2) for w in ("w1", "w2")}
    return whole | {f"hada_{w}_b": randn(2, COLUMNS) for w in ("w1", "w2")} | tensors


def _lokr(**tensors) -> dict[str, torch.Tensor]:
    whole = {"lokr_w1_a": randn(8, 2), "lokr_w1_b": randn(2, 4)}
    return whole | {"lokr_w2_a": randn(96, 2), "lokr_w2_b": randn(2, 64)} | tensors


NONE, TWO, NAN = torch.zeros(0), torch.ones(2), torch.tensor(torch.nan)
#: What is odd -> (role -> tensor, what the refusal says).
ODD = {
    "ranks of up and down that differ": (_lora(up=randn(ROWS, 4)), "inner sizes 4 and 3 differ"),
    "alpha of no value": (_lora(alpha=NONE), "alpha' holds 0 values"),
    "alpha of two values": (_lora(alpha=TWO), "alpha' holds 2 values"),
    "alpha that is NaN": (_lora(alpha=NAN), "alpha.* NaN or infinity"),
    "alpha of truth": (_lora(alpha=torch.tensor(True)), "alpha' is of shape .* stored as BOOL"),
    "NaN in down": (_lora(down=_with(torch.nan, RANK, COLUMNS)), "lora_down.* NaN or infinity"),
    "infinity in up": (_lora(up=_with(torch.inf, ROWS, RANK)), "lora_up.* NaN or infinity"),
    "minus infinity in bf16": (
        _lora(up=_with(-torch.inf, ROWS, RANK).bfloat16()),
        "lora_up.* NaN or infinity",
    ),
    "NaN in float8": (
        _lora(up=_with(torch.nan, ROWS, RANK).to(torch.float8_e4m3fn)),
        "lora_up.* NaN or infinity",
    ),
    "a product that overflows": (
        _lora(up=_with(1e30, ROWS, RANK), down=_with(1e30, RANK, COLUMNS)),
        "can be as large as 3e.60",
    ),
    "missing up": (_lora(up=None), "is incomplete"),
    "missing down": (_lora(down=None), "is incomplete"),
    "up of one dimension": (_lora(up=randn(ROWS), down=randn(1, COLUMNS)), "a matrix is needed"),
    "up of five dimensions": (_lora(up=randn(ROWS, RANK, 2, 1, 1)), "inner sizes 6 and 3 differ"),
    "up of no dimension": (_lora(up=torch.tensor(1.0)), "a matrix is needed"),
    "integers": (_lora(up=torch.ones(ROWS, RANK, dtype=torch.int8)), "stored as I8"),
    "rank 0": (_lora(up=randn(ROWS, 0), down=randn(0, COLUMNS)), "of rank 0"),
    "rank 0 with an alpha": (_lora(up=randn(ROWS, 0), down=randn(0, COLUMNS), alpha=NONE.sum()), "of rank 0"),
    "loha: ranks that differ": (_loha(hada_w2_a=randn(ROWS, 3)), "inner sizes 3 and 2 differ"),
    "loha: ranks that differ, and two alphas": (
        _loha(hada_w2_a=randn(ROWS, 3), alpha=TWO),
        "inner sizes 3 and 2 differ",
    ),
    "loha: sizes that differ": (_loha(hada_w2_b=randn(2, 8)), "cannot be multiplied one by one"),
    "loha: alpha of no value": (_loha(alpha=NONE), "alpha' holds 0 values"),
    "loha: alpha of two values": (_loha(alpha=TWO), "alpha' holds 2 values"),
    "loha: NaN": (_loha(hada_w1_b=_with(torch.nan, 2, COLUMNS)), "hada_w1_b.* NaN or infinity"),
    "lokr: ranks that differ": (_lokr(lokr_w1_a=randn(8, 3)), "inner sizes 3 and 2 differ"),
    "lokr: sizes that do not multiply": (_lokr(lokr_w2_b=randn(2, 60)), "768 x 240, but .* is 768 x 256"),
    "lokr: alpha of two values": (_lokr(alpha=TWO), "alpha' holds 2 values"),
    "dora of another size": (_lora(dora_scale=torch.ones(5, 1)), "neither a row nor a column"),
    "dora that is NaN": (_lora(dora_scale=_with(torch.nan, ROWS, 1)), "dora_scale.* NaN or infinity"),
    "dora of integers": (_lora(dora_scale=torch.ones(ROWS, 1, dtype=torch.int64)), "stored as I64"),
    "difference of another size": ({"diff": randn(ROWS, 5)}, "768 x 5, but .* is 768 x 256"),
    "difference that is NaN": ({"diff": _with(torch.nan, ROWS, COLUMNS)}, "diff.* NaN or infinity"),
    "attention processors": ({"processor.qkv_lora1.down.weight": randn(2, 2)}, "LoRA of XLabs"),
    "bias of another length": (_lora(diff_b=randn(5)), "is 5 x 1, but .* is 768 x 1"),
}


def write_odd(path: Path, name: str) -> Path:
    """The file that ODD has under ``name``."""
    save_file({f"{STEM}.{role}": value for role, value in ODD[name][0].items()}, path)
    return path


def write_good(path: Path, **options) -> Path:
    """A LoRA that fits."""
    save_file(lora({MODULE: (ROWS, COLUMNS)}, "comfyui", **options)[0], path)
    return path
