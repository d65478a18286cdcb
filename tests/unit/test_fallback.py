"""Transformers that no family file describes: what is recognised, and what runs."""

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import OvisImagePipeline
from diffusers.pipelines.longcat_image.pipeline_longcat_image import prepare_pos_ids
from fallback_models import CONFIGS, CUT, configuration, recognised, request, write
from flops import counted
from tiny import relative

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.autodetect import fallback
from backend.loading.autodetect.fallback import family
from backend.loading.recognition import open_checkpoint
from backend.models.blocks import APART, JOINED, Blocks
from backend.models.latent_tokens import TokenGrid
from backend.parallel import mesh
from backend.parallel.block_cost import block_costs
from backend.sampling.request import build
from backend.sampling.step_loop import Callbacks


def test_structures():
    families = [recognised(name) for name in CUT]
    aura, cogview, sky = (found.blocks for found in families)
    assert list(aura.lists.items()) == [
        ("joint_transformer_blocks", APART),
        ("single_transformer_blocks", JOINED),
    ]
    assert (aura.text, aura.returns, aura.text_position, aura.attention, aura.per_token) == (
        "encoder_hidden_states",
        ("text", "image"),
        "first",
        ("joint",),
        {},
    )
    assert (cogview.returns, cogview.per_token) == (("image", "text"), {"image_rotary_emb": ("image", 0)})
    assert (sky.text, sky.returns, sky.attention, sky.per_token) == (
        None,
        ("image",),
        ("image", "cross"),
        {"rotary_emb": ("image", 1)},
    )
    assert [found.heads({}) for found in (aura, cogview, sky)] == [4, 4, 4]
    assert families[2].latent.patch({}) == (1, 2, 2)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_one_rank_found_is_enough_for_the_others(name, monkeypatch):
    """As it travels, without a trial of their own."""
    cls, config = getattr(diffusers, name), configuration(name)
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    first, trial = family(cls, config, scheduler)
    told = json.loads(json.dumps(trial))

    def tried(*arguments):
        raise AssertionError("another rank has tried it")

    monkeypatch.setattr(fallback, "_tried", tried)
    second, _ = family(cls, config, scheduler, told)
    for field in fields(Blocks):
        ours, theirs = (getattr(found.blocks, field.name) for found in (second, first))
        if field.name in ("heads", "head_size"):
            ours, theirs = ours({}), theirs({})
        if field.name != "adapter":
            assert ours == theirs, field.name
    assert (
        second.io.arguments == first.io.arguments
        and second.conditioning.accepted == first.conditioning.accepted
    )
    with pytest.raises(AssertionError, match="another rank"):
        family(cls, config, scheduler)


def test_a_folder_is_tried_once_for_all_ranks(tmp_path, monkeypatch):
    write(tmp_path / "aura", CUT[0])
    trial = open_checkpoint(str(tmp_path / "aura")).autodetected
    monkeypatch.setattr(fallback, "_tried", None)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("told", str(tmp_path / "aura"), "fp32", autodetected=json.loads(json.dumps(trial)))
    assert engine.models["told"].weights.checkpoint.autodetected == json.loads(json.dumps(trial))


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel"])
def test_agrees_with_the_family_files(name):
    """Recognised by structure, a class is what its family file says."""
    from backend.models import family_of_class

    small = {
        "FluxTransformer2DModel": dict(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            pooled_projection_dim=20,
            axes_dims_rope=[4, 4, 8],
        ),
        "SD3Transformer2DModel": dict(
            sample_size=32,
            in_channels=4,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=24,
            caption_projection_dim=64,
            pooled_projection_dim=20,
            out_channels=4,
        ),
        "WanTransformer3DModel": dict(
            patch_size=(1, 2, 2),
            num_attention_heads=4,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=24,
            freq_dim=16,
            ffn_dim=32,
            num_layers=3,
        ),
    }
    CONFIGS[name] = small[name]
    try:
        found, told = recognised(name), family_of_class(name)
    finally:
        del CONFIGS[name]
    for fact in ("lists", "image", "text", "returns", "text_position", "per_token"):
        assert getattr(found.blocks, fact) == getattr(told.blocks, fact), fact
    assert found.blocks.attention == told.blocks.attention[: len(found.blocks.attention)]
    assert list(found.blocks.lists) == list(told.blocks.lists) and not found.blocks.whole_only


@pytest.mark.parametrize("name", CUT)
def test_the_cost_of_a_block_is_what_it_multiplies(name, tmp_path):
    """What stages are balanced by: which rows pass which layer was seen, not told. Modulation's one row,
    which counts for nothing, is 1 % of so small a request."""
    engine = Engine(ParallelConfig(num_pipeline_patch=2), mesh.single())
    engine.load(name, str(write(tmp_path / name, name)), "fp32")
    model, sample = engine.models[name], request(name, num_pipeline_patch=2)
    built = build(sample, engine.config, model.checkpoint, model.dtype, torch.device("cpu"))
    work, sequence = counted(model, built)
    text = sequence.text or sample.tensors["positive.c_crossattn"].shape[1]
    assert block_costs(
        open_checkpoint(str(tmp_path / name)).transformer,
        model.family,
        model.checkpoint.config,
        sequence.image,
        text,
    ) == pytest.approx(work, rel=0.015)


@pytest.mark.parametrize("name", CONFIGS)
def test_half_precision_is_near(name, tmp_path):
    """Nothing but rounding is between bf16 and float32: the timestep reaches its sines unrounded, and its
    layers in their own type."""
    latents, folder = [], str(write(tmp_path / name, name))
    for precision in ("fp32", "bf16"):
        engine = Engine(ParallelConfig(), mesh.single())
        engine.load(name, folder, precision)
        latents.append(engine.sample(request(name), Callbacks())[0])
    assert relative(latents[1], latents[0]) < 0.02


@pytest.mark.parametrize("name", CONFIGS)
def test_one_process_equals_the_plain_loop(name, tmp_path):
    """Euler with guidance, by hand, over the transformer itself: timesteps of 0 to 1000, velocity."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load(name, str(write(tmp_path / name, name)), "fp32")
    sample = request(name)
    engine.check_sample(sample)
    have, _ = engine.sample(sample, Callbacks())
    transformer, x = (
        getattr(diffusers, name).from_pretrained(tmp_path / name / "transformer").eval(),
        sample.tensors["noise"],
    )
    sizes = (
        {key: torch.tensor([[128.0, 96.0]]) for key in ("original_size", "target_size")}
        | {"crop_coords": torch.zeros(1, 2)}
        if "CogView" in name
        else {}
    )
    scale = 1.0 if name.startswith("AuraFlow") else 1000.0  # it multiplies by 1000 itself
    for sigma, following in zip(sample.tensors["sigmas"], sample.tensors["sigmas"][1:]):
        with torch.inference_mode():
            positive, negative = (
                transformer(
                    hidden_states=x,
                    timestep=(sigma * scale).expand(1),
                    encoder_hidden_states=sample.tensors[f"{branch}.c_crossattn"],
                    **sizes,
                    return_dict=False,
                )[0]
                for branch in ("positive", "negative")
            )
        x = x + (following - sigma) * (negative + 3.0 * (positive - negative))
    assert relative(have, x) < 1e-5


def test_time_that_runs_the_other_way(tmp_path):
    """From noise at 0 to the image at 1, as diffusers' own scheduler steps where it inverts its noise
    levels."""
    name, scheduler = CUT[2], diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)
    engine, sample = Engine(ParallelConfig(), mesh.single()), request(name)
    engine.load(
        name,
        str(write(tmp_path, name, _class_name="FlowMatchEulerDiscreteScheduler", invert_sigmas=True)),
        "fp32",
    )
    have, _ = engine.sample(sample, Callbacks())
    transformer, x = (
        getattr(diffusers, name).from_pretrained(tmp_path / "transformer").eval(),
        sample.tensors["noise"],
    )
    scheduler.set_timesteps(sigmas=sample.tensors["sigmas"][:-1].tolist())
    for time in scheduler.timesteps:
        with torch.inference_mode():
            positive, negative = (
                transformer(
                    hidden_states=x,
                    timestep=time.expand(1),
                    encoder_hidden_states=sample.tensors[f"{branch}.c_crossattn"],
                    return_dict=False,
                )[0]
                for branch in ("positive", "negative")
            )
        x = scheduler.step(negative + 3.0 * (positive - negative), time, x, return_dict=False)[0]
    assert scheduler.timesteps[0] == 0 and relative(have, x) < 1e-5


def test_self_check_command(tmp_path):
    """scripts/check_family.py over all of them: exact methods to 1e-5, PipeFusion's patches drift, and what
    cannot be cut is refused. As users start it: ranks have hash seeds of their own, and agree."""
    for name in CONFIGS:
        write(tmp_path / name, name)
    command = [
        sys.executable,
        str(Path(__file__).parents[2] / "scripts/check_family.py"),
        *(str(tmp_path / name) for name in CONFIGS),
        "--json",
        str(tmp_path / "out.json"),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    rows = json.loads((tmp_path / "out.json").read_text())
    cut = [row for row in rows if row["model"] in CUT]
    assert len(cut) == 9 * len(CUT) and [row["method"] for row in cut if "refused" in row] == [
        "tensor_parallel_degree 2"
    ] * len(CUT)  # no plan for megatron
    assert all(row["error"] < 1e-5 for row in cut if row.get("stale") is False) and all(
        1e-6 < row["error"] < 0.25 for row in cut if row.get("stale")
    )
    whole = {row["method"] for row in rows if row["model"] not in CUT and "refused" not in row}
    assert whole == {"cfg_degree 2", "data_parallel_degree 2"}


#: Of small transformers with Flux's arguments.
PACKED = dict(
    patch_size=1,
    in_channels=16,
    num_layers=2,
    num_single_layers=2,
    attention_head_dim=16,
    num_attention_heads=2,
    joint_attention_dim=24,
    axes_dims_rope=[4, 4, 8],
)


@pytest.mark.parametrize(
    "name, text, image",
    [
        (
            "LongCatImageTransformer2DModel",
            prepare_pos_ids(0, "text", num_token=9),
            prepare_pos_ids(1, "image", (9, 9), height=3, width=5),
        ),
        (
            "OvisImageTransformer2DModel",
            prepare_pos_ids(0, "text", num_token=9),
            OvisImagePipeline._prepare_latent_image_ids(1, 3, 5, "cpu", torch.float32),
        ),
    ],
)
def test_positions_are_the_pipelines(name, text, image, monkeypatch):
    """In float32, whatever the latent's type: half precision would round those behind a long prompt."""
    monkeypatch.setitem(
        CONFIGS,
        name,
        PACKED
        | {"LongCat": {"pooled_projection_dim": 24}, "Ovis": {"out_channels": 16}}.get(
            name.partition("Image")[0], {}
        ),
    )
    found = recognised(name)
    arguments = found.io.arguments(
        {},
        TokenGrid((4, 6, 10), found.latent.patch({})),
        torch.zeros(1, 4, 6, 10, dtype=torch.bfloat16),
        torch.tensor(0.5),
        {"c_crossattn": torch.zeros(1, 9, 24)},
    )
    assert arguments["txt_ids"].equal(text.float()) and arguments["img_ids"].equal(image.float())


def test_what_the_output_means_comes_from_the_scheduler():
    beta = {
        "_class_name": "DDIMScheduler",
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
    }
    name = CUT[1]
    assert (
        recognised(name).noise.prediction
        == recognised(name, {"_class_name": "FlowMatchEulerDiscreteScheduler"}).noise.prediction
        == "flow"
    )
    assert (
        recognised(name, beta).noise.prediction == "eps"
        and recognised(name, beta | {"prediction_type": "v_prediction"}).noise.prediction == "v"
    )
    assert recognised(name, beta).noise.schedule({}).sigmas[-1] == pytest.approx(14.6146, rel=1e-4)
    with pytest.raises(UnsupportedError, match="predicts 'sample'"):
        recognised(name, beta | {"prediction_type": "sample"})
