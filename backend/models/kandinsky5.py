"""Kandinsky 5 of Kandinsky Lab, image and video (lite, pro): 32 to 60 blocks after two that refine the
prompt at every step; it is read through cross-attention.

Attention is over every token, as in ComfyUI, also where a folder's configuration asks for the sparse one
(NABLA), which has the same weights: no file says so.
"""

from operator import itemgetter

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_kandinsky as theirs

from .blocks import APART, Blocks
from .common import references
from .common.timestep_precision import round_input
from .config_values import entries
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import Layout, blocks_of

#: Rows of the position tables of an axis and of text; diffusers' own have 128 and 1024.
MAX_SIDE_TOKENS, MAX_TEXT_TOKENS = 1024, 8192
#: Latent pixels from which pro models of this width stretch positions further.
PRO, LARGE = 4096, 14080
#: Width of the lite image models, of which the one that edits images has the channels of a video model.
LITE_IMAGE = 2560


class Exact(theirs.Kandinsky5AttnProcessor):
    """Kandinsky's attention; diffusers' own rounds queries and keys to bf16 in every precision."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, rotary_emb=None, sparse_params=None):
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        heads = (attn.num_heads, -1)
        q = attn.query_norm(attn.to_query(hidden_states).unflatten(-1, heads))
        k = attn.key_norm(attn.to_key(source).unflatten(-1, heads))
        v = attn.to_value(source).unflatten(-1, heads)
        if rotary_emb is not None:
            q, k = (
                (rotary_emb * x.float().unflatten(-1, (-1, 1, 2))).sum(dim=-1).flatten(-2).type_as(x)
                for x in (q, k)
            )
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return attn.out_layer(out.transpose(1, 2).flatten(-2))


class OfTokens(theirs.Kandinsky5Transformer3DModel):
    """diffusers' model, which stays with tokens (B, N, F) up to its end: its own puts them back into frames
    before its last layer, which needs all of them."""

    # its own arguments, which the family's file alone passes
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states,
        encoder_hidden_states,
        timestep,
        pooled_projections,
        visual_rope_pos,
        text_rope_pos,
        scale_factor,
        return_dict=True,
    ):
        text = self.text_embeddings(encoder_hidden_states)
        time = self.time_embeddings(timestep) + self.pooled_text_embeddings(pooled_projections)
        tokens = self.visual_embeddings(hidden_states)  # in frames
        text_rope = self.text_rope_embeddings(text_rope_pos)[None]
        for block in self.text_transformer_blocks:
            text = block(text, time, text_rope)
        rope = self.visual_rope_embeddings(tokens.shape[:-1], visual_rope_pos, scale_factor).flatten(1, 3)
        tokens = tokens.flatten(1, 3)
        for block in self.visual_transformer_blocks:
            tokens = block(tokens, text, time, rope, None)
        return (self.out_layer(tokens, time),)


class LastLayer(theirs.Kandinsky5OutLayer):
    """The last norm and projection of tokens, without the way back to frames."""

    # its own arguments, which the model above alone passes
    def forward(self, tokens, time_embed):  # pyright: ignore[reportIncompatibleMethodOverride]
        shift, scale = self.modulation(time_embed)[:, None].float().chunk(2, dim=-1)
        normed = self.norm(tokens.float()) * (scale + 1.0) + shift
        return self.out_layer(normed.type_as(tokens))


def patch_module(transformer, config):
    """Patch the transformer: the exact attention; longer position tables, since ComfyUI computes any
    position; sines of the timestep, made in float32 on the device, in the dtype of their layer; tokens
    up to the end."""
    transformer.__class__ = OfTokens
    transformer.out_layer.__class__ = LastLayer
    for block in (*transformer.text_transformer_blocks, *transformer.visual_transformer_blocks):
        block.self_attention.set_processor(Exact())
    for block in transformer.visual_transformer_blocks:
        block.cross_attention.set_processor(Exact())
    rope = transformer.visual_rope_embeddings
    tables = [(rope, f"args_{axis}", MAX_SIDE_TOKENS, size) for axis, size in enumerate(rope.axes_dims)]
    text = transformer.text_rope_embeddings
    for owner, name, rows, size in (*tables, (text, "args", MAX_TEXT_TOKENS, text.dim)):
        table = torch.outer(
            torch.arange(rows, dtype=torch.float32), theirs.get_freqs(size // 2, owner.max_period)
        )
        owner.register_buffer(name, table, persistent=False)
    time = transformer.time_embeddings
    round_input(time.in_layer)
    frequencies = time.freqs
    del time.freqs  # an attribute, which stays on the host; a buffer is moved to the device
    time.register_buffer("freqs", frequencies, persistent=False)


def is_video(config) -> bool:
    """Return whether a model makes videos."""
    return config["visual_cond"] and config["model_dim"] != LITE_IMAGE


def stretch(config, grid):
    """Return by what positions (t, y, x) are divided: 1 for images."""
    if not is_video(config):
        return (1.0, 1.0, 1.0)
    side = 3.16 if config["model_dim"] == PRO and grid.extent[1] * grid.extent[2] >= LARGE else 2.0
    return (1.0, side, side)


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward. Channels come last. Video models have the known frames' latent and
    mask as further channels (c_concat); known frames also replace the latent's."""
    batch = latent.shape[0]
    if "time_dim_replace" in cond:
        known = cond["time_dim_replace"]
        latent = torch.cat([known, latent[:, :, known.shape[2] :]], dim=2)
    latent = grid.pad(references.with_channels(latent, cond))
    return dict(
        hidden_states=latent.reshape(*latent.shape[:2], *grid.padded.extent).movedim(1, -1),
        encoder_hidden_states=cond["c_crossattn"],
        pooled_projections=cond["y"],
        timestep=sigma.expand(batch) * 1000,
        visual_rope_pos=[torch.arange(count, device=latent.device) for count in grid.counts],
        text_rope_pos=torch.arange(cond["c_crossattn"].shape[1], device=latent.device),
        scale_factor=stretch(config, grid),
    )


def _fits(known, grid):
    """Return whether the known frames have the latent's channels and sides, and are no more than its
    frames."""
    _, channels, frames, *sides = known.shape
    return channels == grid.shape[0] and frames <= grid.extent[0] and tuple(sides) == grid.extent[1:]


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. The position tables end. Video models take further
    channels."""
    if max(grid.counts) > MAX_SIDE_TOKENS:
        counts = " x ".join(map(str, grid.counts))
        return (
            f"the latent is {counts} tokens, but Kandinsky 5 knows {MAX_SIDE_TOKENS} a side; make it smaller."
        )
    length = cond["c_crossattn"].shape[1]
    if length > MAX_TEXT_TOKENS:
        return f"the prompt has {length} tokens, but Kandinsky 5 knows {MAX_TEXT_TOKENS}; shorten it."
    known = cond.get("time_dim_replace")
    if known is not None and not _fits(known, grid):
        return (
            f"the known frames have shape {tuple(known.shape[1:])}, which do not fit into a latent of "
            f"{grid.shape}; give Kandinsky5ImageToVideo's own latent to the sampler."
        )
    if config["visual_cond"] and "c_concat" not in cond:
        return (
            "c_concat (known frames and their mask) is missing, which Kandinsky 5 video models need; "
            "send zeros for text to video."
        )
    channels = config["in_visual_dim"]
    return references.wrong_channels(channels * 2 + 1 if config["visual_cond"] else channels, grid, cond)


def config_from_shapes(shapes):
    """Return the arguments of the diffusers class; RoPE axes are (2, 3, 3)/8 of the head size. Video models
    have 16 + 1 more channels."""
    width, embedding = shapes["visual_embeddings.in_layer.weight"]
    out = shapes["out_layer.out_layer.weight"][0] // 4
    head = shapes["visual_transformer_blocks.0.cross_attention.key_norm.weight"][0]
    axis = 3 * head // 8
    return dict(
        in_visual_dim=out,
        out_visual_dim=out,
        in_text_dim=shapes["text_embeddings.in_layer.weight"][1],
        in_text_dim2=shapes["pooled_text_embeddings.in_layer.weight"][1],
        visual_cond=embedding > 4 * out,
        time_dim=shapes["time_embeddings.in_layer.weight"][0],
        model_dim=width,
        ff_dim=shapes["visual_transformer_blocks.0.feed_forward.in_layer.weight"][0],
        patch_size=(1, 2, 2),
        num_text_blocks=blocks_of(shapes, "text_transformer_blocks"),
        num_visual_blocks=blocks_of(shapes, "visual_transformer_blocks"),
        axes_dims=(head - 2 * axis, axis, axis),
    )


LAYOUT = Layout(
    signature=(
        "visual_embeddings.in_layer.weight",
        "pooled_text_embeddings.in_layer.weight",
        "visual_transformer_blocks.0.cross_attention.key_norm.weight",
        "text_transformer_blocks.0.text_modulation.out_layer.weight",
        "out_layer.out_layer.weight",
    ),
    config=config_from_shapes,
)
#: Tensor parallelism: pattern of modules -> style.
TENSOR_PLAN = {
    **{f"*attention.{name}": "colwise" for name in ("to_query", "to_key", "to_value")},
    "*attention.out_layer": "rowwise",
    "*.feed_forward.in_layer": "colwise",
    "*.feed_forward.out_layer": "rowwise",
}
PROMPT_MODULES = (
    "text_embeddings",
    "pooled_text_embeddings",
    "text_rope_embeddings",
    "visual_rope_embeddings",
)
FAMILY = Family(
    name="kandinsky5",
    transformer="Kandinsky5Transformer3DModel",
    latent=Latent(
        channels=itemgetter("out_visual_dim"),
        pixels=lambda config: (4 if is_video(config) else 1, 8, 8),
    ),
    io=ModelIO(arguments=forward_args),
    blocks=Blocks(
        output_layer="out_layer.out_layer",
        lists={"visual_transformer_blocks": APART},
        image="visual_embed",
        per_token={"rope": ("image", 1)},
        attention=("image", "cross"),
        values=(("self_attention.to_value",),),
        # text blocks take the timestep, so they change with it
        text_layers=("cross_attention.to_key", "cross_attention.to_value"),
        heads=lambda config: config["model_dim"] // sum(config["axes_dims"]),
        head_size=lambda config: sum(config["axes_dims"]),
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "y", "c_concat", "time_dim_replace", "attention_mask"),
        required=("c_crossattn", "y"),
        widths=entries(c_crossattn="in_text_dim", y="in_text_dim2"),
        ignored=("attention_mask",),
        refusal=refusal,
    ),
    cache=Cache(
        prompt_modules=PROMPT_MODULES,
        step_modules=("time_embeddings", "text_transformer_blocks.[0-9]", "out_layer.modulation"),
        image_modules=("visual_embeddings",),
        token_modules=("visual_embeddings.in_layer",),
        modulation=("visual_modulation.out_layer",),
        modulation_argument="time_embed",
    ),
    build=Build(patch_module=patch_module),
    tensor_plan=TENSOR_PLAN,
    layout=LAYOUT,
)
