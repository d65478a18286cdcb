"""LoRAs as they are published, by their key lists: how many tensors each changes, or its refusal."""

import json
from pathlib import Path

import pytest
from lora_lists import key_lists, keys_of, opened_list, targets_of

from backend.errors import UnsupportedError

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
