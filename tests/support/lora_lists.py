"""Key lists of LoRAs as trainers and converters write them, without data.

tests/headers/loras.json holds rules, not keys: which modules of a released model, under whose names (those of
ComfyUI's single file or diffusers'), in which spelling. Shapes are the model's own (released.json.gz).
The spellings are those that the tools' sources write and that logs of "lora key not loaded" show.
"""

import json
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from math import prod
from pathlib import Path

from headers import RELEASED, opened, released, unfold, write_sparse

from backend.loading.lora.lora_keys import Lora, open_lora
from backend.loading.lora.lora_targets import Targets

#: Rank of all lists, and the factor that LyCORIS cuts matrices by for LoKr.
RANK, FACTOR = 8, 16
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Spelling:
    """prefix + module, with ``separator`` for dots, + an end; ends: role -> end of the key."""

    prefix: str
    separator: str
    ends: dict[str, str]


DOWN_UP = {"down": ".lora_down.weight", "up": ".lora_up.weight"}
A_B = {"down": ".lora_A.weight", "up": ".lora_B.weight"}
ALPHA = {"alpha": ".alpha"}
LOKR = {"w1": ".lokr_w1", "w2": ".lokr_w2", **ALPHA}
LOKR_PRODUCT = {"w1": ".lokr_w1", "w2_a": ".lokr_w2_a", "w2_b": ".lokr_w2_b", **ALPHA}
LOHA = {"up": ".hada_w1_a", "down": ".hada_w1_b", "up2": ".hada_w2_a", "down2": ".hada_w2_b", **ALPHA}
SPELLINGS = {
    "kohya": Spelling("lora_unet_", "_", DOWN_UP | ALPHA),
    "kohya, DoRA": Spelling("lora_unet_", "_", DOWN_UP | ALPHA | {"magnitude": ".dora_scale"}),
    "VideoX-Fun": Spelling("lora_unet__", "_", DOWN_UP | ALPHA),
    "LyCORIS LoHa": Spelling("lora_unet_", "_", LOHA),
    "LyCORIS LoKr": Spelling("lora_unet_", "_", LOKR),
    "SimpleTuner LoKr": Spelling("lycoris_", "_", LOKR),
    "SimpleTuner LoKr of products": Spelling("lycoris_", "_", LOKR_PRODUCT),
    "ai-toolkit LoKr": Spelling("diffusion_model.", ".", LOKR),
    "OneTrainer": Spelling("lora_transformer_", "_", DOWN_UP | ALPHA),
    "ComfyUI": Spelling("diffusion_model.", ".", DOWN_UP),
    "ComfyUI, alpha": Spelling("diffusion_model.", ".", DOWN_UP | ALPHA),
    "ComfyUI, with differences": Spelling(
        "diffusion_model.", ".", DOWN_UP | {"bias": ".diff_b", "norm": ".diff"}
    ),
    "PEFT in ComfyUI": Spelling("diffusion_model.", ".", A_B),
    "diffusers": Spelling("transformer.", ".", A_B),
    "Ideogram": Spelling("conditional_transformer.", ".", A_B),
    "diffusers, old": Spelling("transformer.", ".", {"down": ".lora.down.weight", "up": ".lora.up.weight"}),
    "PEFT": Spelling("base_model.model.", ".", A_B),
    "bare, A and B": Spelling("", ".", A_B),
    "bare, down and up": Spelling("", ".", DOWN_UP | ALPHA),
    "DiffSynth": Spelling("", ".", {"down": ".lora_A.default.weight", "up": ".lora_B.default.weight"}),
    "BFL": Spelling("", ".", A_B | {"bias": ".lora_B.bias", "scale": ".scale"}),
    "XLabs": Spelling("", ".", {"down": ".down.weight", "up": ".up.weight"}),
    "PEFT's DoRA": Spelling("transformer.", ".", A_B | {"rows": ".lora_magnitude_vector"}),
    "kohya, OFT": Spelling("oft_unet_", "_", {"oft": ".oft_blocks.0"} | ALPHA),
    "OFT": Spelling("lora_unet_", "_", {"oft": ".oft_blocks"}),
}
#: Roles that tensors of one dimension have.
OF_VECTORS = {"norm", "scale"}


@dataclass(frozen=True)
class KeyList:
    """The keys of a LoRA for the released file ``model``.

    names: whose names of modules, "file" or "diffusers"; modules: patterns of those that it has; written:
    part of a module's name -> what the tool writes for it; sizes: pattern of modules -> rows and columns that
    are not the model's; also: further keys.
    """

    model: str
    spelling: str
    names: str
    modules: tuple[str, ...]
    written: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    also: tuple[str, ...] = ()


def key_lists() -> dict[str, KeyList]:
    """Return what loads which model in which form -> its rules."""
    rows = json.loads((RELEASED.parent / "loras.json").read_text())
    return {name: KeyList(**row) for name, row in rows.items()}


def keys_of(entry: KeyList) -> dict[str, tuple[str, list[int]]]:
    """Return key -> (type, shape) of a list."""
    spelling = SPELLINGS[entry.spelling]
    shapes = {}
    for module, shape in modules_of(entry.model, entry.names).items():
        if not any(fnmatchcase(module, pattern) for pattern in entry.modules):
            continue
        size = next((size for pattern, size in entry.sizes.items() if fnmatchcase(module, pattern)), shape)
        rows, *columns = size
        for ours, theirs in entry.written.items():
            module = module.replace(ours, theirs)
        stem = spelling.prefix + module.replace(".", spelling.separator)
        for role, end in spelling.ends.items():
            if (role in OF_VECTORS) == (len(shape) == 1):
                shapes[stem + end] = ("BF16", list(shape_of(role, rows, columns)))
    return shapes | {key: ("BF16", []) for pattern in entry.also for key in numbered(pattern)}


def shape_of(role: str, rows: int, columns: list[int]) -> Shape:
    """Return the shape of the tensor of that role for a weight of (rows, *columns)."""
    width = prod(columns)
    match role:
        case "down" | "down2":
            return (RANK, *columns)
        case "up" | "up2":
            return (rows, RANK, *(1 for _ in columns[1:]))
        case "w1":
            return (FACTOR, FACTOR)
        case "w2":
            return (rows // FACTOR, width // FACTOR)
        case "w2_a":
            return (rows // FACTOR, RANK)
        case "w2_b":
            return (RANK, width // FACTOR)
        case "magnitude":
            return (rows, 1)
        case "oft":
            return (FACTOR, rows // FACTOR, rows // FACTOR)
        case "alpha":
            return ()
    return (rows,)  # of a bias, a norm or PEFT's magnitudes


def numbered(pattern: str) -> list[str]:
    """Write "blocks.{3}.x" as blocks.0.x, blocks.1.x, blocks.2.x."""
    found = re.search(r"\{(\d+)\}", pattern)
    return [pattern.replace(found[0], str(i)) for i in range(int(found[1]))] if found else [pattern]


@cache
def modules_of(model: str, names: str) -> dict[str, Shape]:
    """Return module -> shape of its weight, under the names of the single file or of diffusers."""
    if names == "diffusers":
        shapes = {name: tuple(shape) for name, shape in opened(model).shapes.items()}
    else:
        stored = unfold(released()[model]["tensors"])
        prefix = re.compile(r"^model\.(diffusion_model|model)\.")
        shapes = {prefix.sub("", key): tuple(shape) for key, (_, shape) in stored.items()}
    return {
        key.rpartition(".")[0]: shape
        for key, shape in shapes.items()
        if key.endswith((".weight", "norm.scale"))
    }


@cache
def targets_of(model: str) -> Targets:
    """Return what LoRAs can name of a released file."""
    checkpoint = opened(model)
    shapes = {name: checkpoint.shapes[name] for name in checkpoint.parameters}
    return Targets(checkpoint.family.layout, shapes)


def opened_list(entry: KeyList, folder: Path) -> Lora:
    """Open a list as a file. Raises UnsupportedError."""
    path = write_sparse(folder / "lora.safetensors", keys_of(entry))
    return open_lora(str(path), targets_of(entry.model), f"{entry.model}.safetensors")
