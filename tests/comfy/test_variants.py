"""Variants that have no golden latents, one model call each: ComfyUI's own module against the backend's, on
the same random single file."""

import pytest
import torch
from comfy_modules import comfy_modules
from safetensors.torch import save_file

from backend.loading.recognition import open_checkpoint
from backend.models import kandinsky5 as kandinsky5_family
from backend.models.latent_tokens import TokenGrid
from backend.parallel.pipeline_stage import model_output

with comfy_modules():
    import comfy.ops
    from comfy.ldm.cogvideo.model import CogVideoXTransformer3DModel
    from comfy.ldm.flux.model import Flux
    from comfy.ldm.hydit.models import HunYuanDiT
    from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel
    from comfy.ldm.kandinsky5.model import Kandinsky5
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper
    from comfy.ldm.pixart.pixartms import PixArtMS
    from comfy.ldm.wan.model import WanModel
    from comfy.ldm.wan.model_animate import AnimateWanModel


HERE = {"operations": comfy.ops.disable_weight_init, "dtype": torch.float32, "device": "cpu"}
SIGMA = torch.tensor(0.7)


def randn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def hidden_rows(rows, visible):
    return (torch.arange(rows) < visible).long()[None]


def sd3(qk_norm, dual):
    return OpenAISignatureMMDITWrapper(
        input_size=None,
        in_channels=16,
        out_channels=16,
        patch_size=2,
        depth=3,
        adm_in_channels=32,
        num_patches=1024,
        pos_embed_max_size=32,
        qk_norm=qk_norm,
        pos_embed_scaling_factor=None,
        x_block_self_attn_layers=dual,
        context_embedder_config={
            "target": "torch.nn.Linear",
            "params": {"in_features": 64, "out_features": 192},
        },
        **HERE,
    )


def wan(kind):
    return WanModel(
        model_type=kind,
        dim=256,
        ffn_dim=512,
        num_heads=2,
        num_layers=2,
        in_dim=36,
        out_dim=16,
        text_dim=64,
        qk_norm=True,
        cross_attn_norm=True,
        **HERE,
    )


def animate():
    return AnimateWanModel(
        dim=256, ffn_dim=512, num_heads=2, num_layers=10, in_dim=36, out_dim=16, text_dim=64, **HERE
    )


def cogvideox(**fields):
    return CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=64,
        time_embed_dim=128,
        num_layers=2,
        text_embed_dim=64,
        patch_size_t=2,
        use_rotary_positional_embeddings=True,
        **fields,
        **HERE,
    )


def kandinsky5(**fields):
    return Kandinsky5(
        model_dim=256,
        time_dim=128,
        ff_dim=512,
        in_text_dim=64,
        in_text_dim2=32,
        num_text_blocks=1,
        num_visual_blocks=2,
        **fields,
        **HERE,
    )


def hunyuan_dit(**fields):
    return HunYuanDiT(depth=4, hidden_size=256, text_states_dim=64, text_states_dim_t5=64, **fields, **HERE)


def klein():
    return Flux(
        patch_size=1,
        theta=2000,
        mlp_ratio=3.0,
        qkv_bias=False,
        ops_bias=False,
        global_modulation=True,
        mlp_silu_act=True,
        vec_in_dim=None,
        txt_ids_dims=[3],
        in_channels=128,
        out_channels=128,
        context_in_dim=64,
        hidden_size=128,
        num_heads=2,
        depth=1,
        depth_single_blocks=2,
        axes_dim=[16, 16, 16, 16],
        guidance_embed=False,
        **HERE,
    )


def ideogram4():
    return Ideogram4Transformer2DModel(
        in_channels=128,
        num_layers=2,
        num_attention_heads=2,
        attention_head_dim=128,
        intermediate_size=256,
        adaln_dim=64,
        llm_features_dim=64,
        **HERE,
    )


def pixart(**fields):
    return PixArtMS(
        patch_size=2,
        in_channels=4,
        hidden_size=144,
        depth=2,
        num_heads=16,
        caption_channels=64,
        model_max_length=12,
        **fields,
        **HERE,
    )


TEXT, VIDEO = {"c_crossattn": randn(1, 12, 64)}, randn(1, 16, 3, 9, 10)
T5 = {
    "c_crossattn": randn(1, 77, 64),
    "encoder_hidden_states_t5": randn(1, 256, 64),
    "text_embedding_mask": hidden_rows(77, 40),
    "text_embedding_mask_t5": hidden_rows(256, 100),
    "image_meta_size": torch.tensor([[320.0, 384.0, 320.0, 384.0, 0.0, 0.0]]),
}
IMAGE = {"c_crossattn": randn(1, 512, 64), "c_concat": randn(1, 20, 3, 9, 10)}
#: A reference image's frame and two of the video.
EVEN, ODD = randn(1, 16, 3, 10, 10), randn(1, 20, 3, 9, 10)
ANIMATE = {**TEXT, "c_concat": randn(1, 20, 3, 10, 10), "clip_fea": randn(1, 257, 1280)}
#: Name -> (ComfyUI's module, latent, arguments by ComfyUI's names).
VARIANTS = {
    "sd3.5 medium": (lambda: sd3("rms", [0, 1]), randn(1, 16, 11, 14), {**TEXT, "y": randn(1, 32)}),
    "sd3 without norms of queries": (
        lambda: sd3(None, []),
        randn(1, 16, 12, 14),
        {**TEXT, "y": randn(1, 32)},
    ),
    "pixart alpha": (
        lambda: pixart(micro_condition=True),
        randn(1, 4, 40, 48),
        TEXT,
    ),
    "pixart sigma with its positions": (
        lambda: pixart(micro_condition=False, pe_interpolation=2),
        randn(1, 4, 64, 64),
        TEXT,
    ),
    "hunyuan-dit 1.1": (lambda: hunyuan_dit(size_cond=True, use_style_cond=True), randn(1, 4, 40, 48), T5),
    "hunyuan-dit, long prompts": (
        hunyuan_dit,
        randn(1, 4, 24, 32),
        {
            "c_crossattn": randn(1, 120, 64),
            "encoder_hidden_states_t5": randn(1, 300, 64),
            "text_embedding_mask": hidden_rows(120, 100),
            "text_embedding_mask_t5": hidden_rows(300, 30),  # of the first 44 ComfyUI hides none
            "image_meta_size": T5["image_meta_size"],
        },
    ),
    "hunyuan-dit, a long prompt of CLIP": (
        hunyuan_dit,
        randn(1, 4, 24, 32),
        {**T5, "c_crossattn": randn(1, 90, 64), "text_embedding_mask": hidden_rows(90, 80)},
    ),
    "cogvideox 1.5": (lambda: cogvideox(in_channels=16), VIDEO, TEXT),
    "cogvideox 1.5 image to video": (
        lambda: cogvideox(in_channels=32, ofs_embed_dim=128),
        VIDEO,
        {**TEXT, "c_concat": randn(1, 16, 3, 9, 10), "ofs": torch.full((1,), 2.0)},
    ),
    "wan 2.1 image to video": (lambda: wan("i2v"), VIDEO, {**IMAGE, "clip_fea": randn(1, 257, 1280)}),
    "wan 2.1 image to video without features": (lambda: wan("i2v"), VIDEO, IMAGE),
    "kandinsky 5 image to video": (
        kandinsky5,
        randn(1, 16, 3, 8, 10),
        {
            **TEXT,
            "y": randn(1, 32),
            "c_concat": (randn(1, 17, 3, 8, 10) > 0).float(),
            "time_dim_replace": randn(1, 16, 1, 8, 10),
        },
    ),
    "kandinsky 5 image to image": (
        lambda: kandinsky5(rope_scale_factor=(1.0, 1.0, 1.0)),
        randn(1, 16, 1, 8, 10),
        {**TEXT, "y": randn(1, 32), "c_concat": (randn(1, 17, 1, 8, 10) > 0).float()},
    ),
    "kandinsky 5, many frames and a long prompt": (
        kandinsky5,
        randn(1, 16, 140, 2, 4),
        {
            "c_crossattn": randn(1, 1100, 64),
            "y": randn(1, 32),
            "c_concat": torch.zeros(1, 17, 140, 2, 4),
        },
    ),
    "kandinsky 5, a wide video": (
        kandinsky5,
        randn(1, 16, 2, 4, 270),
        {**TEXT, "y": randn(1, 32), "c_concat": torch.zeros(1, 17, 2, 4, 270)},
    ),
    "flux.2 klein": (klein, randn(1, 128, 7, 8), TEXT),
    "ideogram 4 with hidden rows": (
        ideogram4,
        randn(1, 128, 7, 8),
        {**TEXT, "attention_mask": hidden_rows(12, 9)},
    ),
    "ideogram 4 without a prompt": (ideogram4, randn(1, 128, 7, 8), {}),
    "wan 2.2 image to video": (lambda: wan("t2v"), VIDEO, IMAGE),
    "wan 2.2 animate": (
        animate,
        EVEN,
        {**ANIMATE, "pose_latents": randn(1, 16, 2, 10, 10), "face_pixel_values": randn(1, 3, 5, 512, 512)},
    ),
    "wan 2.2 animate, the last face and pose before the last frame": (
        animate,
        EVEN,
        {**ANIMATE, "pose_latents": randn(1, 16, 1, 10, 10), "face_pixel_values": randn(1, 3, 1, 512, 512)},
    ),
    "wan 2.2 animate without face and pose": (animate, randn(1, 16, 3, 9, 10), {**TEXT, "c_concat": ODD}),
}
#: Name -> what a file has besides the module's weights: the table of positions of 1024 pixels.
FURTHER = {"pixart sigma with its positions": {"pos_embed": torch.zeros(1, 4096, 144)}}
#: Families whose ComfyUI module takes the noise level itself, not a thousand times it.
TAKE_SIGMA = ("flux2", "ideogram4")


def weights(module):
    """Random ones that keep activations near 1; what else a file has as it is, but for SD3's positions, whose
    memory ComfyUI leaves as it was."""
    values = dict(module.named_parameters())
    values |= {name: value for name, value in module.named_buffers() if name == "pos_embed"}
    return module.state_dict() | {
        name: randn(*value.shape) * value[0].numel() ** -0.5
        if value.ndim > 1
        else 1.0 + 0.1 * randn(*value.shape)
        for name, value in values.items()
    }


@pytest.mark.parametrize("name", VARIANTS)
@torch.inference_mode()
def test_one_call_is_comfyuis(name, tmp_path, monkeypatch):
    if name == "kandinsky 5 image to image":
        monkeypatch.setattr(kandinsky5_family, "LITE_IMAGE", 256)  # which is told by its width
    build, latent, cond = VARIANTS[name]
    module = build().eval()
    module.load_state_dict(weights(module))
    save_file(module.state_dict() | FURTHER.get(name, {}), tmp_path / "variant.safetensors")
    checkpoint = open_checkpoint(str(tmp_path / "variant.safetensors"))
    checkpoint.load(range(checkpoint.block_count), torch.float32, torch.device("cpu"))
    family, config, ours = checkpoint.family, checkpoint.config, checkpoint.transformer
    grid = TokenGrid(tuple(latent.shape[1:]), family.latent.patch(config))
    assert (
        set(cond) <= set(family.conditioning.accepted)
        and family.conditioning.refusal(config, grid, cond) is None
    )
    if family.io.prepare:
        family.io.prepare(ours, grid)
    time = family.noise.schedule(config).timestep(SIGMA) if family.noise.schedule else SIGMA
    out = family.io.output(
        model_output(
            ours,
            family.io.arguments(
                config,
                grid,
                family.io.of_latent(latent, grid),
                time,
                {key: value.clone() for key, value in cond.items()},
            ),
        ),
        grid,
    )

    timestep = (
        time[None].float()
        if family.noise.schedule
        else SIGMA[None] * (1 if family.name in TAKE_SIGMA else 1000)
    )
    further = {key: value.clone() for key, value in cond.items() if key not in ("c_crossattn", "c_concat")}
    want = module(
        torch.cat([latent, cond["c_concat"]], dim=1) if "c_concat" in cond else latent,
        timestep,
        cond["c_crossattn"].clone() if "c_crossattn" in cond else None,
        **further,
    )
    assert ((grid.to_latent(out) - want).abs().max() / want.std()).item() < 1e-4
