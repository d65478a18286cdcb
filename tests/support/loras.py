"""Small LoRA files in every spelling, and what they must add."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK, ALPHA = 3, 6.0
#: Spelling -> (prefix, separator of names, role -> end of the key).
SPELLINGS = {
    "comfyui": (
        "diffusion_model.",
        ".",
        {"up": ".lora_up.weight", "down": ".lora_down.weight", "alpha": ".alpha"},
    ),
    "bare": ("", ".", {"up": ".lora_B.weight", "down": ".lora_A.weight"}),
    "kohya": ("lora_unet_", "_", {"up": ".lora_up.weight", "down": ".lora_down.weight", "alpha": ".alpha"}),
    "peft": ("transformer.", ".", {"up": ".lora_B.weight", "down": ".lora_A.weight"}),
    "peft default": (
        "base_model.model.",
        ".",
        {"up": ".lora_B.default.weight", "down": ".lora_A.default.weight"},
    ),
    "diffusers": (
        "transformer.",
        ".",
        {"up": ".lora.up.weight", "down": ".lora.down.weight", "alpha": ".alpha"},
    ),
    "lycoris": ("lycoris_", "_", {"up": ".lora_up.weight", "down": ".lora_down.weight", "alpha": ".alpha"}),
    "onetrainer": (
        "lora_transformer_",
        "_",
        {"up": ".lora_up.weight", "down": ".lora_down.weight", "alpha": ".alpha"},
    ),
}

#: Spelling -> modules of the tiny Flux that a LoRA changes. ComfyUI maps diffusers' names to rows of its own.
MODULES = {
    "comfyui": {"double_blocks.0.img_attn.qkv": (768, 256), "single_blocks.1.linear2": (256, 1280)},
    "kohya": {"double_blocks.1.txt_attn.proj": (256, 256)},
    "diffusers": {
        "transformer_blocks.0.attn.to_k": (256, 256),
        "transformer_blocks.0.attn.to_v": (256, 256),
        "single_transformer_blocks.0.attn.to_q": (256, 256),
    },
}


def randn(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def _roles(shape: tuple[int, ...], seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a module with a weight of this shape, by their roles."""
    up = randn(shape[0], RANK, seed=seed) * 0.2
    down = randn(RANK, *shape[1:], seed=seed + 1000) * 0.05
    return {"up": up.reshape(*up.shape, *[1] * (len(shape) - 2)), "down": down, "alpha": torch.tensor(ALPHA)}


def _file(shapes: dict[str, tuple[int, ...]], spelling: str, seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA by their keys."""
    prefix, separator, ends = SPELLINGS[spelling]
    file = {}
    for i, (module, shape) in enumerate(shapes.items()):
        tensors = _roles(shape, seed + i)
        file |= {prefix + module.replace(".", separator) + end: tensors[role] for role, end in ends.items()}
    return file


def lora(shapes: dict[str, tuple[int, ...]], spelling: str, seed: int = 0) -> tuple[dict, dict]:
    """A LoRA on modules with weights of these ``shapes`` (module -> shape), and module -> what it adds at
    strength 1."""
    strength = ALPHA / RANK if "alpha" in SPELLINGS[spelling][2] else 1.0
    added = {}
    for i, (module, shape) in enumerate(shapes.items()):
        tensors = _roles(shape, seed + i)
        added[module] = strength * (tensors["up"].flatten(1) @ tensors["down"].flatten(1)).reshape(shape)
    return _file(shapes, spelling, seed), added


def write_lora(path: Path, shapes: dict[str, tuple[int, ...]], spelling: str, seed: int = 0) -> Path:
    """The file of ``lora``, without making what it adds, which is as large as the model."""
    save_file(_file(shapes, spelling, seed), path)
    return path


#: Modules of USO's file for the tiny Flux -> rows and columns, and the parameters that are their rows.
USO = {
    "double_blocks.0.processor.qkv_lora1": ((768, 256), "transformer_blocks.0.attn.to_{q,k,v}"),
    "double_blocks.0.processor.qkv_lora2": ((768, 256), "transformer_blocks.0.attn.add_{q,k,v}_proj"),
    "double_blocks.1.processor.proj_lora1": ((256, 256), "transformer_blocks.1.attn.to_out.0"),
    "double_blocks.1.processor.proj_lora2": ((256, 256), "transformer_blocks.1.attn.to_add_out"),
    "single_blocks.0.processor.qkv_lora": ((768, 256), "single_transformer_blocks.0.attn.to_{q,k,v}"),
    "single_blocks.1.processor.proj_lora": ((256, 1280), "single_transformer_blocks.1.proj_out"),
}
#: Keys of the last blocks of Flux.1, by which ComfyUI knows the file.
USO_MARKS = (
    "single_blocks.37.processor.qkv_lora.up.weight",
    "double_blocks.18.processor.qkv_lora2.up.weight",
)


def uso() -> tuple[dict, dict]:
    """A LoRA with USO's names for the tiny Flux, and parameter -> what it adds at strength 1."""
    file = {key: torch.zeros(2, 2) for key in USO_MARKS}
    added = {}
    for i, (module, (shape, parameters)) in enumerate(USO.items()):
        up = randn(shape[0], RANK, seed=i) * 0.2
        down = randn(RANK, shape[1], seed=i + 100) * 0.05
        file |= {f"{module}.up.weight": up, f"{module}.down.weight": down}
        names = [parameters.replace("{q,k,v}", part) for part in ("qkv" if "{" in parameters else "-")]
        added |= {f"{name}.weight": part for name, part in zip(names, (up @ down).chunk(len(names)))}
    return file, added


def factored(shapes: Mapping[str, Sequence[int]]) -> dict[str, dict[str, torch.Tensor]]:
    """Adapters for the tiny Flux that are low-rank products in other forms: kohya's module -> role -> tensor.

    LoKr with blocks for rows and with blocks for columns, of a stacked matrix too, and LoHa.
    """
    forms = {"double_blocks.0.img_mlp.0": (2, 8), "double_blocks.0.txt_mlp.2": (8, 2)}
    forms |= {"double_blocks.0.txt_attn.qkv": (6, 8)}
    roles = {}
    for name, (down, across) in forms.items():
        rows, columns = shapes[f"{name}.weight"]
        one, two = randn(down, across) * 0.1, randn(rows // down, 2) * 0.1
        roles[name] = {"lokr_w1": one, "lokr_w2_a": two, "lokr_w2_b": randn(2, columns // across) * 0.1}
    for name in ("double_blocks.0.img_mlp.2", "double_blocks.1.txt_attn.qkv"):
        rows, columns = shapes[f"{name}.weight"]
        roles[name] = {f"hada_w{i}_a": randn(rows, 4, seed=i) * 0.2 for i in (1, 2)}
        roles[name] |= {f"hada_w{i}_b": randn(4, columns, seed=i) * 0.2 for i in (1, 2)}
    return {"lora_unet_" + name.replace(".", "_"): each for name, each in roles.items()}


def write_mixed(path: Path, shapes: Mapping[str, Sequence[int]], with_factored: bool = False) -> Path:
    """A file of every kind of adapter for the tiny Flux, whose single file has these ``shapes``: what a rank
    cannot do with its own rows and columns alone too. ``with_factored``: those of ``factored`` too."""
    matrices = {
        name.removesuffix(".weight"): tuple(shape)
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2
    }
    tensors, _ = lora(matrices, "kohya", seed=3)
    qkv, mlp, linear1 = (
        "lora_unet_" + name
        for name in ("double_blocks_0_img_attn_qkv", "double_blocks_1_img_mlp_2", "single_blocks_0_linear1")
    )
    for module, shape in (
        (qkv, shapes["double_blocks.0.img_attn.qkv.weight"]),
        (linear1, shapes["single_blocks.0.linear1.weight"]),
    ):
        tensors[f"{module}.dora_scale"] = 0.5 + randn(1, shape[1]).abs()  # norms of columns: over q, k and v
    tensors["lora_unet_double_blocks_1_img_attn_qkv.dora_scale"] = (
        0.5 + randn(shapes["double_blocks.1.img_attn.qkv.weight"][0], 1).abs()
    )
    rows, columns = shapes["double_blocks.1.img_mlp.2.weight"]
    tensors = {key: value for key, value in tensors.items() if not key.startswith(mlp)}
    tensors |= {f"{mlp}.lokr_w1": randn(4, 8) * 0.1, f"{mlp}.lokr_w2": randn(rows // 4, columns // 8) * 0.1}
    tensors[f"{mlp}.dora_scale"] = 0.5 + randn(1, columns).abs()
    for module, added in factored(shapes).items() if with_factored else ():
        tensors = {key: value for key, value in tensors.items() if not key.startswith(f"{module}.")}
        tensors |= {f"{module}.{role}": value for role, value in added.items()}
    for name in ("double_blocks.0.img_mlp.0", "single_blocks.1.linear2"):
        module = "lora_unet_" + name.replace(".", "_")
        tensors[f"{module}.dora_scale"] = 0.5 + randn(shapes[f"{name}.weight"][0], 1).abs()
    tensors |= {
        f"diffusion_model.{name}.diff_b": randn(shape[0]) * 0.1
        for name, shape in matrices.items()
        if "img_attn.proj" in name or "linear1" in name
    }
    save_file(tensors, path)
    return path
