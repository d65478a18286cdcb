"""Krea 2, with reference images: 28 blocks over one stream of text and image with grouped queries; the
prompt is a stack of the text encoder's layers, fused inside the model."""

import torch
from diffusers.models.transformers import transformer_krea2 as theirs

from .blocks import JOINED, Blocks
from .common import references
from .common.fewer_passes import apply_rotary_emb, rms_norm
from .common.grouped_attention import grouped_attention
from .common.replaced_classes import replace_classes
from .common.request_arguments import once
from .config_values import constant
from .family import BF16_OR_FP16, Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import LAYERS, Layout, blocks_of, under


def read_references(cond):
    """Return ``cond`` with the references that ComfyUI's model reads: none where no method is set."""
    return cond if "ref_latents_method" in cond else {}


def context_tokens(config, grid, cond):
    """Count the tokens of the references that are read."""
    return references.token_count(config, grid, read_references(cond))


def forward_args(config, grid, tokens, sigma, cond):
    """Return the arguments of the forward. Latents travel packed 2x2, references after; positions are
    (number, y, x) and zeros for text. The prompt's layers come side by side. Where references are at timestep
    0, as style LoRAs were trained with, timesteps of them follow."""
    text = cond["c_crossattn"].unflatten(-1, (config["num_text_layers"], -1))
    read = read_references(cond)

    def positions():
        image = references.all_positions(grid, read, "index", tokens.device)
        return torch.cat([image.new_zeros(text.shape[1], 3), image])

    timestep = sigma.expand(tokens.shape[0])
    if references.references(read) and references.method(read, "index") == references.AT_ZERO:
        timestep = torch.cat([timestep, torch.zeros_like(timestep)])
    return dict(
        hidden_states=torch.cat([tokens, *references.tokens(grid, read)], dim=1),
        encoder_hidden_states=text,
        timestep=timestep,
        position_ids=once(cond, "positions", positions),
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. ComfyUI runs frames as a batch; the model itself makes one
    frame."""
    wrong = references.refusal(config, grid, cond)
    if wrong or grid.counts[0] == 1:
        return wrong
    return f"the latent has {grid.counts[0]} frames, but Krea 2 makes one image; use a batch instead."


def config_from_shapes(shapes):
    """Return the arguments of Krea2Transformer2DModel; RoPE axes are (4, 6, 6)/16 of the head size."""
    head = shapes["blocks.0.attn.qknorm.qnorm.scale"][0]
    text_head = shapes["txtfusion.layerwise_blocks.0.attn.qknorm.qnorm.scale"][0]
    axis = 6 * (head // 16)
    text = "txtfusion.layerwise_blocks.0"
    return dict(
        in_channels=shapes["first.weight"][1],
        num_layers=blocks_of(shapes, "blocks"),
        attention_head_dim=head,
        num_attention_heads=shapes["blocks.0.attn.wq.weight"][0] // head,
        num_key_value_heads=shapes["blocks.0.attn.wk.weight"][0] // head,
        intermediate_size=shapes["blocks.0.mlp.up.weight"][0],
        timestep_embed_dim=shapes["tmlp.0.weight"][1],
        text_hidden_dim=shapes[f"{text}.prenorm.scale"][0],
        num_text_layers=shapes["txtfusion.projector.weight"][1],
        text_num_attention_heads=shapes[f"{text}.attn.wq.weight"][0] // text_head,
        text_num_key_value_heads=shapes[f"{text}.attn.wk.weight"][0] // text_head,
        text_intermediate_size=shapes[f"{text}.mlp.up.weight"][0],
        num_layerwise_text_blocks=blocks_of(shapes, "txtfusion.layerwise_blocks"),
        num_refiner_text_blocks=blocks_of(shapes, "txtfusion.refiner_blocks"),
        axes_dims_rope=(head - 2 * axis, axis, axis),
    )


BLOCK = {
    "prenorm.scale": "norm1.weight",
    "postnorm.scale": "norm2.weight",
    "attn.wq": "attn.to_q",
    "attn.wk": "attn.to_k",
    "attn.wv": "attn.to_v",
    "attn.gate": "attn.to_gate",
    "attn.wo": "attn.to_out.0",
    "attn.qknorm.qnorm.scale": "attn.norm_q.weight",
    "attn.qknorm.knorm.scale": "attn.norm_k.weight",
    "mlp.gate": "ff.gate",
    "mlp.up": "ff.up",
    "mlp.down": "ff.down",
}
LAYOUT = Layout(
    signature=(
        "first.weight",
        "tmlp.0.weight",
        "tproj.1.weight",
        "txtfusion.projector.weight",
        "txtfusion.layerwise_blocks.0.prenorm.scale",
        "blocks.0.mod.lin",
        "last.linear.weight",
    ),
    config=config_from_shapes,
    reshaped=("transformer_blocks.{}.scale_shift_table",),
    unread={f"last.{name}.weight": "an image that some repacks carry" for name in ("down", "up")},
    names={
        **under("blocks.{}", "transformer_blocks.{}", BLOCK),
        **under("txtfusion.layerwise_blocks.{}", "text_fusion.layerwise_blocks.{}", BLOCK),
        **under("txtfusion.refiner_blocks.{}", "text_fusion.refiner_blocks.{}", BLOCK),
        "first": "img_in",
        **under("tmlp", "time_embed", LAYERS),
        "tproj.1": "time_mod_proj",
        "txtfusion.projector": "text_fusion.projector",
        "txtmlp.0.scale": "txt_in.norm.weight",
        "txtmlp.1": "txt_in.linear_1",
        "txtmlp.3": "txt_in.linear_2",
        "blocks.{}.mod.lin": "transformer_blocks.{}.scale_shift_table",
        "last.norm.scale": "final_layer.norm.weight",
        "last.linear": "final_layer.linear",
        "last.modulation.lin": "final_layer.scale_shift_table",
    },
)


class Norm(theirs.Krea2RMSNorm):
    """diffusers' norm with its multiplier in float32, as in ComfyUI: diffusers loads its weight so, which is
    stored without the 1, and in bf16 the sum would keep 8 bits."""

    def forward(self, hidden_states):
        return self.wide(hidden_states).to(hidden_states.dtype)

    def wide(self, x):
        """Return the norm of x in float32."""
        return rms_norm(x.float(), (self.dim,), self.multiplier(), self.eps)

    def multiplier(self):
        """Return what it multiplies by, in float32."""
        return self.weight.float() + 1.0

    def plain(self, x):
        """Return the norm of x without its multiplier, in one pass."""
        return rms_norm(x, (self.dim,), None, self.eps)


class Rotary(theirs.Krea2RotaryPosEmbed):
    """diffusers' tables, and which tokens are of references: those whose number is not 0."""

    def forward(self, ids):
        return *super().forward(ids), ids[:, 0] > 0


class Krea2Block(theirs.Krea2TransformerBlock):
    """diffusers' block, whose tokens of references may have a modulation of their own: ``temb`` of (2B, 1,
    6 x width) has theirs after the others'. comfy/ldm/krea2/model.py (SingleStreamBlock) cuts at an index,
    which a rank's own tokens do not have. Passes over activations are fewer than diffusers': a norm's
    multiplier and the modulation are one, made in float32."""

    norm1: Norm
    norm2: Norm

    def forward(self, hidden_states, temb, image_rotary_emb, attention_mask=None):
        tables = image_rotary_emb[:2]
        of_references = image_rotary_emb[-1]
        has_both = temb.shape[0] == 2 * hidden_states.shape[0]
        if torch.compiler.is_compiling() and not has_both:
            return super().forward(hidden_states, temb, tables, attention_mask)
        modulation = self._modulation(temb).to(hidden_states.dtype)
        part = references.of_tokens(modulation, of_references if has_both else None)
        x = torch.addcmul(part(1), self.norm1.plain(hidden_states), part(0))
        x = self.attn(x, attention_mask=attention_mask, image_rotary_emb=tables)
        hidden_states = torch.addcmul(hidden_states, x, part(2))
        x = self.ff(torch.addcmul(part(4), self.norm2.plain(hidden_states), part(3)))
        return torch.addcmul(hidden_states, x, part(5))

    def _modulation(self, temb):
        """Return multiplier, shift and gate of attention, then of the MLP, (B or 2B, 6, width) in float32.
        The norms' own multipliers are in them."""
        found = (temb.squeeze(1).unflatten(-1, (6, -1)) + self.scale_shift_table).float()
        scale, shift, gate, ff_scale, ff_shift, ff_gate = found.unbind(1)
        scale = (1.0 + scale) * self.norm1.multiplier()
        ff_scale = (1.0 + ff_scale) * self.norm2.multiplier()
        return torch.stack([scale, shift, gate, ff_scale, ff_shift, ff_gate], dim=1)


class FinalLayer(theirs.Krea2FinalLayer):
    """diffusers' layer, by the timestep of the latent's tokens: references' outputs are read by nobody."""

    def forward(self, hidden_states, temb):
        return super().forward(hidden_states, temb[: hidden_states.shape[0]])


#: diffusers' class -> ours.
REPLACED = {
    theirs.Krea2RMSNorm: Norm,
    theirs.Krea2RotaryPosEmbed: Rotary,
    theirs.Krea2TransformerBlock: Krea2Block,
    theirs.Krea2FinalLayer: FinalLayer,
}


def normed_and_turned(norm, x, tables):
    """Normalize x (B, S, H, D) and turn it by its positions, if there are any; both in one float32 copy."""
    if tables is None:
        return norm(x)
    if torch.compiler.is_compiling():
        return apply_rotary_emb(norm(x), tables, sequence_dim=1)
    return apply_rotary_emb(norm.wide(x), tables, sequence_dim=1).to(x.dtype)


class Processor(theirs.Krea2AttnProcessor):
    """diffusers' processor with keys and values as they are (grouped_attention)."""

    def __call__(self, attn, hidden_states, attention_mask=None, image_rotary_emb=None):
        query = attn.to_q(hidden_states).unflatten(-1, (attn.num_heads, attn.head_dim))
        key = attn.to_k(hidden_states).unflatten(-1, (attn.num_kv_heads, attn.head_dim))
        value = attn.to_v(hidden_states).unflatten(-1, (attn.num_kv_heads, attn.head_dim))
        gate = attn.to_gate(hidden_states)
        query = normed_and_turned(attn.norm_q, query, image_rotary_emb)
        key = normed_and_turned(attn.norm_k, key, image_rotary_emb)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = grouped_attention(query, key, value, attention_mask)
        return attn.to_out[0](out.transpose(1, 2).flatten(2) * torch.sigmoid(gate))


def patch_module(transformer, config):
    """Patch the transformer: norms whose multiplier is not rounded, references at timestep 0, grouped keys
    and values."""
    replace_classes(transformer, REPLACED)
    text = transformer.text_fusion
    for block in (*text.layerwise_blocks, *text.refiner_blocks, *transformer.transformer_blocks):
        block.attn.set_processor(Processor())


FAMILY = Family(
    name="krea2",
    transformer="Krea2Transformer2DModel",
    latent=Latent(channels=lambda config: config["in_channels"] // 4, patch=constant(1, 2, 2)),
    io=ModelIO(forward_args, takes_tokens=True),
    blocks=Blocks(
        output_layer="final_layer",
        lists={"transformer_blocks": JOINED},
        text_position="first",
        per_token={"image_rotary_emb": ("joint", 0)},
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "attention_mask", "ref_latents", "ref_latents_method"),
        widths=lambda config: {"c_crossattn": config["num_text_layers"] * config["text_hidden_dim"]},
        ignored=("attention_mask",),
        context_tokens=context_tokens,
        refusal=refusal,
    ),
    build=Build(dtypes=BF16_OR_FP16, patch_module=patch_module),
    cache=Cache(
        prompt_modules=("text_fusion", "txt_in", "rotary_emb"),
        step_modules=("time_embed", "time_mod_proj"),
        image_modules=("img_in",),
        token_modules=("img_in",),
    ),
    layout=LAYOUT,
)
