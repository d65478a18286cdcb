"""Qwen-Image of Alibaba, its Edit models (2509, 2511, several references) and Layered: 60 joint blocks in the
released size; text first, rotary tables for image and text. Layered's latent has a layer where videos have a
frame, and its blocks know by a second embedding whether an image has transparency."""

import re

import torch
from diffusers.models.transformers import transformer_qwenimage as theirs

from .blocks import APART, Blocks
from .common import references
from .common.adaptive_norms import LAST_MODULATION
from .common.request_arguments import once
from .common.timestep_precision import keep_timestep
from .config_values import entries
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import Layout, blocks_of, rope_axes

#: Ways to place references that ComfyUI's Qwen-Image knows; it takes every other one for "offset".
METHODS = ("index", references.AT_ZERO, "negative_index")


class Places:
    """What rotary tables and blocks need of a request's tokens: ``positions`` (tokens, 3), where ``text``
    starts, and ``given`` (B, tokens), 1 for those at timestep zero, or None without that timestep. No tuple:
    FSDP2 makes new ones of those."""

    def __init__(self, positions, text, given):
        self.positions = positions
        self.text = text
        self.given = given


class TwoTimes(theirs.QwenImageTransformer2DModel):
    """diffusers' model, whose ``places`` say which tokens are at timestep zero: its own forward writes a
    number for every token to the device at each call. The request decides and no weight, as in ComfyUI: any
    file can."""

    # its own arguments, which the family's file alone passes
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states,
        encoder_hidden_states,
        timestep,
        places,
        encoder_hidden_states_mask=None,
        additional_t_cond=None,
        return_dict=True,
    ):
        image = self.img_in(hidden_states)
        text = self.txt_in(self.txt_norm(encoder_hidden_states))
        timestep = timestep.to(image.dtype)
        if places.given is not None:
            timestep = torch.cat([timestep, timestep * 0])
            if additional_t_cond is not None:
                additional_t_cond = additional_t_cond.repeat(2)
        temb = self.time_text_embed(timestep, image, additional_t_cond)
        mask = encoder_hidden_states_mask
        block_arguments = dict(
            encoder_hidden_states_mask=None if mask is None else mask.bool(),
            temb=temb,
            image_rotary_emb=self.pos_embed(places, text.shape[1], image.device),
            modulate_index=places.given,
        )
        for block in self.transformer_blocks:
            text, image = block(hidden_states=image, encoder_hidden_states=text, **block_arguments)
        if places.given is not None:
            temb = temb.chunk(2)[0]
        return (self.proj_out(self.norm_out(image, temb)),)


class Rotary(torch.nn.Module):
    """Rotary tables, complex (tokens, head size / 2), for any positions; diffusers' own wants even sides."""

    def __init__(self, theta, axes):
        super().__init__()
        self.theta = theta
        self.axes = axes

    def table(self, positions):
        """Compute the table, complex64 (tokens, head size / 2), of ``positions`` (tokens, axes)."""
        parts = []
        for positions_of_axis, size in zip(positions.double().unbind(-1), self.axes):
            numbers = torch.arange(0, size, 2, dtype=torch.float64, device=positions.device)
            parts.append(torch.outer(positions_of_axis, 1.0 / self.theta ** (numbers / size)))
        angles = torch.cat(parts, dim=-1)
        return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)

    def forward(self, places, max_txt_seq_len, device):
        text = torch.arange(places.text, places.text + max_txt_seq_len, device=device)
        return self.table(places.positions.to(device)), self.table(text[:, None].expand(-1, 3))


def patch_module(transformer, config):
    """Patch the transformer: positions as in ComfyUI, and timesteps that are not rounded."""
    transformer.__class__ = TwoTimes
    embed = transformer.time_text_embed
    keep_timestep(transformer, embed, embed.timestep_embedder.linear_1)
    transformer.pos_embed = Rotary(transformer.pos_embed.theta, transformer.pos_embed.axes_dim)


def at_zero(config, grid, count, how, batch, device):
    """Return (batch, tokens): 1 for the ``count`` tokens of references where those are at timestep zero; None
    where no token is. A file of Edit 2511 always computes both timesteps, for equal bits."""
    at = how == references.AT_ZERO and count > 0
    if not (at or config.get("zero_cond_t")):
        return None
    first = grid.tokens if at else grid.tokens + count  # none is marked where no reference is at zero
    marked = torch.arange(grid.tokens + count, device=device) >= first
    return marked.int().repeat(batch, 1)


def forward_args(config, grid, tokens, sigma, cond):
    """Return the arguments of the forward. Latents travel packed 2x2, references after; diffusers multiplies
    the timestep by 1000 itself."""
    batch = tokens.shape[0]
    how = references.method(cond, default_method(config), METHODS)
    count = references.token_count(config, grid, cond)
    device = tokens.device

    def places():
        found = references.all_positions(grid, cond, how, device, centred=True)
        start = max(grid.counts[1:]) // 2  # ComfyUI's txt_start
        return Places(found, start, at_zero(config, grid, count, how, batch, device))

    additional_t_cond = None
    if config.get("use_additional_t_cond"):  # layers with transparency, as in ComfyUI, which knows no others
        additional_t_cond = torch.zeros(batch, dtype=torch.long, device=device)
    return dict(
        hidden_states=torch.cat([tokens, *references.tokens(grid, cond)], dim=1),
        encoder_hidden_states=cond["c_crossattn"],
        encoder_hidden_states_mask=cond.get("attention_mask"),
        timestep=sigma.expand(batch),
        additional_t_cond=additional_t_cond,
        places=once(cond, "places", places),
    )


def default_method(config):
    """Return how references are placed where the request does not say."""
    if config.get("use_additional_t_cond"):
        return "negative_index"
    return references.AT_ZERO if config.get("zero_cond_t") else "index"


#: An empty tensor that marks Edit 2511, which was trained with references at timestep zero: the method unless
#: the request names one. GGUF files and merges may lack it.
ZERO_TIMESTEP = "__index_timestep_zero__"
#: What names of such files have, as no weight is another's.
EDIT_2511 = "2511"
#: Of Layered: embeds whether an image is without transparency.
TRANSPARENCY = "time_text_embed.addition_t_embedding.weight"


def config_from_shapes(shapes):
    hidden = shapes["img_in.weight"][0]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return dict(
        patch_size=2,
        in_channels=shapes["img_in.weight"][1],
        out_channels=shapes["proj_out.weight"][0] // 4,
        num_layers=blocks_of(shapes, "transformer_blocks"),
        attention_head_dim=head,
        num_attention_heads=hidden // head,
        joint_attention_dim=shapes["txt_in.weight"][1],
        axes_dims_rope=rope_axes(head),
        zero_cond_t=ZERO_TIMESTEP in shapes,
        use_additional_t_cond=TRANSPARENCY in shapes,
    )


LAYOUT = Layout(
    signature=(
        "img_in.weight",
        "txt_norm.weight",
        "txt_in.weight",
        "transformer_blocks.0.img_mod.1.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "proj_out.weight",
    ),
    unread={ZERO_TIMESTEP: "a mark that the configuration is told by"},
    config=config_from_shapes,
    named=lambda name: {"zero_cond_t": True} if re.search(rf"(?<!\d){EDIT_2511}(?!\d)", name) else {},
)
FAMILY = Family(
    name="qwen-image",
    transformer="QwenImageTransformer2DModel",
    latent=Latent(channels=lambda config: config["in_channels"] // config["patch_size"] ** 2),
    io=ModelIO(forward_args, takes_tokens=True),
    blocks=Blocks(
        output_layer="proj_out",
        lists={"transformer_blocks": APART},
        returns=("text", "image"),
        text="encoder_hidden_states",
        text_position="first",
        values=(("attn.add_v_proj", "attn.to_v"),),
        text_mask="encoder_hidden_states_mask",
        text_layers=("attn.add_*", "attn.to_add_out", "txt_*"),
        per_token={"image_rotary_emb": (("image", "text"), 0), "modulate_index": ("image", 1)},
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "attention_mask", "ref_latents", "ref_latents_method"),
        widths=entries(c_crossattn="joint_attention_dim"),
        context_tokens=references.token_count,
        refusal=references.refusal,
    ),
    cache=Cache(
        prompt_modules=("txt_norm", "txt_in", "pos_embed"),
        step_modules=("time_text_embed", *LAST_MODULATION),
        image_modules=("img_in",),
        token_modules=("img_in",),
        modulation=("img_mod.1", "txt_mod.1"),
    ),
    build=Build(
        patch_module=patch_module,
        only={"guidance_embeds": (False, "a guidance-distilled Qwen-Image")},
    ),
    tensor_plan=None,
    layout=LAYOUT,
)
