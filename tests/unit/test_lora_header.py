"""An alpha that a LoRA's header alone has: it changes nothing, as in ComfyUI, and is said."""

import json

import pytest
import torch
from loras import randn
from safetensors.torch import save_file
from tiny import shallow_flux, write_shallow_flux

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.lora.lora_keys import Lora, lora_stack
from backend.parallel import mesh

MODULE = "transformer.double_blocks.0.img_mlp.0"
RANK = 4
PEFT = {"transformer.r": 4, "transformer.lora_alpha": 16, "transformer.alpha_pattern": {}}
SAYS = "its header says alpha {} at rank 4, which ComfyUI does not read: strength {} is as trained"


def opened(folder, metadata: dict[str, str], **more: torch.Tensor) -> Lora:
    """A LoRA of one matrix of the shallow Flux, whose header has ``metadata``."""
    rows, columns = shallow_flux()["double_blocks.0.img_mlp.0.weight"]
    tensors = {f"{MODULE}.lora_A.weight": randn(RANK, columns), f"{MODULE}.lora_B.weight": randn(rows, RANK)}
    path = str(folder / "lora.safetensors")
    save_file(tensors | {f"{MODULE}.{name}": x for name, x in more.items()}, path, metadata)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_shallow_flux(folder / "plain.safetensors")), "fp32", "auto")
    (lora,) = engine.models["tiny"].weights.open(lora_stack([[path, 1.0]]))
    return lora


def peft(**changes) -> dict[str, str]:
    return {"lora_adapter_metadata": json.dumps({**PEFT, **changes})}


@pytest.mark.parametrize(
    "metadata, alpha, strength",
    [
        ({"alpha": "0.5"}, "0.5", "0.125"),
        ({"format": "pt", "transformer.lora_alpha": "64", "transformer.r": "4"}, "64", "16"),
        (peft(), "16", "4"),
        (peft(**{"transformer.use_rslora": True}), "16", "8"),
        (peft(**{"text_encoder.lora_alpha": 3}), "16", "4"),
    ],
    ids=["plain", "flat", "peft", "rslora", "with a text encoder's"],
)
def test_a_header_s_alpha_is_said(metadata, alpha, strength, tmp_path):
    """Under the node and in the log; the changes have the scale that ComfyUI gives them."""
    lora = opened(tmp_path, metadata)
    says = SAYS.format(alpha, strength)
    assert lora.note == f"LoRA on 1 layer · {says}"
    assert lora.warning == f"Of the LoRA lora.safetensors: {says}."
    ((_, adapter),) = lora.adapters
    assert adapter.scale == 1.0


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"alpha": "4"},
        {"alpha": "high"},
        {"alpha": "nan"},
        {"alpha": "-1"},
        {"alpha": "8", "lora_alpha": "16"},
        {"lora_adapter_metadata": "[" * 100_000},
        {"lora_adapter_metadata": "[1]"},
        peft(**{"transformer.alpha_pattern": {"double_blocks.0": 2}}),
        peft(**{"transformer.lora_alpha": True}),
    ],
    ids=["none", "same", "word", "nan", "negative", "two", "nested", "list", "pattern", "bool"],
)
def test_nothing_is_said_where_the_header_has_no_other_number(metadata, tmp_path):
    lora = opened(tmp_path, metadata)
    assert lora.note == "LoRA on 1 layer" and not lora.warning


def test_a_tensor_of_alpha_counts_alone(tmp_path):
    lora = opened(tmp_path, {"alpha": "8"}, alpha=torch.tensor(2.0))
    ((_, adapter),) = lora.adapters
    assert lora.note == "LoRA on 1 layer" and adapter.scale == 0.5
