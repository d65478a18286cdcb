"""Which changes of a LoRA file are added, and what is said of the others."""

import pytest
import torch
from fused_loras import STRENGTH, change, fuse, write
from loras import lora, randn
from tiny import write_shallow_flux

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.lora import lora_fusion
from backend.loading.lora.lora_fusion import OPENED, FusedWeights
from backend.loading.lora.lora_keys import lora_stack
from backend.loading.lora.lora_spellings import stem_of_rows
from backend.parallel import mesh

ATTENTION, PROJECTION = "double_blocks.0.img_attn.qkv", "double_blocks.0.img_attn.proj"
QUERIES = "transformer.transformer_blocks.0.attn.to_q"
GOOD = lora({ATTENTION: (768, 256), PROJECTION: (256, 256)}, "comfyui")[0]
#: One of the changes is not added: what is in the file besides, and what is said of it.
LEFT_OUT = {
    "an input of other channels": (
        lora({"img_in": (256, 96)}, "comfyui")[0],
        "img_in.weight is 256 x 96, but",
    ),
    "a difference of another size": ({"diffusion_model.img_in.diff": randn(256, 36)}, "is 256 x 36, but"),
    "half of a pair": ({"diffusion_model.img_in.lora_A.weight": randn(2, 64)}, "it has only"),
    "a part of what is there": (
        lora({QUERIES: (256, 256)}, "peft")[0],
        "attn.to_q.weight is changed by another one",
    ),
}


@pytest.fixture(scope="module")
def flux(folder):
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(write_shallow_flux(folder / "flux.safetensors")), "default")
    return engine


@pytest.mark.parametrize("others, says", LEFT_OUT.values(), ids=LEFT_OUT)
def test_the_rest_of_a_file_is_added(flux, tmp_path, others, says):
    """As in ComfyUI, which logs a shape that does not fit and knows no other names of a stacked tensor's
    parts in files that have both."""
    path = tmp_path / "mixed.safetensors"
    (warning,) = flux.check_loras("m", lora_stack([[write(path, GOOD | others), 1.0]]))
    assert "1 changes of the LoRA mixed.safetensors were not loaded" in warning and says in warning
    alone, found = change(flux, tmp_path / "alone.safetensors", GOOD), change(flux, path, GOOD | others)
    assert found.keys() == alone.keys() and all(found[name].equal(alone[name]) for name in found)


def test_a_difference_counts_before_a_pair_of_the_same_tensor(flux, tmp_path):
    """comfy/lora.py: the later patch replaces the earlier one."""
    pair = {name: value for name, value in GOOD.items() if PROJECTION in name}
    difference = {f"diffusion_model.{PROJECTION}.diff": randn(256, 256)}
    (found,) = change(flux, tmp_path / "both.safetensors", pair | difference).values()
    assert torch.allclose(found, STRENGTH * next(iter(difference.values())), atol=1e-6)


def test_a_file_of_which_most_does_not_fit_is_of_another_model(flux, tmp_path):
    others = lora({"img_in": (256, 96), "txt_in": (256, 5), "final_layer.linear": (7, 256)}, "comfyui")[0]
    stack = lora_stack([[write(tmp_path / "other.safetensors", GOOD | others), 1.0]])
    with pytest.raises(UnsupportedError, match="final_layer.linear.weight is 7 x 256, but in .* is 64 x 256"):
        flux.check_loras("m", stack)


def test_rows_of_a_tensor_are_its_parameters(flux, tmp_path):
    """As ComfyUI's loaders name those of files with diffusers' names. Of rows that are no whole parameters
    nothing is added."""
    modules = {f"transformer_blocks.0.attn.to_{part}": (256, 256) for part in "qv"}
    modules["single_transformer_blocks.0.proj_mlp"] = (1024, 256)
    file, _ = lora(modules, "diffusers")
    edges = flux.facts("m")["parts"]
    assert edges[f"{ATTENTION}.weight"] == [0, 256, 512, 768] and "img_in.weight" not in edges
    assert edges["single_blocks.0.linear1.weight"] == [0, 256, 512, 768, 1792]
    rows = [(ATTENTION, 0, 256), (ATTENTION, 512, 768), ("single_blocks.0.linear1", 768, 1792)]
    ends = {
        ".lora.up.weight": ".lora_up.weight",
        ".lora.down.weight": ".lora_down.weight",
        ".alpha": ".alpha",
    }
    same = {
        f"diffusion_model.{stem_of_rows(*row)}{theirs}": file[f"transformer.{module}{ours}"]
        for module, row in zip(modules, rows)
        for ours, theirs in ends.items()
    }
    wanted = change(flux, tmp_path / "a.safetensors", file)
    found = change(flux, tmp_path / "b.safetensors", same)
    assert found.keys() == wanted.keys() and len(wanted) == 3
    assert all(found[name].equal(value) for name, value in wanted.items())
    wrong = {key.replace("rows_0_256", "rows_0_250"): value.clone() for key, value in same.items()}
    wrong |= {key.replace("rows_512_768", "rows_768_999"): value for key, value in same.items()}
    (warning,) = flux.check_loras("m", lora_stack([[write(tmp_path / "c.safetensors", wrong), 1.0]]))
    assert warning.startswith("6 keys of the LoRA") and "rows_0_250" in warning and "rows_768_999" in warning


def test_what_stays_open_is_a_few_files_or_a_whole_stack(flux, tmp_path, monkeypatch):
    """Each open file is a descriptor, and its keys take a while to sort: those of a stack once."""
    opened, open_lora = [], lora_fusion.open_lora

    def counted(path, *arguments):
        opened.append(path)
        return open_lora(path, *arguments)

    monkeypatch.setattr(lora_fusion, "open_lora", counted)
    weights = flux.models["m"].weights
    paths = [write(tmp_path / f"{i}.safetensors", GOOD) for i in range(4 * OPENED + 1)]
    stack = lora_stack([[path, 1.0] for path in paths])
    weights.open(stack)
    weights.open(stack)
    assert opened == paths
    weights.open(stack[-OPENED:])
    weights.open(stack[-1:])
    assert opened == paths
    weights.open(stack[:OPENED])
    assert opened == paths + paths[:OPENED]


def test_parameters_change_in_one_order_whatever_changed_before(flux, tmp_path, monkeypatch):
    """Ranks that load at other times fuse the same stack together."""
    one = write(tmp_path / "one.safetensors", {key: x for key, x in GOOD.items() if PROJECTION in key})
    both = write(tmp_path / "both.safetensors", GOOD)
    changed, put = [], FusedWeights._put

    def noted(weights, names, changes):
        changed.extend(names)
        put(weights, names, changes)

    def order_after(*before) -> list[str]:
        fuse(flux, *before)
        changed.clear()
        fuse(flux, (both, 1.0))
        return changed.copy()

    monkeypatch.setattr(FusedWeights, "_put", noted)
    wanted = order_after()
    assert len(wanted) == 4 and order_after((one, 1.0)) == wanted
    fuse(flux)
