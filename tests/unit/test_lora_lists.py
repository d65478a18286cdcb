"""LoRAs as they are published, by their key lists: how many tensors each changes, or its refusal."""

import json
from pathlib import Path

import pytest
import torch
from lora_lists import key_lists, keys_of, opened_list, targets_of

from backend.errors import UnsupportedError
from backend.loading.lora.lora_file_bytes import PIECES, file_bytes, matrix
from backend.loading.lora.lora_keys import LoraUse
from backend.loading.lora.lora_products import LoraChange, MatrixShard, added_bytes
from backend.models import FAMILIES
from backend.parallel.sequence import Span
from backend.quantization.lora_bytes import LoraBytes

HEADERS = Path(__file__).parents[1] / "headers"
LISTS = key_lists()
#: List -> [tensors that are changed, keys that are left over], or its refusal.
TABLE = json.loads((HEADERS / "lora_patches.json").read_text())
#: List -> tensors that ComfyUI changes (tests/comfy/test_lora_patches.py).
COMFY = json.loads((HEADERS / "comfy_loras.json").read_text())


def found(name: str, folder: Path) -> list | str:
    """What the table must say of a list; no key is counted twice, and no tensor."""
    try:
        lora = opened_list(LISTS[name], folder)
    except UnsupportedError as error:
        return str(error)
    used = {key for _, adapter in lora.adapters for key in adapter.keys.values()}
    assert used.isdisjoint(lora.unmatched)
    assert used | set(lora.unmatched) == keys_of(LISTS[name]).keys()
    patches = len({target.name for target, _ in lora.adapters})
    assert patches == len(lora.adapters)
    return [patches, len(lora.unmatched)]


@pytest.mark.parametrize("name", TABLE)
def test_a_list(name, tmp_path):
    assert found(name, tmp_path) == TABLE[name]


def test_nothing_that_comfyui_changes_is_missed():
    assert list(LISTS) == list(TABLE) == list(COMFY)
    taken = {name: row[0] for name, row in TABLE.items() if isinstance(row, list)}
    assert {name: COMFY[name] for name in taken if taken[name] < COMFY[name]} == {}


def test_uso_names_query_key_and_value_of_single_blocks(tmp_path):
    """Rows of linear1, without those of its MLP (as ComfyUI's linear1_qkv)."""
    lora = opened_list(LISTS["Flux.1, USO"], tmp_path)
    (target,) = (target for target, _ in lora.adapters if target.name == "single_blocks.0.linear1_qkv.weight")
    assert target.shape == (9216, 3072)
    assert [name.rpartition("attn.")[2] for name in target.pieces] == [
        "to_q.weight",
        "to_k.weight",
        "to_v.weight",
    ]
    whole = targets_of(LISTS["Flux.1, USO"].model).together["single_transformer_blocks.0.attn.to_q.weight"]
    assert whole.shape == (21504, 3072)


@pytest.mark.parametrize(
    "name",
    [
        "Flux.1, sd-scripts with a text encoder",
        "Flux.1, sd-scripts with DoRA",
        "Flux.1, OneTrainer",
        "Flux.2 dev, ai-toolkit",
    ],
)
def test_a_file_is_planned_as_ranks_hold_it(name, tmp_path):
    """From its keys alone, whatever the model: nothing for text encoders, and the factor of the columns for
    each parameter that a matrix of the file has."""
    entry = LISTS[name]
    lora, targets = opened_list(entry, tmp_path), targets_of(entry.model)
    held = LoraBytes()
    for i, (target, adapter) in enumerate(lora.adapters):
        change = LoraChange(i, 0, LoraUse(lora.path, 1.0), target, adapter)
        for piece in target.pieces:
            height, width = matrix(targets.shapes[piece])
            shard = MatrixShard(piece, (Span(0, height),), (Span(0, width),), height, width)
            held = held.and_of(added_bytes([change], shard, torch.bfloat16, {}))
    assert file_bytes({key: shape for key, (_, shape) in keys_of(entry).items()}) == held


def test_matrices_of_several_parameters_are_known():
    """By which a file's bytes are planned before ranks open it."""
    for family in FAMILIES.values():
        for name, modules in family.layout.names.items():
            ends = [end for end in PIECES if name.lower().endswith(end)]
            count = len(modules.split())
            if count > 1 and not name.endswith("linear1"):
                assert PIECES[max(ends, key=len)] == count, (family.name, name)
