"""Variants of families: what they are refused for, and where references are placed."""

import json
from dataclasses import replace

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AdaLayerNormSingle
from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids
from families import golden, to_vae_units
from safetensors.torch import save_file
from tiny import as_folder, error_in_std, facts, weights_module, write_checkpoint
from tolerance import assert_ulps
from variants import METHOD, VARIANTS, request, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading import parameter_sources
from backend.loading.recognition import open_checkpoint
from backend.models import FAMILIES, ltx2, qwen_image21
from backend.models.common import references
from backend.models.latent_tokens import TokenGrid
from backend.parallel import mesh, modulation_cache
from backend.parallel.pipeline_stage import model_output
from backend.protocol import Sample
from backend.sampling.request import build
from backend.sampling.step_loop import Callbacks
from backend.sampling.validation import check_sample


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("flux-kontext", METHOD["index_timestep_zero"], "Edit Model Reference Method"),
        (
            "flux-kontext",
            {"ref_latents.0": torch.zeros(1, 4, 8, 8)},
            "ref_latents.0 has shape .* VAE of this model",
        ),
        ("flux-kontext", {"ref_latents": torch.zeros(1, 16, 8, 8)}, "call them ref_latents.0"),
        (
            "flux-kontext",
            {"ref_latents.0": torch.zeros(3, 16, 8, 8)},
            "ref_latents.0 has batch 3 but the latent has 1",
        ),
        ("flux-kontext", {"ref_latents_method": torch.tensor(9)}, "ref_latents_method is 9"),
        ("flux-fill", {"c_concat": None}, "c_concat has 0 channels, but this model takes 80"),
        ("flux-fill", {"c_concat": torch.zeros(1, 80, 8, 16)}, r"\[8, 16\], but the latent \[16, 16\]"),
        ("flux-fill", {"ref_latents.0": torch.zeros(1, 16, 8, 8)}, "use FLUX.1 Kontext"),
        ("flux-canny", {"guidance": None}, "FluxDisableGuidance"),
        ("flux2-edit", METHOD["index_timestep_zero"], "Edit Model Reference Method"),
        ("flux2-edit", {"ref_latents.0": torch.zeros(1, 16, 8, 8)}, "VAE of this model"),
        ("qwen-image-edit", METHOD["index_timestep_zero"], "Qwen-Image-Edit 2511"),
        ("qwen-image21-edit", METHOD["offset"], "index_timestep_zero"),
        ("qwen-image21-edit", {"image_slots": torch.tensor([[5, 3]])}, "in order"),
        ("qwen-image21-edit", {"image_slots": torch.tensor([[3, 99]])}, "12 tokens of the prompt"),
        ("qwen-image21-edit", {"image_slots": torch.tensor([3, 3])}, "a tensor .batch, places. is needed"),
        ("qwen-image21-edit", {"attention_mask": torch.zeros(1, 12)}, "padding after"),
        ("krea2-edit", METHOD["index_timestep_zero"], "choose index"),
        ("wan21-i2v", {"clip_fea": torch.zeros(1, 25, 1024)}, "CLIP Vision model of Wan"),
        ("wan22-i2v", {"c_concat": None}, "takes 20 beside"),
        ("wan22-i2v", {"reference_latent": torch.zeros(1, 16, 16, 16)}, "'reference_latent'"),
        (
            "wan21-fun-control",
            {"reference_latent": torch.zeros(1, 16, 8, 16)},
            "takes 16 channels of 16 x 16",
        ),
        (
            "wan21-fun-control",
            {
                "noise": torch.zeros(1, 16, 3, 15, 16),
                "c_concat": torch.zeros(1, 32, 3, 15, 16),
                "reference_latent": torch.zeros(1, 16, 15, 16),
            },
            "needs a latent of even sides, and this one is 15 x 16",
        ),
        (
            "wan21-fun-camera",
            {"camera_conditions": torch.zeros(1, 24, 2, 128, 128)},
            "24 channels of 128 x 128",
        ),
        (
            "wan21-vace-two",
            {"vace_context": torch.zeros(1, 2, 96, 3, 8, 16)},
            "96, 3, 16, 16. for a latent of",
        ),
        ("wan21-vace-two", {"vace_strength": torch.ones(1, 3)}, "control videos but"),
        ("wan21-vace-two", {"vace_context": None}, "vace_context"),
        (
            "wan22-animate",
            {"face_pixel_values": torch.zeros(1, 3, 5, 256, 256)},
            "3 channels and 512 x 512 pixels; use WanAnimateToVideo",
        ),
        ("wan22-animate", {"pose_latents": torch.zeros(1, 16, 2, 8, 16)}, "16 channels of 16 x 16"),
        ("wan22-animate", {"time_dim_concat": torch.zeros(1, 16, 1, 16, 16)}, "'time_dim_concat'"),
        ("wan21-phantom", {"time_dim_concat": torch.zeros(1, 16, 2, 16, 8)}, "16 channels of 16 x 16"),
        (
            "wan22-bernini",
            {"context_latents.1": torch.zeros(1, 8, 1, 8, 8)},
            "takes 16 channels for a latent",
        ),
        ("wan22-bernini", {"context_latents": torch.zeros(1, 16, 1, 8, 8)}, "call those in context"),
        ("wan22-ti2v", {"time_dim_concat": torch.zeros(1, 48, 1, 16, 16)}, "cannot be used together"),
        (
            "hunyuan-video-i2v",
            {"c_concat": torch.zeros(1, 16, 3, 16, 16)},
            "16 channels, but this model takes 17",
        ),
        ("hunyuan-video-i2v", {"ref_latent": torch.zeros(1, 16, 1, 16, 16)}, "'ref_latent'"),
        ("ltxv-i2v", {"denoise_mask": torch.full((1, 1, 3, 8, 8), -1.0)}, "IC-LoRA"),
        ("ltxv-i2v", {"keyframe_idxs": torch.zeros(1, 3, 1000, 2)}, "1000 tokens, but the latent 192"),
        ("ltxv-i2v", {"denoise_mask": torch.ones(1, 1, 3, 4, 8)}, "denoise_mask has the size"),
        (
            "minimax-h3-guides",
            {"given_audio": None},
            "40 and 0 tokens, but given_tags tells of 40 of video .0. and 6 of audio",
        ),
        ("minimax-h3-guides", {"given_positions": None}, "come together; send both"),
        (
            "minimax-h3-guides",
            {"text_tags": torch.ones(1, 5)},
            "text_tags has 5 tokens but c_crossattn has 12",
        ),
        ("minimax-h3-guides", {"text_tags": torch.full((1, 12), 7)}, "text_tags are of 0 .an image's token"),
        (
            "minimax-h3-guides",
            {"given_video": torch.zeros(1, 40, 24)},
            "given_video has width 24, but a token of this model has 96",
        ),
        ("ltx2-i2v", {"denoise_mask": torch.full((1, 1, 3, 6, 5), -1.0)}, "IC-LoRA"),
        ("ltx2-i2v", {"audio_denoise_mask": torch.ones(1, 1, 8, 16)}, "audio_denoise_mask has the size"),
        ("ltx25-i2v", {"c_crossattn": torch.zeros(1, 12, 64)}, "takes 384; encode"),
        ("ltx25-i2v", {"attention_mask": torch.ones(1, 12)}, "yet to finish"),
        ("wan22-ti2v", {"denoise_mask": torch.ones(1, 1, 3, 4, 8)}, "denoise_mask has the size"),
        (
            "hunyuan-video15-i2v",
            {"clip_fea": torch.zeros(1, 25, 1280)},
            "clip_fea has width 1280 but this model wants 1152",
        ),
        (
            "hunyuan-video15-i2v",
            {"txt_byt5": torch.zeros(1, 25, 1280)},
            "txt_byt5 has width 1280 but this model wants 1472",
        ),
        ("hunyuan-video15-i2v", {"c_concat": torch.zeros(1, 16, 3, 10, 10)}, "c_concat has 16 channels"),
        ("hunyuan-video-i2v", {"y": torch.zeros(1, 512)}, "y has width 512, but this model reads 768"),
        ("cogvideox-1.0-i2v", {"noise": torch.zeros(1, 16, 2, 60, 90)}, "2 x 30 x 45 tokens, .* 1350 pos"),
        (
            "cogvideox-i2v",
            {"c_crossattn": torch.zeros(1, 12, 64, 1)},
            "a floating-point tensor .batch, tokens, width. is needed",
        ),
    ],
)
def test_refusals_name_the_remedy(name, change, words, tmp_path):
    checkpoint = open_checkpoint(str(write(tmp_path / f"{name}.safetensors", name)))
    sample = request(name)
    noise = {key: value for key, value in change.items() if key == "noise"}
    prompts = {f"positive.{key}": value for key, value in change.items() if key != "noise"}
    tensors = {**sample.tensors, **prompts, **noise, **({"latent": noise["noise"]} if noise else {})}
    sample = replace(sample, tensors={key: value for key, value in tensors.items() if value is not None})
    with pytest.raises(UnsupportedError, match=words):
        check_sample(sample, ParallelConfig(), checkpoint.family, checkpoint.config, torch.float32, "cpu")


@pytest.mark.parametrize("name", ["hunyuan-video15-meanflow", "hunyuan-image21-distilled"])
def test_distilled_models_are_told_where_a_step_ends(name, tmp_path):
    """By the request, at its own noise levels; at others, as solvers ask for within a step, by nothing."""
    checkpoint = open_checkpoint(str(write(tmp_path / f"{name}.safetensors", name)))
    built = build(
        request(name),
        ParallelConfig(),
        checkpoint.family,
        checkpoint.config,
        torch.float32,
        torch.device("cpu"),
    )
    assert built.tells_step_end and checkpoint.config["use_meanflow"]
    for begin, end in zip(built.sigmas, built.sigmas[1:]):
        cond = built.arguments("positive", slice(None)) | {"step_end": built.step_end(begin)}
        latent = built.grid.to_latent(built.noise)
        found = checkpoint.family.io.arguments(checkpoint.config, built.grid, latent, begin, cond)
        assert found["timestep_r"].tolist() == [(1000 * end).item()]
    assert built.step_end((built.sigmas[0] + built.sigmas[1]) / 2) is None
    plain = open_checkpoint(str(write_checkpoint(tmp_path / "plain.safetensors", VARIANTS[name].family)))
    assert "step_end" not in plain.family.conditioning.accepted


@pytest.mark.parametrize(
    "family, key, name",
    [
        ("chroma", "img_in_patch.weight", "Chroma Radiance"),
        ("wan21-t2v", "casual_audio_encoder.encoder.final_linear.weight", "Wan 2.2 S2V"),
        ("z-image-turbo", "siglip_embedder.0.weight", "Z-Image Omni"),
    ],
)
def test_files_of_other_variants_are_refused_by_name(family, key, name, tmp_path):
    state = weights_module().state_dict(facts(family)["shapes"])
    save_file(
        {f"model.diffusion_model.{k}": v for k, v in (state | {key: torch.zeros(4)}).items()},
        tmp_path / "other.safetensors",
    )
    with pytest.raises(UnsupportedError, match=f"other.safetensors is .*{name}.*KSampler"):
        open_checkpoint(str(tmp_path / "other.safetensors"))


def test_frame_rates_are_not_rounded(tmp_path):
    """23.976 is 24 in bf16, in which prompts are; positions of a long video would drift."""
    checkpoint, sample = (
        open_checkpoint(str(write(tmp_path / "ltxv-i2v.safetensors", "ltxv-i2v"))),
        request("ltxv-i2v"),
    )
    sample = replace(sample, tensors=sample.tensors | {"positive.frame_rate": torch.tensor(23.976)})
    built = build(
        sample, ParallelConfig(), checkpoint.family, checkpoint.config, torch.bfloat16, torch.device("cpu")
    ).conditioning["positive"]
    assert built["c_crossattn"].dtype == torch.bfloat16 and built["frame_rate"].item() == pytest.approx(
        23.976
    )


@pytest.mark.parametrize(
    "family, entry, name",
    [
        ("qwen-image", {"guidance_embeds": True}, "guidance-distilled Qwen-Image"),
        ("z-image", {"all_patch_size": [4]}, "Z-Image of other patches"),
        ("z-image", {"all_f_patch_size": [2]}, "Z-Image of other patches"),
        ("z-image", {"siglip_feat_dim": 1152}, "Z-Image Omni"),
        ("sana", {"guidance_embeds": True}, "SANA-Sprint"),
    ],
)
def test_folders_of_other_variants_are_refused_by_name(family, entry, name, tmp_path):
    """By their config.json, before their tensors are looked at; without the entry it is the tensors that are
    missing.
    """
    save_file({"x": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.safetensors")
    for config, says in (
        (entry, f"is .*{name}.* variant of {family} that is not supported"),
        ({}, "lacks .* tensors|tensors of its file cannot fill"),
    ):
        (tmp_path / "config.json").write_text(
            json.dumps({"_class_name": FAMILIES[family].transformer, **config})
        )
        with pytest.raises(UnsupportedError, match=says):
            open_checkpoint(str(tmp_path))


def test_sparse_attention_is_dense_from_files_and_folders(tmp_path):
    """Kandinsky 5's long videos: the golden latent, which is ComfyUI's, from a folder that asks for NABLA."""
    file, engine = (
        write_checkpoint(tmp_path / "kandinsky5.safetensors", "kandinsky5"),
        Engine(ParallelConfig(), mesh.single()),
    )
    engine.load("tiny", str(as_folder(file, attention_type="nabla")), "default")
    sample, latent = golden("kandinsky5__euler_simple")
    assert (
        error_in_std(
            to_vae_units("kandinsky5", engine.sample(sample, Callbacks())[0], sample.latent_shapes), latent
        )
        < 1e-4
    )


@pytest.mark.parametrize(
    "shape, says",
    [
        ((1, 12, 64), "has 12 tokens, .* position table is for 226; pad the prompt to 226 tokens"),
        ((1, 226, 32), "c_crossattn has width 32 but this model wants 64"),
        ((1, 226, 64), None),
    ],
)
def test_prompts_that_cogvideox_2b_has_no_positions_for_are_refused(shape, says, tmp_path):
    """Positions of sines, text's among them, where later models rotate the image's: 2b comes as a folder."""
    plain = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        num_layers=2,
        text_embed_dim=64,
        time_embed_dim=64,
        sample_height=8,
        sample_width=8,
        sample_frames=9,
    )
    plain.save_pretrained(tmp_path)
    checkpoint, tensors = (
        open_checkpoint(str(tmp_path)),
        {
            "noise": torch.zeros(1, 16, 3, 8, 8),
            "latent": torch.zeros(1, 16, 3, 8, 8),
            "sigmas": torch.tensor([1.0, 0.5, 0.0]),
        },
    )

    def check():
        return check_sample(
            Sample("m", "euler", 1.0, 0, tensors=tensors | {"positive.c_crossattn": torch.zeros(shape)}),
            ParallelConfig(),
            checkpoint.family,
            checkpoint.config,
            torch.float32,
            "cpu",
        )

    if says is None:
        return check()
    with pytest.raises(UnsupportedError, match=says):
        check()


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
    embed = checkpoint.empty.patch_embed
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


#: Family, what tells a released size from the class's defaults.
RELEASED = [
    ("wan", dict(num_attention_heads=12, ffn_dim=8960, num_layers=30, text_dim=4096)),  # 2.1 T2V 1.3B
    ("wan", dict(num_attention_heads=40, ffn_dim=13824, num_layers=40, text_dim=4096)),  # 2.1 and 2.2 T2V 14B
    (
        "wan",
        dict(
            num_attention_heads=40,
            ffn_dim=13824,
            num_layers=40,
            text_dim=4096,
            in_channels=36,
            image_dim=1280,
            added_kv_proj_dim=5120,
        ),
    ),  # 2.1 I2V
    (
        "wan",
        dict(
            num_attention_heads=40,
            ffn_dim=13824,
            num_layers=40,
            text_dim=4096,
            in_channels=36,
            image_dim=1280,
            added_kv_proj_dim=5120,
            pos_embed_seq_len=514,
        ),
    ),  # FLF2V
    (
        "wan",
        dict(num_attention_heads=40, ffn_dim=13824, num_layers=40, text_dim=4096, in_channels=36),
    ),  # 2.2 I2V A14B
    (
        "wan",
        dict(
            num_attention_heads=24,
            ffn_dim=14336,
            num_layers=30,
            text_dim=4096,
            in_channels=48,
            out_channels=48,
        ),
    ),  # 2.2 TI2V 5B
    (
        "sd3",
        dict(
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=192,
            joint_attention_dim=4096,
            pooled_projection_dim=2048,
        ),
    ),  # SD3 medium
    (
        "sd3",
        dict(
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=384,
            joint_attention_dim=4096,
            pooled_projection_dim=2048,
            dual_attention_layers=tuple(range(13)),
            qk_norm="rms_norm",
        ),
    ),  # 3.5 medium
    (
        "sd3",
        dict(
            num_layers=38,
            num_attention_heads=38,
            caption_projection_dim=2432,
            pos_embed_max_size=192,
            joint_attention_dim=4096,
            pooled_projection_dim=2048,
            qk_norm="rms_norm",
        ),
    ),  # 3.5 large
    ("flux", dict(in_channels=384, out_channels=64, guidance_embeds=True)),  # Fill
    ("flux", dict(in_channels=128, out_channels=64, guidance_embeds=True)),  # Canny, Depth
    ("flux", dict(in_channels=64, guidance_embeds=False)),  # schnell
    (
        "pixart",
        dict(use_additional_conditions=True, cross_attention_dim=1152, caption_channels=4096, num_layers=28),
    ),  # alpha 1024
    (
        "hunyuan-dit",
        dict(
            in_channels=4,
            patch_size=2,
            num_attention_heads=16,
            attention_head_dim=88,
            hidden_size=1408,
            num_layers=40,
            mlp_ratio=4.3637,
            cross_attention_dim=1024,
            cross_attention_dim_t5=2048,
            pooled_projection_dim=1024,
            use_style_cond_and_image_meta_size=True,
        ),
    ),  # 1.1
    ("hunyuan-video", dict(in_channels=33)),  # I2V v1
    (
        "cogvideox",
        dict(
            in_channels=32,
            num_attention_heads=48,
            num_layers=42,
            patch_size_t=2,
            ofs_embed_dim=512,
            use_rotary_positional_embeddings=True,
        ),
    ),  # 1.5 5B I2V
]


@pytest.mark.parametrize("name, config", RELEASED)
def test_released_sizes_are_read_from_shapes(name, config):
    """A single file with the shapes that a released configuration has gives that configuration back."""
    family = FAMILIES[name]
    with torch.device("meta"):
        transformer = getattr(diffusers, family.transformer)(**config)
    shapes = {key: tuple(value.shape) for key, value in transformer.state_dict().items()}
    file = {}
    for parameter, source in parameter_sources.sources(family.layout, shapes).items():
        rows = max(source.hi or shapes[parameter][0], file.get(source.key, (0,))[0])
        file[source.key] = (rows, *shapes[parameter][1:])
    found = family.layout.config(file)
    assert {
        key: found[key] if not isinstance(value, float) else pytest.approx(found[key], rel=1e-3)
        for key, value in config.items()
        if key in found
    } == {key: config[key] for key in config if key in found}


@pytest.mark.parametrize(
    "method, want",
    [
        # by ComfyUI's rules: side by side along the shorter side | numbered | both behind the picture's lower
        # right corner
        ("offset", [(1, 0, 0), (1, 6, 0)]),
        ("index", [(1, 0, 0), (2, 0, 0)]),
        ("uxo", [(0, 8, 9), (0, 14, 16)]),
        ("negative_index", [(-1, 0, 0), (-2, 0, 0)]),
    ],
)
def test_places_of_references(method, want):
    grid = TokenGrid((16, 15, 18), (1, 2, 2))
    found = [TokenGrid((16, *size), (1, 2, 2)) for size in ((11, 14), (8, 27))]
    assert references.places(grid, found, method) == want


@torch.inference_mode()
def test_flux3_is_given_references_as_diffusers_gives_them(tmp_path):
    """Tokens and positions of diffusers' own pipeline, in its own transformer."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path / "flux3-edit.safetensors", "flux3-edit")), "default")
    model, sample = engine.models["tiny"], request("flux3-edit")
    plain = diffusers.Flux3Transformer2DModel(**model.config).eval()
    plain.load_state_dict(
        {name.replace(".layer.", "."): value for name, value in model.transformer.state_dict().items()}
    )
    cond = {
        key.removeprefix("positive."): value
        for key, value in sample.tensors.items()
        if key.startswith("positive.")
    }
    latent, text, time = sample.tensors["noise"], cond["c_crossattn"], torch.tensor([0.7])
    grid = TokenGrid(tuple(latent.shape[1:]), (1, 1, 1))
    found = model.family.io.output(
        model_output(
            model.transformer,
            model.family,
            model.family.io.arguments(model.config, grid, latent, time[0], cond),
        ),
        grid,
    )

    pack, pictures = lambda latent: latent.flatten(2).transpose(1, 2), references.references(cond)

    def ids(latent, number):
        return _prepare_image_ids(*latent.shape[-2:], 0.5, l_coord=number)

    rows = torch.cartesian_prod(
        torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(text.shape[1])
    )
    want = plain(
        pack(latent),
        text,
        time,
        ids(latent, 0),
        rows,
        image_cond_hidden_states=torch.cat([pack(picture) for picture in pictures], dim=1),
        image_cond_ids=torch.cat([ids(picture, -1 - i) for i, picture in enumerate(pictures)]),
    ).sample
    assert len(pictures) == 2
    assert_ulps(found, want, sum(len(plain.get_submodule(name)) for name in model.family.blocks.lists))


@torch.inference_mode()
@pytest.mark.parametrize("branch", ["positive", "negative"])
def test_qwen_image21_is_given_references_as_diffusers_gives_them(branch, tmp_path):
    """In the slots of its pipeline's text encoder, which stand for 2 x 2 tokens each, with diffusers' own
    attention and positions.
    """
    checkpoint = open_checkpoint(str(write(tmp_path / "edit.safetensors", "qwen-image21-edit")))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    sample, family, config, ours = (
        request("qwen-image21-edit"),
        checkpoint.family,
        checkpoint.config,
        checkpoint.empty,
    )
    plain = diffusers.QwenImage21Transformer2DModel(**config).eval()
    plain.load_state_dict(ours.state_dict())
    cond = {
        key.removeprefix(f"{branch}."): value
        for key, value in sample.tensors.items()
        if key.startswith(f"{branch}.")
    }
    latent, text, time = sample.tensors["noise"], cond["c_crossattn"], torch.tensor([0.7])
    grid = TokenGrid(tuple(latent.shape[1:]), (1, 1, 1))
    found = family.io.output(
        model_output(ours, family, family.io.arguments(config, grid, latent, time[0], cond)), grid
    )

    rows, slots = list(text[0].unbind(0)), [False] * text.shape[1]
    pictures = references.references(cond)
    for at, picture in reversed(list(zip(cond["image_slots"][0].tolist(), pictures))):
        count = picture.shape[-2] * picture.shape[-1] // 4
        rows[at:at], slots[at:at] = [torch.full((text.shape[2],), 5.0)] * count, [True] * count

    def pack(latent):
        return latent.flatten(2).transpose(1, 2)

    want = plain(
        torch.cat([pack(picture) for picture in (*pictures, latent)], dim=1),
        torch.stack(rows)[None],
        time,
        [[(1, *picture.shape[-2:]) for picture in (*pictures, latent)]],
        torch.tensor([slots + [True] * (grid.tokens // 4)]),
    ).sample[:, -grid.tokens :]
    assert len(pictures) == {"positive": 2, "negative": 1}[branch]
    assert_ulps(found, want, len(plain.transformer_blocks))


@torch.inference_mode()
def test_qwen_image21_makes_pictures_of_odd_sides(tmp_path):
    """Sizes that diffusers' forward has no slots for: its own blocks, one by one, on the sequence."""
    checkpoint = open_checkpoint(str(write(tmp_path / "odd.safetensors", "qwen-image21-odd")))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    sample, family, config, ours = (
        request("qwen-image21-odd"),
        checkpoint.family,
        checkpoint.config,
        checkpoint.empty,
    )
    plain = diffusers.QwenImage21Transformer2DModel(**config).eval()
    plain.load_state_dict(ours.state_dict())
    latent, text, picture = (
        sample.tensors["noise"],
        sample.tensors["positive.c_crossattn"],
        sample.tensors["positive.ref_latents.0"],
    )
    cond, grid = (
        {"c_crossattn": text, "ref_latents.0": picture, "image_slots": torch.tensor([[4]])},
        TokenGrid((64, 7, 9), (1, 1, 1)),
    )
    found = family.io.output(
        model_output(ours, family, family.io.arguments(config, grid, latent, torch.tensor(0.7), cond)), grid
    )

    text, pixels = (
        plain.txt_in(text),
        [plain.img_in(one.flatten(2).transpose(1, 2)) for one in (picture, latent)],
    )
    rows, rotary = (
        torch.cat([text[:, :4], pixels[0], text[:, 4:], pixels[1]], dim=1),
        ours.pos_embed.table(qwen_image21.positions(grid, cond, None)),
    )
    made, temb = torch.arange(rows.shape[1]) >= 12 + 15, plain.time_text_embed(torch.tensor([0.7, 0.0]), rows)
    for block in plain.transformer_blocks:
        rows = block(
            rows,
            plain.modulation(temb),
            rotary,
            None,
            made,
            segments=[(0, 4, True), (4, 19, False), (19, 27, True)],
        )
    want = plain.proj_out(plain.norm_out(rows, temb, made))[:, 27:]
    assert found.shape == (1, 63, 64)
    assert_ulps(found, want, len(plain.transformer_blocks))


def test_what_references_decide_is_computed_once(tmp_path):
    """Flux.3's prompt and references, each one embedder and four blocks, and the positions of both and of the
    image, once a request and branch."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write(tmp_path / "flux3-edit.safetensors", "flux3-edit")), "default")
    engine.sample(request("flux3-edit"), Callbacks())
    assert modulation_cache.COMPUTED == {"prompt": 2 * (5 + 5 + 3)}


@pytest.mark.parametrize("causal", [True, False])
def test_what_no_step_changes_runs_once(causal, tmp_path):
    """Text and references of Qwen-Image 2.1 are rows of a prompt's first evaluation alone, unless the step
    modulates them.
    """
    folder = as_folder(write(tmp_path / "edit.safetensors", "qwen-image21-edit"), causal_condition=causal)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(folder), "default")
    rows, sample = [], request("qwen-image21-edit")
    engine.models["tiny"].transformer.transformer_blocks[1].attn.to_q.register_forward_pre_hook(
        lambda layer, args: rows.append(args[0].shape[1])
    )
    engine.sample(sample, Callbacks())
    both = [12 + 32 + 36 + 80, 7 + 32 + 80]
    assert rows == both + ([80] * 10 if causal else both * 5)


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


@pytest.mark.parametrize("name", ["ltx2-i2v", "ltx25-i2v"])
def test_modulation_of_a_mask_is_kept_once_a_level(name, tmp_path, monkeypatch):
    """LTX-2's rows are given the number of their noise level (8 bytes), and each level's modulation is there
    once; the latent is that of every row with its own.
    """
    engine, sample, given = Engine(ParallelConfig(), mesh.single()), request(name), []
    engine.load("tiny", str(write(tmp_path / f"{name}.safetensors", name)), "default")
    transformer, names = (
        engine.models["tiny"].transformer,
        ("temb", "temb_audio", "temb_ca_scale_shift", "temb_ca_audio_scale_shift"),
    )
    transformer.transformer_blocks[0].register_forward_pre_hook(
        lambda block, args, kwargs: given.append([kwargs[name] for name in names]), with_kwargs=True
    )
    latent = engine.sample(sample, Callbacks())[0]
    levels, rows = transformer.transformer_blocks[0].levels, [tensor.shape[1] for tensor in given[0]]
    grid = engine.models["tiny"].family.latent.grid(
        engine.models["tiny"].config, sample.tensors["noise"].shape[1:], sample.latent_shapes
    )
    assert rows == [part.tokens for part in grid.grids] * 2 and [
        len(embed.modulation) for embed in levels
    ] == [2, 3, 2, 3]
    kept = sum(tensor.nbytes for tensor in given[0]) + sum(embed.modulation.nbytes for embed in levels)
    monkeypatch.setattr(ltx2.Levels, "forward", LTX2AdaLayerNormSingle.forward)
    each = engine.sample(sample, Callbacks())[0]
    assert_ulps(each, latent, len(transformer.transformer_blocks) * (len(sample.tensors["sigmas"]) - 1))
    assert kept < 0.1 * sum(tensor.nbytes for tensor in given[-1])


def test_samples_with_references_at_other_places_are_no_batch():
    grid, cond = (
        TokenGrid((64, 8, 10), (1, 1, 1)),
        {"c_crossattn": torch.zeros(2, 2, 8), "ref_latents.0": torch.zeros(2, 64, 4, 8)},
    )
    assert qwen_image21.refusal({}, grid, cond | {"image_slots": torch.tensor([[1], [1]])}) is None
    assert "from sample to sample" in qwen_image21.refusal(
        {}, grid, cond | {"image_slots": torch.tensor([[1], [0]])}
    )


def test_pictures_of_odd_and_even_sides_have_one_middle():
    """As ComfyUI's Qwen-Image 2.1 places them: columns of a reference seven wide fall between those of a
    picture ten wide.
    """
    grid, cond = (
        TokenGrid((64, 8, 10), (1, 1, 1)),
        {
            "c_crossattn": torch.zeros(1, 2, 8),
            "ref_latents.0": torch.zeros(1, 64, 4, 7),
            "image_slots": torch.tensor([[1]]),
        },
    )
    found = qwen_image21.positions(grid, cond, None)
    assert (
        found[:1].tolist() == [[0] * 3]
        and found[1:8, 2].tolist() == [-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5]
        and found[1:29, 0].unique().tolist() == [1]
    )
    assert (
        found[29].tolist() == [8] * 3 and found[30].tolist() == [9, -4, -5] and len(found) == 1 + 28 + 1 + 80
    )
