"""Variants of families in one process: noise levels, frame rates, masks and positions that differ."""

from dataclasses import replace
from itertools import pairwise

import diffusers
import pytest
import torch
from diffusers.models.embeddings import get_timestep_embedding
from diffusers.models.transformers.transformer_ltx2 import LTX2AdaLayerNormSingle
from families import golden, model_call, to_vae_units
from live_memory import survivors_of
from ranks.flux_requests import shortened
from sharded_calls import call_as_sharded
from tiny import as_folder, error_in_std, is_known_distance, write_checkpoint
from tolerance import assert_ulps
from variants import GOLDENS, VARIANTS, golden_variant, request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.recognition import open_checkpoint
from backend.models import ltx2, minimax_h3, wan_vace
from backend.models.common import ltx2_blocks, token_levels, wan_blocks
from backend.parallel import mesh
from backend.sampling.model_call import build_call
from backend.sampling.model_inputs import arguments_of
from backend.sampling.request import UNIPC, build
from backend.sampling.solvers.unipc import LAST_SIGMA
from backend.sampling.step_loop import Callbacks

#: Variants of which tests/golden/variants has ComfyUI's latent (tests/comfy/variant_goldens.py).
OF_COMFYUI = (
    *("cogvideox-1.0-i2v", "flux2-edit-zero", "hunyuan-video15-meanflow", "hunyuan-video15-sr"),
    *("krea2-style", "ltx25-smaller-guides", "ltxv-smaller-guides"),
    *("qwen-image-layered", "wan21-fun-camera", "wan21-fun-control", "wan22-animate"),
)


@pytest.mark.parametrize(
    "name", ["hunyuan-video15-meanflow", "hunyuan-video15-sr", "hunyuan-image21-distilled"]
)
def test_distilled_models_are_told_where_a_step_ends(name, tmp_path):
    """By the request, at its own noise levels; at others, as solvers ask for within a step, by nothing."""
    checkpoint = open_checkpoint(str(write(tmp_path / f"{name}.safetensors", name)))
    settings = (ParallelConfig(), checkpoint, torch.float32)
    built = build(request(name), *settings, torch.device("cpu"))
    assert built.has_step_end and checkpoint.config["use_meanflow"]
    for begin, end in pairwise(built.sigmas):
        cond = built.arguments("positive", slice(None)) | {"step_end": built.step_end(begin)}
        latent = built.grid.to_latent(built.noise)
        found = checkpoint.family.io.arguments(
            checkpoint.config, built.grid, checkpoint.family.io.of_latent(latent, built.grid), begin, cond
        )
        assert found["timestep_r"].tolist() == [(1000 * end).item()]
    assert built.step_end((built.sigmas[0] + built.sigmas[1]) / 2) is None
    by_unipc = [replace(built, solver=solver).step_end(built.sigmas[-2]) for solver in UNIPC]
    assert [end.item() for end in by_unipc] == [pytest.approx(LAST_SIGMA)] * len(UNIPC)
    ends_early = replace(built, solver="uni_pc", sigmas=built.sigmas[:-1])
    assert ends_early.step_end(built.sigmas[-3]) == built.sigmas[-2]
    plain = open_checkpoint(str(write_checkpoint(tmp_path / "plain.safetensors", VARIANTS[name].family)))
    assert "step_end" not in plain.family.conditioning.accepted


def test_no_golden_variant_is_missing():
    assert sorted(path.name for path in GOLDENS.iterdir()) == [f"{name}.safetensors" for name in OF_COMFYUI]


@pytest.mark.parametrize("name", OF_COMFYUI)
def test_golden_variant(name, tmp_path):
    """After ComfyUI's own conditioning nodes, at most 1e-4 of the latent's standard deviation away. Nothing
    that the request gave survives it."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path / f"{name}.safetensors", name)), "default")
    call_as_sharded(engine.models["tiny"].transformer)
    sample, want = golden_variant(name)
    engine.check_sample(sample)
    survivors = survivors_of({name: sample.tensors[name] for name in sample.tensors if "." in name})
    samples, _ = engine.sample(sample, Callbacks())
    error = error_in_std(samples, want)
    assert error < 1e-4 and is_known_distance(name, error)
    assert survivors()  # as long as the request is there
    del sample
    assert survivors() == []


@pytest.mark.parametrize("name", ["flux-kontext", "hunyuan-video-i2v-v2", "hunyuan-image21-distilled"])
def test_without_guidance_nothing_is_added_for_it(name, tmp_path):
    """Flux Disable Guidance: the latent is that of an embedder of guidance that gives zeros."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path / f"{name}.safetensors", name)), "default")
    sample = shortened(request(name), 2)
    tensors = {key: value for key, value in sample.tensors.items() if not key.endswith(".guidance")}
    assert len(tensors) == len(sample.tensors) - 2
    unguided = replace(sample, tensors=tensors)
    engine.check_sample(unguided)
    found, _ = engine.sample(unguided, Callbacks())
    guided, _ = engine.sample(sample, Callbacks())
    modules = dict(engine.models["tiny"].transformer.named_modules())
    (embedder,) = (path for path in modules if path.endswith("guidance_embedder"))
    modules[embedder].register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    want, _ = engine.sample(sample, Callbacks())
    assert error_in_std(found, want) < 1e-6 < 1e-2 < error_in_std(found, guided)


@pytest.mark.parametrize("given, want", [({"guidance": torch.tensor([3.5])}, 3500.0), ({}, 0.0)], ids=str)
def test_chroma_embeds_the_requests_guidance(given, want, tmp_path):
    """In the second half of what tells modulations apart, besides the timestep; ComfyUI's default is 0."""
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "chroma.safetensors", "chroma")))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    family, transformer = checkpoint.family, checkpoint.transformer
    latent = torch.zeros(2, 16, 8, 8)
    grid = family.latent.grid(checkpoint.config, latent.shape[1:], [])
    cond = {"c_crossattn": torch.zeros(2, 5, checkpoint.config["joint_attention_dim"])} | given
    embedded = []
    transformer.distilled_guidance_layer.register_forward_pre_hook(
        lambda module, args: embedded.append(*args)
    )
    transformer(
        **family.io.arguments(
            checkpoint.config, grid, family.io.of_latent(latent, grid), torch.tensor(0.7), cond
        )
    )
    (sines,) = embedded
    numbers = torch.tensor([700.0, want]).repeat(2)
    wanted = get_timestep_embedding(numbers, 16, flip_sin_to_cos=True, downscale_freq_shift=0).view(2, 1, 32)
    assert_ulps(sines[:, :, :32], wanted.expand(-1, sines.shape[1], -1), 1)


@torch.inference_mode()
def test_hunyuan_dit_takes_a_prompt_that_is_longer_than_its_padding(tmp_path):
    """The last 77 tokens have the learned one, as diffusers' model would with rows before it."""
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "hunyuan-dit.safetensors", "hunyuan-dit")))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    sample = request("hunyuan-dit-1.1")
    cond = arguments_of("positive", sample.tensors)
    latent, text = sample.tensors["noise"], cond["c_crossattn"]
    cond["c_crossattn"] = torch.cat([text[:, :9] * 2, text], dim=1)
    cond["text_embedding_mask"] = torch.cat([torch.zeros(1, 9), torch.ones(1, 30), torch.zeros(1, 47)], dim=1)
    grid = checkpoint.family.latent.grid(checkpoint.config, latent.shape[1:], [])
    assert checkpoint.family.conditioning.refusal(checkpoint.config, grid, cond) is None
    given = checkpoint.family.io.arguments(
        checkpoint.config, grid, checkpoint.family.io.of_latent(latent, grid), torch.tensor(700.0), cond
    )
    found = checkpoint.transformer(**given, return_dict=False)[0]
    plain = diffusers.HunyuanDiT2DModel(**checkpoint.config).eval()
    plain.load_state_dict(checkpoint.transformer.state_dict())
    plain.text_embedding_padding.data = torch.cat([torch.zeros(9, 64), plain.text_embedding_padding.data])
    assert given["text_embedding_mask"][0, :9].all()  # ComfyUI hides none of them
    assert_ulps(found, plain(**given, return_dict=False)[0], checkpoint.block_count)


def test_frame_rates_are_not_rounded(tmp_path):
    """23.976 is 24 in bf16, in which prompts are; positions of a long video would drift."""
    checkpoint = open_checkpoint(str(write(tmp_path / "ltxv-i2v.safetensors", "ltxv-i2v")))
    sample = request("ltxv-i2v")
    sample = replace(sample, tensors=sample.tensors | {"positive.frame_rate": torch.tensor(23.976)})
    built = build(sample, ParallelConfig(), checkpoint, torch.bfloat16, torch.device("cpu")).conditioning[
        "positive"
    ]
    assert built["c_crossattn"].dtype == torch.bfloat16
    assert built["frame_rate"].item() == pytest.approx(23.976)


def test_a_number_may_be_given_for_each_sample(tmp_path):
    """As requests of a file may: it is one for all."""
    name = "minimax-h3-guides"
    checkpoint = open_checkpoint(str(write(tmp_path / f"{name}.safetensors", name)))
    settings = (ParallelConfig(), checkpoint, torch.float32, torch.device("cpu"))
    built = build(request(name), *settings)
    cond = built.arguments("positive", slice(None))
    one, each, other = (
        minimax_h3._sequence(built.grid, cond | {"origin": origin}, "cpu")["position_ids"]
        for origin in (torch.tensor(13.0), torch.tensor([13.0, 13.0]), torch.tensor([14.0, 14.0]))
    )
    assert one.equal(each) and not one.equal(other)


def test_an_unfinished_prompt_may_be_marked_for_each_sample():
    config = {"use_prompt_embeddings": False, "cross_attention_dim": 8, "audio_cross_attention_dim": 4}
    prompt = {"c_crossattn": torch.zeros(2, 3, 12)}
    marks = [{}, *({"unprocessed_ltxav_embeds": torch.tensor(mark)} for mark in (False, True, [True, True]))]
    assert [ltx2.is_finished(config, prompt | mark) for mark in marks] == [True, True, False, False]


def test_a_block_that_ran_out_of_memory_keeps_no_video(tmp_path, monkeypatch):
    """Else audio of the next request would listen to it, or its sizes would not fit."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_checkpoint(tmp_path / "ltx2.safetensors", "ltx2")), "default")
    sample = shortened(golden("ltx2__euler_simple")[0], 2)
    before, _ = engine.sample(sample, Callbacks())
    attention = engine.models["tiny"].transformer.transformer_blocks[0].audio_to_video_attn
    forward, calls = attention.forward, iter((False, False, True))

    def runs_out(*args, **kwargs):
        if next(calls, False):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(*args, **kwargs)

    monkeypatch.setattr(attention, "forward", runs_out)
    with pytest.raises(torch.OutOfMemoryError):
        engine.sample(sample, Callbacks())
    after, _ = engine.sample(sample, Callbacks())
    assert after.equal(before)


def test_where_a_step_ends_is_not_rounded(tmp_path):
    """Parallel Model sends it; in bf16 levels near 1 would be 4 of the 1000 timesteps apart. ComfyUI rounds
    their sines alone."""
    name = "hunyuan-video15-meanflow"
    checkpoint = open_checkpoint(str(write(tmp_path / f"{name}.safetensors", name)))
    sent = model_call(request(name), checkpoint.family.name, 2)
    end = torch.tensor([0.9871])
    sent = replace(sent, tensors=sent.tensors | {"cond.step_end": end})
    built = build_call(sent, checkpoint, torch.bfloat16, torch.device("cpu"), [0, 1])
    cond = built.arguments("positive", slice(None))
    latent = built.model_input(built.latent, built.sigmas[0], slice(None), checkpoint.family.io)
    found = checkpoint.family.io.arguments(checkpoint.config, built.grid, latent, built.times, cond)
    assert cond["c_crossattn"].dtype == torch.bfloat16
    assert found["timestep_r"].tolist() == (1000 * end.expand(2)).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_strengths_of_control_videos_are_not_rounded(dtype, tmp_path, monkeypatch):
    """0.8 is 0.8008 in bf16; ComfyUI multiplies by the number and rounds the product."""
    checkpoint = open_checkpoint(str(write(tmp_path / "vace.safetensors", "wan21-vace-two")))
    sample = request("wan21-vace-two")
    sample = replace(sample, tensors=sample.tensors | {"positive.vace_strength": torch.tensor([[0.8, 1.3]])})
    built = build(sample, ParallelConfig(), checkpoint, dtype, torch.device("cpu"))
    block, hint = checkpoint.transformer.blocks[0], torch.linspace(-2, 2, 3072).view(1, 6, 512).to(dtype)
    block.call.vace_strength = built.conditioning["positive"]["vace_strength"]
    monkeypatch.setattr(wan_blocks.WanBlock, "forward", lambda block, state, *further: 0 * state)
    monkeypatch.setattr(wan_blocks.ControlBlock, "forward", lambda *given: (hint.clone(), given[3]))
    out = wan_vace.VaceBlock.forward(block, torch.zeros(1, 6, 3 * 512, dtype=dtype), None, None, None)
    assert torch.equal(out[..., :512], hint * 0.8 + hint * 1.3)


def test_sparse_attention_is_dense_from_files_and_folders(tmp_path):
    """Kandinsky 5's long videos: the golden latent, which is ComfyUI's, from a folder that asks for NABLA."""
    file = write_checkpoint(tmp_path / "kandinsky5.safetensors", "kandinsky5")
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(as_folder(file, attention_type="nabla")), "default")
    sample, latent = golden("kandinsky5__euler_simple")
    samples, _ = engine.sample(sample, Callbacks())
    assert error_in_std(to_vae_units("kandinsky5", samples, sample.latent_shapes), latent) < 1e-4


def test_shorter_videos_have_the_first_learned_positions(tmp_path):
    """CogVideoX 1.0's image to video from a folder; diffusers takes sines for them."""
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        in_channels=32,
        num_layers=1,
        text_embed_dim=64,
        time_embed_dim=64,
        sample_height=8,
        sample_width=8,
        sample_frames=9,
        use_rotary_positional_embeddings=True,
        use_learned_positional_embeddings=True,
    )
    table = torch.randn(1, 226 + 3 * 16, 128)
    model.patch_embed.pos_embedding.data = table
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path))
    checkpoint.load(range(1), torch.float32, torch.device("cpu"))
    embed = checkpoint.transformer.patch_embed
    text, video = torch.randn(1, 226, 64), torch.randn(1, 2, 32, 8, 8)
    without = torch.cat([embed.text_proj(text), embed.proj(video[0]).movedim(1, -1).reshape(1, 32, 128)], 1)
    torch.testing.assert_close(embed(text, video) - without, table[:, :258], rtol=0, atol=1e-5)


def test_a_family_is_itself_where_nothing_differs(tmp_path):
    plain = open_checkpoint(str(write_checkpoint(tmp_path / "a.safetensors", "wan21-t2v"))).family
    frames = open_checkpoint(str(write(tmp_path / "b.safetensors", "wan22-ti2v"))).family
    assert (
        not plain.noise.clean_inpaint
        and frames.noise.clean_inpaint
        and frames.name == plain.name
        and "c_concat" not in frames.conditioning.accepted
    )
    assert VARIANTS["wan22-ti2v"].family == "wan21-t2v"


def test_wan_without_image_features_reads_the_prompt_in_their_place(tmp_path):
    """As ComfyUI does without CLIP Vision Encode: features of one prompt alone are not the other's."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path / "i2v.safetensors", "wan21-i2v")), "default")
    sample = request("wan21-i2v")
    sample.tensors["negative.clip_fea"] = sample.tensors["positive.clip_fea"]
    sample.tensors["sigmas"] = sample.tensors["sigmas"][:3]
    features = {key: value for key, value in sample.tensors.items() if key.endswith(".clip_fea")}
    plain = {key: value for key, value in sample.tensors.items() if key not in features}

    def sampled(tensors):
        own = replace(sample, tensors=tensors)
        engine.check_sample(own)
        return engine.sample(own, Callbacks())[0]

    without = sampled(plain)
    mixed = sampled(plain | {"positive.clip_fea": features["positive.clip_fea"]})
    assert without.isfinite().all() and not torch.allclose(without, mixed, rtol=1e-3)
    assert not torch.allclose(mixed, sampled(sample.tensors), rtol=1e-3)
    assert sampled(plain).equal(without)  # nothing is left of the requests between


@pytest.mark.parametrize("times", [torch.tensor(0.7), torch.tensor([0.7, 0.3])], ids=["one", "two"])
@pytest.mark.parametrize("masks", [1, 2])
@pytest.mark.parametrize("soft", [False, True], ids=["few values", "soft"])
def test_levels_of_a_mask_are_those_of_its_tokens(times, masks, soft):
    """One time for two samples, or their own (Parallel Model); one mask for both, or their own. There are no
    more levels than tokens."""
    given = torch.tensor([[0.0, 1.0, 0.5, 1.0], [1.0, 1.0, 0.0, 0.2]])
    tokens = (torch.arange(8).view(2, 4) / 8 if soft else given)[:masks]
    levels, indices = token_levels.levels_of(token_levels.distinct(tokens), times, 2)
    assert levels[indices].equal((tokens * times.expand(2)[:, None]).flatten())
    assert len(levels) == min(len(tokens.unique()) * times.numel(), 2 * tokens.shape[1])


@pytest.mark.parametrize("name", ["ltx2-i2v", "ltx25-i2v"])
def test_modulation_of_a_mask_is_cached_once_a_level(name, tmp_path, monkeypatch):
    """LTX-2's rows are given the number of their noise level (8 bytes), and each level's modulation is there
    once; the latent is that of every row with its own.
    """
    engine, sample, given, held = Engine(ParallelConfig(), mesh.single()), request(name), [], []
    sample.tensors["sigmas"] = sample.tensors["sigmas"][:3]
    engine.load("tiny", str(write(tmp_path / f"{name}.safetensors", name)), "default")
    transformer = engine.models["tiny"].transformer
    names = ("temb", "temb_audio", "temb_ca_scale_shift", "temb_ca_audio_scale_shift")

    def look(block, args, kwargs):
        given.append([kwargs[name] for name in names])
        held.append([embed.modulation for embed in block.levels])

    transformer.transformer_blocks[0].register_forward_pre_hook(look, with_kwargs=True)
    latent = engine.sample(sample, Callbacks())[0]
    assert not any(embed.modulation is not None for embed in transformer.transformer_blocks[0].levels)
    levels, rows = held[0], [tensor.shape[1] for tensor in given[0]]
    grid = engine.models["tiny"].family.latent.grid(
        engine.models["tiny"].checkpoint.config, sample.tensors["noise"].shape[1:], sample.latent_shapes
    )
    assert rows == [part.tokens for part in grid.grids] * 2 and [
        len(modulation) for modulation in levels
    ] == [2, 3, 2, 3]
    cached = sum(tensor.nbytes for tensor in (*given[0], *levels))
    monkeypatch.setattr(ltx2_blocks.Levels, "forward", LTX2AdaLayerNormSingle.forward)
    each = engine.sample(sample, Callbacks())[0]
    assert_ulps(each, latent, len(transformer.transformer_blocks) * (len(sample.tensors["sigmas"]) - 1))
    assert cached < 0.1 * sum(tensor.nbytes for tensor in given[-1])
