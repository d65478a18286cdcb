"""LoRAs in every spelling of a family's names, and a tensor that the file has the other way round."""

import pytest
import torch
from fused_loras import STRENGTH, change, equal, fuse, parameters
from loras import lora, uso
from safetensors.torch import load_file, save_file
from tiny import facts, write_checkpoint
from tolerance import assert_ulps

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.files.safetensors_files import TensorFiles
from backend.loading.lora.adapters import LoRAByHead
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.parallel.matrix_cuts import Shard
from backend.parallel.sequence import Span

#: Family -> a spelling of the single file's names, a spelling of diffusers' names.
FAMILIES = {
    "flux-dev": ("kohya", "peft"),
    "sd3": ("bare", "onetrainer"),
    "krea2": ("comfyui", "diffusers"),
    "hunyuan-dit": ("kohya", "peft default"),
    "hunyuan-video": ("comfyui", "peft"),
    "wan21-t2v": ("kohya", "peft"),
    "qwen-image": ("bare", "peft"),
    "qwen-image21": ("kohya", "lycoris"),
    "z-image-turbo": ("comfyui", "bare"),
    "pixart-sigma": ("kohya", "peft default"),
    "cogvideox": ("bare", "peft"),
    "ltxv": ("comfyui", "peft"),
}


def assert_close(found, wanted):
    """The same sums, whose product of two factors may be of a part of the rows or columns."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        assert_ulps(found[name], want, 1)


def modules(shapes: dict) -> dict[str, tuple[int, ...]]:
    """Module -> shape of its weight, where that is a matrix or a convolution."""
    return {
        name.removesuffix(".weight"): tuple(shape)
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) > 1
    }


def loaded(path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(str(path))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    return dict(checkpoint.transformer.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_both_names_of_every_matrix(family, folder, tmp_path):
    path = write_checkpoint(folder / f"{family}.safetensors", family)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(path), "default")
    plain = parameters(engine)
    theirs, ours = FAMILIES[family]

    # the single file's names: as if the file itself had been changed
    file, added = lora(modules(facts(family)["shapes"]), theirs)
    save_file(file, tmp_path / "theirs.safetensors")
    state = load_file(path)
    save_file(
        {key: value + STRENGTH * added.get(key.removesuffix(".weight"), 0) for key, value in state.items()},
        tmp_path / "changed.safetensors",
    )
    fuse(engine, (str(tmp_path / "theirs.safetensors"), STRENGTH))
    assert not engine.check_loras("m", engine.models["m"].weights.stack)[0]
    assert_close(parameters(engine), loaded(tmp_path / "changed.safetensors"))

    # diffusers' names, in place of the first: every parameter by itself
    file, added = lora(modules({name: value.shape for name, value in plain.items()}), ours, seed=5)
    save_file(file, tmp_path / "ours.safetensors")
    fuse(engine, (str(tmp_path / "ours.safetensors"), STRENGTH))
    assert not engine.check_loras("m", engine.models["m"].weights.stack)[0]
    assert_close(
        parameters(engine),
        {
            name: value + STRENGTH * added.get(name.removesuffix(".weight"), 0)
            for name, value in plain.items()
        },
    )

    fuse(engine)
    assert equal(parameters(engine), plain)


def test_uso(folder, tmp_path):
    """Its single blocks change query, key and value, which the file keeps in one tensor with the MLP."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(write_checkpoint(folder / "flux-dev.safetensors", "flux-dev")), "default")
    file, added = uso()
    found = change(engine, tmp_path / "uso.safetensors", file)
    assert found.keys() == added.keys()
    for name, want in added.items():
        assert torch.allclose(found[name], STRENGTH * want, atol=1e-6), name


def test_rows_of_minimax_that_diffsynth_has_head_by_head(folder, tmp_path):
    """DiffSynth trains on q, k and v of one head after the other; its files show it by PEFT's ".default."
    alone."""
    path = write_checkpoint(folder / "minimax-h3.safetensors", "minimax-h3")
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(path), "default")
    names = ("blocks.1.attn.qkv_proj", "token_refiner.blocks.0.attn.qkv_proj", "blocks.0.attn.out_proj")
    shapes = {name: (1536 if "qkv" in name else 512, 512) for name in names}
    stacked, _ = lora(shapes, "bare")
    by_head = {}
    for key, value in stacked.items():
        if "qkv" in key and "lora_B" in key:  # (q k v, heads, size of a head, rank)
            value = value.unflatten(0, (3, 4, 128)).transpose(0, 1).flatten(0, 2).contiguous()
        by_head[key.replace(".weight", ".default.weight")] = value
    want = change(engine, tmp_path / "stacked.safetensors", stacked)
    found = change(engine, tmp_path / "by_head.safetensors", by_head)
    assert len(want) == 7 and equal(found, want)


def test_a_ranks_rows_of_a_lora_by_head(tmp_path):
    save_file({"up": torch.arange(24.0)[:, None], "down": torch.ones(1, 4)}, tmp_path / "a.safetensors")
    files = TensorFiles([tmp_path / "a.safetensors"])
    adapter = LoRAByHead(files, {"up": "up", "down": "down"}, (24, 4), head=4)
    where = (Span(2, 6), Span(8, 16), Span(21, 24)), (Span(1, 3),)
    rows = torch.arange(24.0).view(2, 3, 4).transpose(0, 1).flatten()
    want = torch.cat([rows[span.indices] for span in where[0]])
    assert adapter.difference(*where, torch.device("cpu")).equal(want[:, None].expand(-1, 2))


def test_swapped_rows_of_a_tensor_parallel_rank(folder):
    """SD3's last modulation of text has its halves the other way round in the file: a rank's piece is a piece
    of the right one.
    """
    path = str(write_checkpoint(folder / "sd3.safetensors", "sd3"))
    checkpoint = open_checkpoint(path)
    name = f"transformer_blocks.{checkpoint.block_count - 1}.norm1_context.linear.weight"
    whole = loaded(path)[name]
    assert checkpoint.sources[name].swap and whole.shape == (512, 256)
    piece = checkpoint.read(
        name,
        torch.float32,
        torch.device("cpu"),
        Shard((Span(20, 40), Span(200, 300)), (Span(10, 70), Span(100, 120))),
    )
    assert piece.equal(
        torch.cat(
            [torch.cat([whole[r, 10:70], whole[r, 100:120]], dim=1) for r in (slice(20, 40), slice(200, 300))]
        )
    )
