"""Every family in one process against latents of a real ComfyUI, at most 1e-4 of their standard deviation
away (families.TOLERANCES has the exceptions); and from a diffusers folder."""

import json
import runpy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import variants
from diffusers.models.embeddings import PatchEmbed
from families import CASES, FILES_ALONE, FROM_HIGHEST, LATENT_FORMATS, TOLERANCES, golden, to_vae_units
from flops import counted
from live_memory import survivors_of
from safetensors.torch import save_file
from sharded_calls import call_as_sharded
from tiny import (
    diffusers_state,
    error_in_std,
    facts,
    is_known_distance,
    relative,
    save_folder,
    weights_module,
    write_checkpoint,
)

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.models import kandinsky5
from backend.models.common.ltx2_connectors import MIN_TOKENS
from backend.models.discrete_schedule import DiscreteSchedule
from backend.models.latent_tokens import TokenGrid
from backend.parallel import mesh
from backend.parallel.block_cost import block_costs
from backend.parallel.matrix_cuts import Shard
from backend.parallel.sequence import Span
from backend.parallel.step_context import StepContext
from backend.sampling import model_runner, request
from backend.sampling.step_loop import Callbacks


@pytest.mark.parametrize("name", CASES)
def test_golden_case(name, tmp_path):
    family = name.split("__")[0]
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / f"{family}.safetensors", family)), "default")
    call_as_sharded(engine.models["tiny"].transformer)
    sample, latent = golden(name)
    engine.check_sample(sample)
    survivors = survivors_of({name: sample.tensors[name] for name in sample.tensors if "." in name})
    samples, _ = engine.sample(sample, Callbacks())
    error = error_in_std(to_vae_units(family, samples, sample.latent_shapes), latent)
    assert error <= TOLERANCES.get(family, 1e-4) and is_known_distance(name, error)
    assert survivors()  # as long as the request is there
    del sample
    assert survivors() == []


@pytest.mark.parametrize("degrees", [{}, {"num_pipeline_patch": 3}])
def test_from_the_highest_noise_level(degrees, tmp_path):
    """4519, where the last digit of float32 is a thousandth: single values are off by it, as a whole they are
    not. In one piece, and in patches of steps of warm-up, which are exact."""
    engine = Engine(ParallelConfig(warmup_steps=6, **degrees), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / "cogvideox.safetensors", "cogvideox")), "default")
    sample, latent = golden(FROM_HIGHEST)
    assert sample.tensors["sigmas"][0] > 4500
    samples, _ = engine.sample(sample, Callbacks())
    error = to_vae_units("cogvideox", samples) - latent
    assert error.square().mean().sqrt() <= 1e-5 * latent.std()


def test_a_preview_stays_as_it_was(tmp_path):
    """LTX-Video's latent pixels are its tokens: a view of the step loop's own x0 would change with the next
    step, while it waits to be sent."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / "ltxv.safetensors", "ltxv")), "default")
    previews, copies = [], []

    def on_step(step, make_x0):
        previews.append(make_x0().arrived())
        copies.append(previews[-1].clone())

    engine.sample(golden(next(case for case in CASES if case.startswith("ltxv")))[0], Callbacks(on_step))
    assert len(previews) > 1 and all(x0.equal(copy) for x0, copy in zip(previews, copies))


@pytest.fixture(scope="module")
def single(request, tmp_path_factory):
    """The checkpoint of a family's single file, loaded."""
    folder = tmp_path_factory.mktemp("models")
    checkpoint = open_checkpoint(str(write_checkpoint(folder / "tiny.safetensors", request.param)))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    yield checkpoint
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "single", [family for family in LATENT_FORMATS if family not in FILES_ALONE], indirect=True
)
def test_diffusers_folder_has_the_same_weights(single, tmp_path):
    again = open_checkpoint(str(save_folder(single, tmp_path / "transformer")))
    again.load(range(again.block_count), torch.float32, torch.device("cpu"))
    assert again.family == single.family
    weights = again.transformer.state_dict()
    assert all(value.equal(weights[name]) for name, value in single.transformer.state_dict().items())


def test_a_pipelines_connectors_are_part_of_the_transformer(tmp_path):
    """LTX-2's stand in a folder of their own next to diffusers' transformer; ComfyUI's text encoder leaves
    prompts to them."""
    single = open_checkpoint(str(write_checkpoint(tmp_path / "ltx23.safetensors", "ltx23")))
    single.load(range(single.block_count), torch.float32, torch.device("cpu"))
    weights, names = (
        diffusers_state(single),
        single.family.layout.companion.names,
    )
    apart = {
        theirs + name.removeprefix(ours): value
        for ours, theirs in names.items()
        for name, value in weights.items()
        if name.startswith(ours)
    }
    sizes = {
        f"{kind}_connector_{name}": value
        for kind, told in zip(("video", "audio"), single.config["connectors"])
        for name, value in told.items()
        if name != "gated_attention"
    }
    told = {key: value for key, value in single.config.items() if key != "connectors"}
    parts = {
        "transformer": (
            {name: value for name, value in weights.items() if not name.startswith(tuple(names))},
            {"_class_name": single.family.transformer, **told},
        ),
        "connectors": (
            apart,
            {
                **sizes,
                "video_gated_attn": True,
                "audio_gated_attn": True,
                "rope_type": "split",
                "rope_double_precision": True,
            },
        ),
    }
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/model_index.json").write_text("{}")
    for name, (tensors, config) in parts.items():
        (tmp_path / "pipeline" / name).mkdir()
        save_file(tensors, tmp_path / "pipeline" / name / "diffusion_pytorch_model.safetensors")
        (tmp_path / "pipeline" / name / "config.json").write_text(json.dumps(config))
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(tmp_path / "pipeline"), "default")
    sample, latent = golden("ltx23__euler_simple")
    engine.check_sample(sample)
    samples, _ = engine.sample(sample, Callbacks())
    assert error_in_std(to_vae_units("ltx23", samples, sample.latent_shapes), latent) <= 1e-4


@pytest.fixture(scope="module", params=[*LATENT_FORMATS, "sd3.5-medium"])
def cut(request, tmp_path_factory):
    """(path, model, request) of every family, cut into three patches."""
    name, path, engine = (
        request.param,
        tmp_path_factory.mktemp("models") / "tiny.safetensors",
        Engine(ParallelConfig(num_pipeline_patch=3), mesh.single()),
    )
    write_checkpoint(path, name) if name in LATENT_FORMATS else variants.write(path, name)
    engine.load("tiny", str(path), "default")
    sample = golden(f"{name}__euler_simple")[0] if name in LATENT_FORMATS else variants.request(name)
    yield path, engine.models["tiny"], build(replace(sample, num_pipeline_patch=3), engine)
    path.unlink()


def build(sample, engine):
    model = engine.models["tiny"]
    return request.build(sample, engine.config, model.checkpoint, model.dtype, torch.device("cpu"))


def test_patches_against_full_buffers_equal_the_whole(cut):
    """A patch step behind a synchronous step on the same latent: buffers hold what every other row would give
    now."""
    _, model, built = cut
    x, sigma = built.start(), built.sigmas[0]
    with torch.inference_mode(), model_runner.running(model, built) as calls:
        calls.plan([sigma, sigma])
        calls.begin_evaluation(0, 0.0)
        whole = calls.run(x, sigma, StepContext("positive", 0, Span(0, 1)))
        calls.begin_evaluation(1, 0.0)
        parts = [
            calls.run(x, sigma, StepContext("positive", 1, Span(0, 1), span, with_text=index == 0))
            for index, span in enumerate(built.patch_spans)
        ]
    assert len(parts) == 3 and relative(torch.cat(parts, dim=1), whole) < 1e-5


def test_the_cost_of_a_block_is_what_it_multiplies(cut):
    """What stages are balanced by, computed from shapes, against the multiplications that torch counts in a
    step: so every family says rightly which rows pass which layer."""
    path, model, built = cut
    (work, sequence), prompt = counted(model, built), built.conditioning["positive"]
    text = sequence.text or sum(
        prompt[name].shape[1] for name in ("c_crossattn", "encoder_hidden_states_t5") if name in prompt
    )
    transformer = open_checkpoint(str(path)).transformer
    latents = dict(model.family.latent.named(built.grid))
    if model.family.name == "ltx2":  # whose connectors fill a prompt up
        text = max(text, MIN_TOKENS)
    config = model.checkpoint.config
    computed = block_costs(transformer, model.family, config, sequence.image, text, latents)
    assert len(work) == len(computed)
    # MiniMax-H3's curves have adaLN of six features
    scale = sum(computed) / sum(work) if "minimax" in model.family.name else 1.0
    assert computed == pytest.approx([scale * each for each in work], rel=0.005)


@pytest.mark.parametrize("single", LATENT_FORMATS, indirect=True)
def test_single_file_with_diffusers_names(single, tmp_path):
    """Recognised by its keys, the configuration from the shapes; with a prefix too."""
    weights = {f"transformer.{name}": value for name, value in diffusers_state(single).items()}
    save_file(weights, tmp_path / "diffusers.safetensors")
    again = open_checkpoint(str(tmp_path / "diffusers.safetensors"))
    assert again.family == single.family and again.config == single.config
    again.load(range(again.block_count), torch.float32, torch.device("cpu"))
    assert all(value.equal(weights[f"transformer.{name}"]) for name, value in diffusers_state(again).items())


@pytest.mark.parametrize(
    "kind, zsnr, highest",
    [("linear", True, 4518.765), ("linear", False, 14.6146), ("sqrt_linear", False, 25.1461)],
)
def test_discrete_schedule(kind, zsnr, highest):
    schedule = DiscreteSchedule(0.00085, 0.012, kind, zsnr)
    assert schedule.sigmas[-1].item() == pytest.approx(highest, rel=1e-3)
    assert schedule.is_highest(schedule.sigmas[-1].item()) and not schedule.is_highest(
        schedule.sigmas[-2].item()
    )
    assert [schedule.timestep(schedule.sigmas[i] * 1.0001).item() for i in (0, 500, 999)] == [0, 500, 999]


def test_halves_that_the_file_has_the_other_way_round_are_cut_rightly(tmp_path):
    """MiniMax-H3's gated layers: a tensor-parallel rank reads its rows of either half."""
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "minimax-h3.safetensors", "minimax-h3")))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    name = "transformer_blocks.1.ff.net.0.proj.weight"
    whole = checkpoint.transformer.get_parameter(name)
    rows, columns = len(whole), whole.shape[1]
    for span in (Span(0, rows // 3), Span(rows // 3, rows), Span(rows - 5, rows)):
        assert checkpoint.read(
            name, torch.float32, torch.device("cpu"), Shard((span,), (Span(0, columns),))
        ).equal(whole[span.indices])


@pytest.mark.parametrize("page", ["README.md", "docs/models.md"])
def test_a_page_has_its_table_of_families(page, monkeypatch):
    """scripts/families_table.py --write brings both up to date."""
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "scripts")
    script = runpy.run_path(str(root / "scripts/families_table.py"))
    tables = {part.page: (part, make()) for part, make in script["TABLES"].items()}
    assert set(tables) == {"README.md", "docs/models.md"}
    part, table = tables[page]
    assert table.count("\n") == len(script["models"].MODULES) + 2 and part.read() == table


@pytest.mark.parametrize(
    "family, names",
    [
        ("flux3", ("single_transformer_blocks.0.attn.norm_q",)),
        ("minimax-h3", ("time_embedder.layer.linear_1", "proj_in", "audio_proj_out")),
        ("minimax-h3-curves", ("transformer_blocks.0.adaln_proj.linear", "norm_out.linear.layer")),
    ],
)
def test_parts_stay_in_float32(family, names, tmp_path):
    """Released files have them so; a bf16 timestep of MiniMax-H3, which counts from 0 to 1 unscaled, would
    hardly tell steps apart. test_half_precision.py has their latents."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / f"{family}.safetensors", family)), "bf16")
    transformer = engine.models["tiny"].transformer
    assert all(transformer.get_parameter(f"{name}.weight").dtype == torch.float32 for name in names)
    assert sum(parameter.dtype == torch.bfloat16 for parameter in transformer.parameters()) > 20


@pytest.mark.parametrize("pixels", [512, 1024, 2048])
def test_pixart_files_with_their_positions(pixels, tmp_path):
    """At the size of their table, positions are those of diffusers' model of that size; at half of it, those
    of its corner, as in ComfyUI. Without the table they would be twice or four times as far apart."""
    side = pixels // 16
    state = weights_module().state_dict(facts("pixart-sigma")["shapes"])
    width = state["x_embedder.proj.weight"].shape[0]
    save_file(state | {"pos_embed": torch.zeros(1, side**2, width)}, tmp_path / "file.safetensors")
    checkpoint = open_checkpoint(str(tmp_path / "file.safetensors"))
    found = []
    for count in (side, side // 2):
        checkpoint.family.io.prepare(checkpoint.transformer, TokenGrid((4, 2 * count, 2 * count), (1, 2, 2)))
        found.append(checkpoint.transformer.pos_embed.pos_embed)
    trained = PatchEmbed(2 * side, 2 * side, 2, 4, width, interpolation_scale=pixels // 512).pos_embed
    torch.testing.assert_close(found[0], trained)
    if pixels > 512:  # ComfyUI's base is 32 tokens at least
        corner = trained.view(side, side, -1)[: side // 2, : side // 2].flatten(0, 1)
        torch.testing.assert_close(found[1][0], corner)


@pytest.mark.parametrize(
    "width, is_video, factor", [(2560, True, 1.0), (2560, False, 1.0), (1792, True, 2.0)]
)
def test_kandinskys_image_models_do_not_stretch_positions(width, is_video, factor):
    """The lite model that edits images has a video model's channels; diffusers' pipelines of images and
    ComfyUI divide by 1."""
    config = {"visual_cond": is_video, "model_dim": width}
    assert kandinsky5.stretch(config, TokenGrid((16, 1, 64, 64), (1, 2, 2))) == (1.0, factor, factor)
