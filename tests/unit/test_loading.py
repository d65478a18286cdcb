"""The same weights from every file layout, and each rank's share of them."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
import torch
from header_forms import write_gguf
from headers import released, unfold, write_sparse
from quantized import weights_of
from safetensors.torch import load_file, save_file
from tiny import write_checkpoint

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.compute_dtype import default_dtype
from backend.loading.files.safetensors_files import TensorFiles
from backend.loading.files.scale_values import check_scales
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh


@pytest.fixture(scope="module", autouse=True)
def tiny_flux(folder):
    """Its file, which several tests change."""
    write_checkpoint(folder / "flux-tiny.safetensors")


@pytest.fixture(scope="module")
def weights(folder):
    """The transformer's parameters as loaded from the plain single file."""
    return loaded(write_checkpoint(folder / "flux-tiny.safetensors"))


def loaded(path, weight_dtype="default") -> dict[str, torch.Tensor]:
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(path), weight_dtype)
    return weights_of(engine.models["m"].transformer)


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model."])
def test_prefix(folder, weights, prefix):
    assert same(loaded(write_checkpoint(folder / f"{prefix}safetensors", prefix=prefix)), weights)


def test_of_an_all_in_one_file_only_the_transformer_is_read(folder, tmp_path, weights, monkeypatch):
    """Text encoders in fp8, with a scale that is no number, neither make it a quantized model nor matter."""
    prefix, path = "model.diffusion_model.", tmp_path / "all-in-one.safetensors"
    encoder = "text_encoders.t5xxl.transformer.layer"
    others = {
        f"{encoder}.weight": torch.ones(64, 64).to(torch.float8_e4m3fn),
        f"{encoder}.scale_weight": torch.tensor(float("nan")),
        "text_encoders.clip_l.transformer.weight": torch.ones(64, 64).to(torch.float8_e4m3fn),
        "vae.decoder.conv_in.weight": torch.ones(8, 8, 3, 3),
        "first_stage_model.decoder.conv_in.weight": torch.ones(8, 8, 3, 3),
    }
    whole = load_file(write_checkpoint(folder / f"{prefix}safetensors", prefix=prefix))
    save_file({**whole, **others}, path)
    read = []
    original = TensorFiles.read

    def recorded(files, key, *arguments, **options):
        read.append(key)
        return original(files, key, *arguments, **options)

    monkeypatch.setattr(TensorFiles, "read", recorded)
    assert same(loaded(path), weights)
    assert read and all(key.startswith(prefix) for key in read)
    checkpoint = open_checkpoint(str(path))
    assert not checkpoint.is_quantized
    check_scales(checkpoint)
    half = {key: value.half() for key, value in whole.items()}
    save_file({**half, **others}, path)
    assert default_dtype(open_checkpoint(str(path)), torch.device("cuda"), (8, 0)) == torch.float16


@pytest.mark.parametrize("key, width", [("label_emb.0.0.weight", 2816), ("other", 1)], ids=["SDXL", "SD 1.5"])
def test_a_checkpoint_of_a_unet_is_refused_by_name(tmp_path, key, width):
    path = tmp_path / "unet.safetensors"
    tensors = {"input_blocks.0.0.weight": torch.ones(4, 4, 3, 3), key: torch.ones(4, width)}
    save_file({f"model.diffusion_model.{name}": value for name, value in tensors.items()}, path)
    with pytest.raises(
        UnsupportedError, match="is Stable Diffusion.*, a UNet, which is not supported.*KSampler"
    ):
        open_checkpoint(str(path))


def test_tensors_that_nothing_reads_are_refused(folder, tmp_path):
    """Another model that has all of Flux's tensors: its own would be left out in silence."""
    state, path = load_file(write_checkpoint(folder / "flux-tiny.safetensors")), tmp_path / "more.safetensors"
    save_file({**state, "double_blocks.0.img_attn.gate": torch.zeros(4)}, path)
    with pytest.raises(UnsupportedError, match="1 tensors that flux does not read.*img_attn.gate.*KSampler"):
        open_checkpoint(str(path))


@pytest.fixture(scope="module")
def diffusers_folder(folder, weights):
    checkpoint = open_checkpoint(str(folder / "flux-tiny.safetensors"))
    model = diffusers.FluxTransformer2DModel.from_config(checkpoint.config)
    model.load_state_dict(weights)
    model.save_pretrained(folder / "transformer-folder", max_shard_size="20MB")
    return folder / "transformer-folder"


def test_sharded_diffusers_folder(diffusers_folder, weights):
    assert len(list(diffusers_folder.glob("*.safetensors"))) > 1
    assert same(loaded(diffusers_folder), weights)


def test_pipeline_folder(folder, diffusers_folder, weights):
    pipeline = folder / "pipeline"
    pipeline.mkdir()
    (pipeline / "model_index.json").write_text("{}")
    (pipeline / "transformer").symlink_to(diffusers_folder, target_is_directory=True)
    assert same(loaded(pipeline), weights)


@pytest.mark.parametrize("name, dtype", [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weight_dtype(folder, weights, name, dtype):
    found = loaded(folder / "flux-tiny.safetensors", name)
    assert all(p.dtype == dtype and p.equal(weights[key].to(dtype)) for key, p in found.items())


def test_plain_fp8_is_read(folder, weights):
    state = load_file(folder / "flux-tiny.safetensors")
    save_file(
        {k: v.to(torch.float8_e4m3fn) if v.ndim == 2 else v for k, v in state.items()},
        folder / "fp8.safetensors",
    )
    found = loaded(folder / "fp8.safetensors")
    assert all(torch.allclose(p, weights[key], rtol=0.07, atol=2e-3) for key, p in found.items())


REFUSED = {
    "scaled fp8": (
        lambda s: {**s, "double_blocks.0.img_attn.qkv.scale_weight": torch.ones(1)},
        "quantized with scales",
    ),
    "packed integers": (
        lambda s: {**s, "img_in.weight": s["img_in.weight"].to(torch.uint8)},
        "a quantization that is not supported",
    ),
    "other width": (
        lambda s: {**s, "double_blocks.1.img_attn.proj.weight": torch.ones(128, 256)},
        "has shape",
    ),
    "chroma": (
        lambda s: {**s, "distilled_guidance_layer.in_proj.weight": torch.ones(2, 2)},
        "no transformer of a supported family",
    ),
}


@pytest.mark.parametrize("change, says", REFUSED.values(), ids=REFUSED)
def test_refused_files(folder, change, says):
    path = folder / "changed.safetensors"
    save_file(change(load_file(folder / "flux-tiny.safetensors")), path)
    with pytest.raises(UnsupportedError, match=says):
        open_checkpoint(str(path))


def test_diffusers_names_without_a_configuration(folder, weights):
    """One parameter is missing: which, and what to do."""
    save_file(
        {name: value.contiguous() for name, value in weights.items() if name != "norm_out.linear.bias"},
        folder / "names.safetensors",
    )
    with pytest.raises(
        UnsupportedError,
        match="names of diffusers' FluxTransformer2DModel.*norm_out.linear.bias.*diffusers folder",
    ) as error:
        open_checkpoint(str(folder / "names.safetensors"))
    assert "\n" not in str(error.value)


def test_unknown_class(folder):
    other = folder / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    with pytest.raises(
        UnsupportedError, match="holds a UNet2DConditionModel, which is no transformer of diffusers"
    ):
        open_checkpoint(str(other))


def test_tensor_parallel_ranks_read_their_columns(folder, weights):
    """Two ranks' pieces of a row-parallel matrix are its columns."""
    from dataclasses import replace

    pieces = []
    for rank in range(2):
        place = replace(mesh.single(), tp=mesh.Axis(None, rank, 2, (0, 1)))
        engine = Engine(ParallelConfig(tensor_parallel_degree=2), place)
        engine.load("m", str(folder / "flux-tiny.safetensors"), "default")
        pieces.append(dict(engine.models["m"].transformer.named_parameters()))
    for name, dim in (
        ("transformer_blocks.0.attn.to_q.weight", 0),
        ("transformer_blocks.0.attn.to_out.0.weight", 1),
        ("transformer_blocks.0.ff.net.2.weight", 1),
    ):
        assert torch.cat([piece[name] for piece in pieces], dim).equal(weights[name])


#: Peaks only rise in a process, so it has one of its own, and the smaller load comes first.
PEAKS = """
import gc
from dataclasses import replace
from backend.parallel import mesh
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.load_report import peak_bytes
stage = Engine(ParallelConfig(pipefusion_degree=2), replace(mesh.single(), pp=mesh.Axis(None, 0, 2, (0, 1))))
stage.check_load({path!r}, "fp32")
before = peak_bytes(stage.mesh.device)
for engine in (stage, Engine(ParallelConfig(), mesh.single())):
    engine.load("m", {path!r}, "fp32")
    print(engine.models.pop("m").report.peak_bytes - before)
    gc.collect()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_a_stage_needs_half_of_the_memory(folder):
    """Weights that are converted (bf16 to fp32), one of two stages against the whole: its share of the copies
    and of the mapped file, nothing of the other's."""
    state = load_file(write_checkpoint(folder / "flux-tiny.safetensors"))
    save_file({key: value.bfloat16() for key, value in state.items()}, folder / "bf16.safetensors")
    program = PEAKS.format(path=str(folder / "bf16.safetensors"))
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    half, whole = map(int, output.split())
    assert whole > 71_000_000 and half <= 0.6 * whole


@pytest.mark.parametrize("ending", ["safetensors", "gguf"])
def test_a_file_may_be_larger_than_the_memory(tmp_path, ending):
    """32 billion float32 values in a file of holes: its header, and a few rows at its end."""
    path = tmp_path / f"large.{ending}"
    if ending == "gguf":
        pytest.importorskip("gguf")
        write_gguf(path, "flux2-dev", "F32")
    else:
        tensors = unfold(released()["flux2-dev"]["tensors"])
        write_sparse(path, {key: ("F32", shape) for key, (_, shape) in tensors.items()})
    assert path.stat().st_size > 128e9
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoint = open_checkpoint(str(path))
    assert checkpoint.family.name == "flux2" and checkpoint.sources
    last = [key for key, shape in checkpoint.files.shapes.items() if len(shape) == 2][-1]
    rows = checkpoint.files.shapes[last][0]
    assert not checkpoint.files.read(last, slice(rows - 3, rows)).any()
    if sys.platform == "linux":
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < 500 << 20
