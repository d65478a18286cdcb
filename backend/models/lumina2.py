"""Lumina Image 2.0 of Alpha-VLLM: two blocks over the image, then 26 over one stream of text and image, with
grouped queries; two more refine the prompt."""

import torch
from diffusers.models.transformers import transformer_lumina2 as theirs
from torch import nn

from .blocks import IMAGE_ONLY, JOINED, Blocks
from .common.fewer_passes import apply_rotary_emb
from .common.grouped_attention import grouped_attention
from .common.tensor_plans import COMMON
from .config_values import entries
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import MLP, Layout, blocks_of, under
from .latent_tokens import negated_tokens

#: Most tokens of a prompt, and most tokens along a side of the image, in the position tables; diffusers' own
#: end at 300 and 512.
LENGTHS = (4096, 1024, 1024)


class Tables(nn.Module):
    """Rotary tables of a prompt and an image, from diffusers' tables of the axes (``owner``, in a tuple: no
    submodule)."""

    def __init__(self, owner):
        super().__init__()
        self.owner = (owner,)

    def forward(self, batch, text, rows, columns, device):
        """Return (B, text, D), (B, rows * columns, D) and both in one, made on the host and copied once."""
        words = torch.arange(text)[:, None].expand(-1, 3) * torch.tensor([1, 0, 0])
        image = torch.cartesian_prod(torch.tensor([text]), torch.arange(rows), torch.arange(columns))
        positions = torch.cat([words, image]).expand(batch, -1, -1)
        # blocks multiply by these in their own precision: GPUs of consumers have 1/64 of float64
        whole = self.owner[0]._get_freqs_cis(positions).to(device, torch.complex64)
        return whole[:, :text], whole[:, text:], whole


class Rope(theirs.Lumina2RotaryPosEmbed):
    """diffusers' module for prompts of which every token is seen: it reads no lengths from the device."""

    tables: nn.Module

    def forward(self, hidden_states, attention_mask):
        batch, text = attention_mask.shape
        p = self.patch_size
        cells = hidden_states.unflatten(3, (-1, p)).unflatten(2, (-1, p))
        rows = cells.shape[2]
        columns = cells.shape[4]
        tokens = cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        tables = self.tables(batch, text, rows, columns, hidden_states.device)
        return tokens, *tables, [text] * batch, [text + rows * columns] * batch


class Processor:
    """diffusers' processor with keys and values as they are (grouped_attention)."""

    def __call__(
        self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None
    ):
        query = attn.to_q(hidden_states).unflatten(-1, (attn.heads, -1))
        size = query.shape[-1]
        key = attn.norm_k(attn.to_k(encoder_hidden_states).unflatten(-1, (-1, size)))
        value = attn.to_v(encoder_hidden_states).unflatten(-1, (-1, size))
        query = attn.norm_q(query)
        if image_rotary_emb is not None:
            query = apply_rotary_emb(query, image_rotary_emb, use_real=False)
            key = apply_rotary_emb(key, image_rotary_emb, use_real=False)
        if attention_mask is not None:
            attention_mask = attention_mask.bool()[:, None, None]
        query, key, value = (x.to(value.dtype).transpose(1, 2) for x in (query, key, value))
        out = grouped_attention(query, key, value, attention_mask, attn.scale)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2)))


def patch_module(transformer, config):
    """Patch the transformer: longer position tables, since ComfyUI computes any position; rotary tables made
    once a request; grouped keys and values."""
    for block in (*transformer.context_refiner, *transformer.noise_refiner, *transformer.layers):
        block.attn.set_processor(Processor())
    rope = transformer.rope_embedder
    rope.freqs_cis = rope._precompute_freqs_cis(rope.axes_dim, LENGTHS, rope.theta)
    rope.__class__ = Rope
    rope.tables = Tables(rope)


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward. The timestep counts from noise (0) to image (1). ComfyUI's model
    reads padding of the prompt too."""
    text = cond["c_crossattn"]
    return dict(
        hidden_states=grid.pad(latent),
        timestep=(1.0 - sigma).expand(latent.shape[0]),
        encoder_hidden_states=text,
        encoder_attention_mask=torch.ones(text.shape[:2], dtype=torch.int32, device=text.device),
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. Position tables have an end."""
    needed = (cond["c_crossattn"].shape[1], *grid.counts[1:])
    if all(a < b for a, b in zip(needed, LENGTHS)):
        return None
    return (
        f"{needed[0]} tokens of text and {needed[1]} x {needed[2]} tokens are more than the {LENGTHS} "
        f"that Lumina 2 counts; shorten the prompt or make the latent smaller."
    )


def config_from_shapes(shapes):
    """Return the arguments of Lumina2Transformer2DModel; RoPE has three equal axes."""
    dim = shapes["layers.0.attention_norm1.weight"][0]
    head = shapes["layers.0.attention.q_norm.weight"][0]
    axis = head // 3 // 2 * 2
    heads = dim // head
    return dict(
        patch_size=2,
        in_channels=shapes["x_embedder.weight"][1] // 4,
        hidden_size=dim,
        num_layers=blocks_of(shapes, "layers"),
        num_refiner_layers=blocks_of(shapes, "noise_refiner"),
        num_attention_heads=heads,
        num_kv_heads=(shapes["layers.0.attention.qkv.weight"][0] // head - heads) // 2,
        axes_dim_rope=(head - 2 * axis, axis, axis),
        cap_feat_dim=shapes["cap_embedder.0.weight"][0],
    )


REFINER = {
    "attention_norm1": "norm1",
    "attention.qkv": "attn.to_q attn.to_k attn.to_v",
    "attention.out": "attn.to_out.0",
    "attention.q_norm": "attn.norm_q",
    "attention.k_norm": "attn.norm_k",
    "attention_norm2": "norm2",
    "feed_forward.w1": "feed_forward.linear_1",
    "feed_forward.w2": "feed_forward.linear_2",
    "feed_forward.w3": "feed_forward.linear_3",
}
MODULATED = REFINER | {"attention_norm1": "norm1.norm", "adaLN_modulation.1": "norm1.linear"}
LAYOUT = Layout(
    signature=(
        "x_embedder.weight",
        "cap_embedder.1.weight",
        "noise_refiner.0.attention.qkv.weight",
        "layers.0.attention.qkv.weight",
        "layers.0.adaLN_modulation.1.weight",
        "final_layer.adaLN_modulation.1.weight",
    ),
    absent=("x_pad_token", "clip_text_pooled_proj.0.weight"),
    config=config_from_shapes,
    names={
        **under("noise_refiner.{}", "noise_refiner.{}", MODULATED),
        **under("context_refiner.{}", "context_refiner.{}", REFINER),
        **under("layers.{}", "layers.{}", MODULATED),
        **under("t_embedder", "time_caption_embed.timestep_embedder", MLP),
        "cap_embedder.0": "time_caption_embed.caption_embedder.0",
        "cap_embedder.1": "time_caption_embed.caption_embedder.1",
        "final_layer.linear": "norm_out.linear_2",
        "final_layer.adaLN_modulation.1": "norm_out.linear_1",
    },
    unread={"norm_final.weight": "a norm that nothing uses"},
)
STEP_MODULES = (
    "time_caption_embed.time_proj",
    "time_caption_embed.timestep_embedder",
    "norm_out.silu",
    "norm_out.linear_1",
)
FAMILY = Family(
    name="lumina2",
    transformer="Lumina2Transformer2DModel",
    latent=Latent(frames=False),
    io=ModelIO(arguments=forward_args, output=negated_tokens),
    blocks=Blocks(
        output_layer="norm_out",
        lists={"noise_refiner": IMAGE_ONLY, "layers": JOINED},
        text_position="first",
        per_token={"image_rotary_emb": ("joint", 1)},
        head_size=lambda config: config["hidden_size"] // config["num_attention_heads"],
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "num_tokens", "attention_mask", "clip_text_pooled"),
        widths=entries(c_crossattn="cap_feat_dim"),
        ignored=("num_tokens", "attention_mask", "clip_text_pooled"),
        refusal=refusal,
    ),
    cache=Cache(
        modulation=("norm1.linear",),
        prompt_modules=(
            "time_caption_embed.caption_embedder",
            "context_refiner.[0-9]",
            "rope_embedder.tables",
        ),
        step_modules=STEP_MODULES,
        image_modules=("x_embedder",),
        token_modules=("x_embedder",),
    ),
    build=Build(patch_module=patch_module),
    tensor_plan={
        "*.feed_forward.linear_1": "colwise",
        "*.feed_forward.linear_3": "colwise",
        "*.feed_forward.linear_2": "rowwise",
        **COMMON,
    },
    layout=LAYOUT,
)
