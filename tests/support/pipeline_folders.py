"""Tiny diffusers pipelines as folders, with random weights and tokenizers that know bytes."""

import json
from pathlib import Path

import diffusers
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

#: Width of every text encoder.
WIDTH = 16
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_DECODER = dict(
    hidden_size=WIDTH,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=300,
    max_position_embeddings=4096,
)
_DC = dict(
    latent_channels=32,
    attention_head_dim=2,
    encoder_block_types=("ResBlock",) * 6,
    decoder_block_types=("ResBlock",) * 6,
    encoder_block_out_channels=(8, 8, 16, 16, 32, 32),
    decoder_block_out_channels=(8, 8, 16, 16, 32, 32),
    encoder_layers_per_block=(1,) * 6,
    decoder_layers_per_block=(1,) * 6,
    encoder_qkv_multiscales=((),) * 6,
    decoder_qkv_multiscales=((),) * 6,
    scaling_factor=0.41407,
)
_KL = dict(
    block_out_channels=(8, 8, 8, 8),
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    layers_per_block=1,
    norm_num_groups=4,
)
_VISION = dict(
    depth=2,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    out_hidden_size=WIDTH,
    deepstack_visual_indexes=[0],
    num_position_embeddings=16,
)


def tokenizer(
    cls=transformers.PreTrainedTokenizerFast,
    specials=("<pad>", "<bos>", "<eos>"),
    begin: bool = True,
    **options,
):
    """Bytes behind the special tokens."""
    vocabulary = {token: i for i, token in enumerate((*specials, *_BYTES))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if begin:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", vocabulary["<bos>"])]
        )
    return cls(
        tokenizer_object=made,
        pad_token=specials[0],
        bos_token="<bos>" if begin else None,
        eos_token=specials[-1],
        **options,
    )


def _qwen3_vl(layers: int):
    """(text encoder, processor)"""
    specials = (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    )
    ids = {
        f"{name}_token_id": specials.index(f"<|{token}|>")
        for name, token in (
            ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
            ("image", "image_pad"),
            ("video", "video_pad"),
        )
    }
    text = {
        **_DECODER,
        "num_hidden_layers": layers,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    encoder = transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(text_config=text, vision_config=_VISION, **ids)
    )
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content "
        "}}{% else %}{{ m.content[0].text }}{% endif %}<|im_end|>\n{% endfor %}{% if "
        "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    words = tokenizer(transformers.Qwen2Tokenizer, specials, begin=False)
    pytest.importorskip("torchvision", reason="Qwen3VLVideoProcessor needs torchvision")
    processor = transformers.Qwen3VLProcessor(
        transformers.Qwen2VLImageProcessor(),
        words,
        transformers.Qwen3VLVideoProcessor(),
        chat_template=template,
    )
    return encoder, processor


def _t5(cls=transformers.T5EncoderModel, config=transformers.T5Config):
    return cls(config(vocab_size=300, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=2))


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
        transformers.Gemma2Model(transformers.Gemma2Config(**_DECODER)),
        diffusers.AutoencoderDC(**_DC),
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
    encoder = _t5(transformers.UMT5EncoderModel, transformers.UMT5Config)
    return diffusers.AuraFlowPipeline(
        tokenizer(begin=False),
        encoder,
        diffusers.AutoencoderKL(**_KL, scaling_factor=0.13025),
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
    encoder = transformers.GlmModel(transformers.GlmConfig(**_DECODER, pad_token_id=0))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
    )
    return diffusers.CogView4Pipeline(
        tokenizer(),
        encoder,
        diffusers.AutoencoderKL(**_KL, use_quant_conv=False, use_post_quant_conv=False),
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
        _t5(),
        diffusers.AutoencoderKL(**_KL),
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
        _t5(),
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
    encoder = transformers.Qwen3Model(transformers.Qwen3Config(**_DECODER))
    return diffusers.OvisImagePipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        diffusers.AutoencoderKL(**_KL, scaling_factor=0.3611, shift_factor=0.1159),
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
    encoder = transformers.Gemma2Model(transformers.Gemma2Config(**_DECODER))
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
    encoder = _t5(transformers.UMT5EncoderModel, transformers.UMT5Config)
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
    encoder, processor = _qwen3_vl(2)
    vae = diffusers.AutoencoderKLQwenImage21(base_dim=8, decoder_base_dim=8, num_res_blocks=1)
    return diffusers.QwenImage21Pipeline(
        diffusers.FlowMatchEulerDiscreteScheduler(), vae, encoder, processor, transformer
    )


def _flux3(folder: Path):
    """There is no pipeline class of FLUX.3: parts, and an index that names the blocks."""
    encoder, processor = _qwen3_vl(33)
    vae = diffusers.AutoencoderKLFlux2(**_KL, latent_channels=32)
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
