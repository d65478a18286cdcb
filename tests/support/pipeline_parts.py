"""Tiny text encoders, tokenizers and settings of VAEs, of which several pipelines have one."""

import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

#: Width of every text encoder.
WIDTH = 16
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
DECODER = dict(
    hidden_size=WIDTH,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=300,
    max_position_embeddings=4096,
)
DC = dict(
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
KL = dict(
    block_out_channels=(8, 8, 8, 8),
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    layers_per_block=1,
    norm_num_groups=4,
)
VISION = dict(
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


def qwen3_vl(layers: int):
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
        **DECODER,
        "num_hidden_layers": layers,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    encoder = transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(text_config=text, vision_config=VISION, **ids)
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


def t5(cls=transformers.T5EncoderModel, config=transformers.T5Config):
    return cls(config(vocab_size=300, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=2))
