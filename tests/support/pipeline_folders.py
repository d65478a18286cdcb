"""Tiny diffusers pipelines as folders, with random weights and tokenizers that know bytes."""

import json
from pathlib import Path

import diffusers
import torch
import transformers
from pipeline_parts import DC, DECODER, KL, WIDTH, qwen3_vl, t5, tokenizer


def _sana() -> diffusers.DiffusionPipeline:
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=32,
        out_channels=32,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=WIDTH,
        sample_size=4,
        patch_size=1,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return diffusers.SanaPipeline(
        tokenizer(),
        transformers.Gemma2Model(transformers.Gemma2Config(**DECODER)),
        diffusers.AutoencoderDC(**DC),
        transformer,
        scheduler,
    )


def _aura_flow():
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=2,
        num_single_dit_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=256,
    )
    encoder = t5(transformers.UMT5EncoderModel, transformers.UMT5Config)
    return diffusers.AuraFlowPipeline(
        tokenizer(begin=False),
        encoder,
        diffusers.AutoencoderKL(**KL, scaling_factor=0.13025),
        transformer,
        diffusers.FlowMatchEulerDiscreteScheduler(shift=1.73),
    )


def _cogview4():
    transformer = diffusers.CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        text_embed_dim=WIDTH,
        out_channels=4,
        time_embed_dim=16,
        condition_dim=8,
    )
    encoder = transformers.GlmModel(transformers.GlmConfig(**DECODER, pad_token_id=0))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
    )
    return diffusers.CogView4Pipeline(
        tokenizer(),
        encoder,
        diffusers.AutoencoderKL(**KL, use_quant_conv=False, use_post_quant_conv=False),
        transformer,
        scheduler,
    )


def _cogview3_plus():
    transformer = diffusers.CogView3PlusTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=4,
        text_embed_dim=WIDTH,
        out_channels=4,
        time_embed_dim=16,
        condition_dim=8,
        pos_embed_max_size=16,
        sample_size=8,
    )
    return diffusers.CogView3PlusPipeline(
        tokenizer(begin=False),
        t5(),
        diffusers.AutoencoderKL(**KL),
        transformer,
        diffusers.CogVideoXDDIMScheduler(),
    )


def _mochi():
    transformer = diffusers.MochiTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        pooled_projection_dim=16,
        text_embed_dim=WIDTH,
        time_embed_dim=16,
    )
    vae = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4,
        layers_per_block=(1,) * 5,
        add_attention_block=(False,) * 5,
    )
    return diffusers.MochiPipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        vae,
        t5(),
        tokenizer(begin=False),
        transformer,
    )


def _ovis_image():
    transformer = diffusers.OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    words = tokenizer(begin=False)
    words.chat_template = "{% for m in messages %}<bos>{{ m.content }}<eos>{% endfor %}"
    encoder = transformers.Qwen3Model(transformers.Qwen3Config(**DECODER))
    return diffusers.OvisImagePipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        diffusers.AutoencoderKL(**KL, scaling_factor=0.3611, shift_factor=0.1159),
        encoder,
        words,
        transformer,
    )


def _sana_video():
    transformer = diffusers.SanaVideoTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=WIDTH,
        sample_size=8,
        rope_max_seq_len=32,
    )
    encoder = transformers.Gemma2Model(transformers.Gemma2Config(**DECODER))
    return diffusers.SanaVideoPipeline(
        tokenizer(),
        encoder,
        diffusers.AutoencoderKLWan(base_dim=8, num_res_blocks=1),
        transformer,
        diffusers.FlowMatchEulerDiscreteScheduler(shift=8.0),
    )


def _skyreels_v2():
    transformer = diffusers.SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=16,
        out_channels=16,
        text_dim=WIDTH,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    encoder = t5(transformers.UMT5EncoderModel, transformers.UMT5Config)
    return diffusers.SkyReelsV2Pipeline(
        tokenizer(begin=False),
        encoder,
        transformer,
        diffusers.AutoencoderKLWan(base_dim=8, num_res_blocks=1),
        diffusers.FlowMatchEulerDiscreteScheduler(shift=8.0),
    )


def _qwen_image21():
    transformer = diffusers.QwenImage21Transformer2DModel(
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    encoder, processor = qwen3_vl(2)
    vae = diffusers.AutoencoderKLQwenImage21(base_dim=8, decoder_base_dim=8, num_res_blocks=1)
    return diffusers.QwenImage21Pipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), vae, encoder, processor, transformer
    )


def _flux3(folder: Path):
    """There is no pipeline class of FLUX.3: parts, and an index that names the blocks."""
    encoder, processor = qwen3_vl(33)
    vae = diffusers.AutoencoderKLFlux2(**KL, latent_channels=32)
    vae.bn.running_mean.normal_()
    vae.bn.running_var.uniform_(0.5, 2.0)
    transformer = diffusers.Flux3Transformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=8 * WIDTH,
        axes_dims_rope=(4, 4, 4, 4),
    )
    for name, part in {
        "text_encoder": encoder,
        "tokenizer": processor,
        "vae": vae,
        "transformer": transformer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=6.93),
    }.items():
        part.save_pretrained(folder / name)
    (folder / "modular_model_index.json").write_text(
        json.dumps({"_class_name": "Flux3ModularPipeline", "_blocks_class_name": "Flux3AutoBlocks"})
    )


PIPELINES = {
    "SanaPipeline": _sana,
    "AuraFlowPipeline": _aura_flow,
    "CogView4Pipeline": _cogview4,
    "SkyReelsV2Pipeline": _skyreels_v2,
    "QwenImage21Pipeline": _qwen_image21,
    "CogView3PlusPipeline": _cogview3_plus,
    "MochiPipeline": _mochi,
    "OvisImagePipeline": _ovis_image,
    "SanaVideoPipeline": _sana_video,
}


def write(folder: Path, name: str) -> Path:
    """The folder of a pipeline, or of FLUX.3's blocks: Flux3ModularPipeline."""
    torch.manual_seed(0)
    if name == "Flux3ModularPipeline":
        _flux3(folder)
    else:
        PIPELINES[name]().save_pretrained(folder)
    return folder
