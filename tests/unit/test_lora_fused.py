"""LoRAs of queries, keys and values under the names of diffusers' fused projections."""

import pytest
import torch
from fused_loras import STRENGTH, change, fuse, parameters, write
from loras import randn
from tiny import write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh

#: Fused module -> its parameters, of a model whose file has these apart and of one whose file has one tensor.
FUSED = {
    "krea2": {"transformer_blocks.0.attn.to_qkv": ("to_q", "to_k", "to_v")},
    "flux2-dev": {
        "transformer_blocks.0.attn.to_qkv": ("to_q", "to_k", "to_v"),
        "transformer_blocks.1.attn.to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    },
}


@pytest.fixture(scope="module", params=FUSED)
def loaded(request, folder):
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(write_checkpoint(folder / f"{request.param}.safetensors", request.param)), "default")
    return engine, FUSED[request.param]


def files(engine, fused: dict[str, tuple[str, ...]], magnitudes: str) -> tuple[dict, dict]:
    """A LoRA of the fused modules, and the same one of their parameters. Magnitudes are of rows, or none."""
    shapes = engine.models["m"].weights.targets.shapes
    one, three = {}, {}
    for module, names in fused.items():
        parts = [f"{module.rpartition('.')[0]}.{name}" for name in names]
        heights = [shapes[f"{part}.weight"][0] for part in parts]
        width = shapes[f"{parts[0]}.weight"][1]
        tensors = {"lora_B.weight": randn(sum(heights), 3) * 0.2, "lora_A.weight": randn(3, width) * 0.1}
        if magnitudes:
            tensors["dora_scale"] = 0.5 + randn(sum(heights), 1).abs()
        one |= {f"transformer.{module}.{role}": value for role, value in tensors.items()}
        for role, value in tensors.items():
            pieces = [value.clone() for _ in parts] if role == "lora_A.weight" else value.split(heights)
            three |= {f"transformer.{part}.{role}": piece.clone() for part, piece in zip(parts, pieces)}
    return one, three


@pytest.mark.parametrize("magnitudes", ["", "rows"], ids=["LoRA", "DoRA of rows"])
def test_a_fused_projection_is_its_parameters(loaded, magnitudes, tmp_path):
    engine, fused = loaded
    one, three = files(engine, fused, magnitudes)
    found = change(engine, tmp_path / "one.safetensors", one)
    wanted = change(engine, tmp_path / "three.safetensors", three)
    assert found.keys() == wanted.keys() and len(found) == 3 * len(fused)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_names_of_lycoris(loaded, tmp_path):
    engine, fused = loaded
    one, _ = files(engine, fused, "")
    wanted = change(engine, tmp_path / "one.safetensors", one)
    lycoris = {}
    for key, value in one.items():
        module, role = key.removeprefix("transformer.").split(".lora_")
        end = {"B.weight": "lora_up.weight", "A.weight": "lora_down.weight"}[role]
        lycoris[f"lycoris_{module.replace('.', '_')}.{end}"] = value
    found = change(engine, tmp_path / "lycoris.safetensors", lycoris)
    assert found.keys() == wanted.keys() and all(found[name].equal(value) for name, value in wanted.items())


def test_magnitudes_of_columns_run_through_all_of_them(loaded, tmp_path):
    """Also where the file of the model has them apart, and whatever has changed one of them before."""
    engine, fused = loaded
    module, names = next(iter(fused.items()))
    parts = [f"{module.rpartition('.')[0]}.{name}.weight" for name in names]
    plain = parameters(engine)
    heights, width = [len(plain[part]) for part in parts], plain[parts[0]].shape[1]
    below = {f"transformer.{parts[1].removesuffix('.weight')}.diff": randn(heights[1], width) * 0.1}
    up, down, scale = randn(sum(heights), 3) * 0.2, randn(3, width) * 0.1, 0.5 + randn(1, width).abs()
    tensors = {"lora_B.weight": up, "lora_A.weight": down, "dora_scale": scale}
    tensors = {f"transformer.{module}.{role}": value for role, value in tensors.items()}
    dora = (write(tmp_path / "dora.safetensors", tensors), STRENGTH)
    before = torch.cat([plain[part].float() for part in parts])
    for stack in ([(write(tmp_path / "below.safetensors", below), 2.0), dora], [dora]):
        fuse(engine, *stack)
        weight = before.clone()
        if len(stack) > 1:
            weight[heights[0] : heights[0] + heights[1]] += 2.0 * next(iter(below.values()))
        turned = weight + up @ down
        wanted = weight + STRENGTH * (turned * scale / turned.norm(dim=0, keepdim=True) - weight)
        found = torch.cat([parameters(engine)[part].float() for part in parts])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    fuse(engine)
    assert all(parameters(engine)[name].equal(value) for name, value in plain.items())
