"""Files as people download them: with tensors that nothing reads, and without dimensions of 1."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh


def loaded(path) -> dict[str, torch.Tensor]:
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(path), "default")
    return engine.models["m"].transformer.state_dict()


def same(found: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return found.keys() == others.keys() and all(found[name].equal(others[name]) for name in found)


@pytest.mark.parametrize("family", ["z-image-turbo", "lumina2"])
def test_a_norm_that_nothing_uses(tmp_path, family):
    """Lumina 2's own file has it, and Z-Image files that older versions of ComfyUI saved, there of NaN."""
    plain = write_checkpoint(tmp_path / "plain.safetensors", family)
    tensors = load_file(plain)
    tensors["norm_final.weight"] = torch.full_like(tensors["cap_embedder.0.weight"], torch.nan)
    save_file(tensors, tmp_path / "with.safetensors")
    assert same(loaded(tmp_path / "with.safetensors"), loaded(plain))


#: Family, and a tensor that files of it may have besides.
BESIDES = [
    ("krea2", "last.down.weight"),  # an image, in an fp8 and a GGUF repack
    ("minimax-h3-curves", "adaln_basis"),  # of turbo merges
    ("hunyuan-video15", "task_bias.weight"),  # this and the next two of Capybara
    ("hunyuan-video15", "cond_special_token_embedding.weight"),
    ("hunyuan-video15", "siglip_type_embedding.weight"),
    ("wan21-t2v", "model_type.Wan2_1-FLF2V-14B-720P"),  # of WanVideoWrapper's files
]


@pytest.mark.parametrize("family, name", BESIDES)
def test_a_tensor_that_only_some_files_have(tmp_path, family, name):
    plain = write_checkpoint(tmp_path / "plain.safetensors", family)
    save_file(load_file(plain) | {name: torch.ones(2, 3)}, tmp_path / "with.safetensors")
    assert same(loaded(tmp_path / "with.safetensors"), loaded(plain))


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Tencent's files of HunyuanVideo 1.5 and HunyuanImage 2.1 have them (diffusers' converters)."""
    found = {}
    for name, value in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if stem.endswith("_attn.qkv") and stem.startswith("double"):
            stem = stem.replace("_attn.qkv", "_attn_{}")
            found |= {f"{stem.format(part)}.{leaf}": each for part, each in zip("qkv", value.chunk(3))}
        elif stem.endswith(".linear1"):
            width = len(tensors[f"{stem.replace('linear1', 'linear2')}.bias"])
            sizes = [width] * 3 + [len(value) - 3 * width]
            parts = zip(("q", "k", "v", "mlp"), value.split(sizes))
            found |= {f"{stem}_{part}.{leaf}": each for part, each in parts}
        else:
            found[f"{stem}.fc.{leaf}" if stem.endswith(".linear2") else name] = value
    return {name: value.contiguous() for name, value in found.items()}


@pytest.mark.parametrize("family", ["hunyuan-video15", "hunyuan-image21"])
def test_queries_keys_and_values_apart(tmp_path, family):
    plain = write_checkpoint(tmp_path / "plain.safetensors", family)
    tensors = load_file(plain)
    assert apart(tensors).keys() != tensors.keys()
    save_file(apart(tensors), tmp_path / "apart.safetensors")
    assert same(loaded(tmp_path / "apart.safetensors"), loaded(plain))


def test_pad_tokens_without_their_dimension_of_1(tmp_path):
    """GGUF files drop it: x_pad_token and cap_pad_token of Z-Image are vectors there."""
    plain = write_checkpoint(tmp_path / "plain.safetensors", "z-image-turbo")
    tensors = load_file(plain)
    tensors |= {name: tensors[name].flatten() for name in ("x_pad_token", "cap_pad_token")}
    save_file(tensors, tmp_path / "flat.safetensors")
    assert same(loaded(tmp_path / "flat.safetensors"), loaded(plain))


@pytest.mark.parametrize(
    "name, knows", [("qwen_image_edit_2511_Q4", True), ("qwen_image_edit_20251120", False)]
)
def test_qwen_image_edit_2511_by_its_name(tmp_path, name, knows):
    """Where a file lacks the empty tensor that marks it, as after conversion to GGUF."""
    path = write_checkpoint(tmp_path / f"{name}.safetensors", "qwen-image")
    assert open_checkpoint(str(path)).config["zero_cond_t"] == knows


def test_a_scale_that_a_text_encoder_has_with_a_whole_weight(tmp_path):
    """Of an all-in-one file: what is read is the transformer's."""
    plain = write_checkpoint(tmp_path / "plain.safetensors", "sd3")
    others = {"text_encoders.t5xxl.transformer.shared.weight": torch.ones(4, 4, dtype=torch.bfloat16)}
    others["text_encoders.t5xxl.transformer.shared.weight_scale"] = torch.ones(1)
    tensors = {f"model.diffusion_model.{name}": value for name, value in load_file(plain).items()}
    save_file(tensors | others, tmp_path / "all.safetensors")
    assert same(loaded(tmp_path / "all.safetensors"), loaded(plain))


def test_chronoedit_is_refused_by_its_name(tmp_path):
    """Its tensors are those of Wan's image to video, its positions are not."""
    path = write_checkpoint(tmp_path / "chrono_edit_14B_fp16.safetensors", "wan21-t2v")
    with pytest.raises(UnsupportedError, match="is ChronoEdit, .*; use KSampler for it"):
        open_checkpoint(str(path))
