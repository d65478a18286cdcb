"""Qwen-Image 2.1 of Alibaba, with reference images: 32 blocks over one sequence of text, references and
image, of which the image alone attends to what follows."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_qwenimage21 as theirs
from torch import Tensor

from .blocks import JOINED, Blocks
from .common import references, token_mixing
from .common.adaptive_norms import LAST_MODULATION
from .common.request_arguments import of_all_samples, once, once_a_request
from .common.shape_only import join
from .config_values import constant, entries
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import Layout, blocks_of, rope_axes
from .qwen_image import Rotary


class JointSequence:
    """What the tokens of text, references and image are, made once a request. No tuple: FSDP2 copies those.

    pieces: (first token of text, end, tokens of the image after them). positions: (tokens, 3). made:
    (tokens,), true for the latent's. seen: what given tokens may look at (``before``). visible: (B, tokens),
    false for padding, or None. given_tokens: how many stand before the latent's.
    """

    def __init__(self, pieces, positions, made, seen, visible):
        self.pieces = pieces
        self.positions = positions
        self.made = made
        self.seen = seen
        self.visible = visible
        self.given_tokens = len(positions) - pieces[-1][2]

    def joined(self, text, images):
        """Return the sequence (B, tokens, D) of the tokens of text and those of all images."""
        found = []
        start = 0
        for lo, hi, count in self.pieces:
            found += [text[:, lo:hi], images[:, start : start + count]]
            start += count
        return join(found)


class Joint(theirs.QwenImage21Transformer2DModel):
    """diffusers' model with a sequence that is described by the request: its own forward asks the device at
    each call where images stand, and has slots of 2 x 2 tokens. Blocks get the mask of what is given in the
    place of its segments. The last layers see the latent's tokens alone."""

    # its own arguments, which the family's file alone passes
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states, encoder_hidden_states, timestep, sequence, return_dict=True
    ):
        joint = sequence.joined(self.txt_in(encoder_hidden_states), self.img_in(hidden_states))
        timestep = timestep.to(joint.dtype)
        made = None
        if cast(Any, self.config).causal_condition:
            timestep = torch.cat([timestep, timestep.new_zeros(1)])  # of what is given
            made = sequence.made
        temb = self.time_text_embed(timestep, joint)
        block_arguments = dict(
            modulation=self.modulation(temb),
            rotary_emb=self.pos_embed(sequence.positions),
            target_token_mask=made,
            segments=[sequence.given_tokens, sequence.seen],
            key_valid=sequence.visible,
        )
        for block in self.transformer_blocks:
            joint = block(hidden_states=joint, **block_arguments)
        image = joint[:, sequence.given_tokens :]  # of the latent's tokens a rank may have some
        return (self.proj_out(self.norm_out(image, temb[: len(image)])),)


class JointRotary(Rotary):
    """Rotary tables of text and images in one sequence; diffusers' own are slow, and end at 8192."""

    # the model above calls it with the positions of both
    def forward(self, positions):  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.table(positions)


class BlockCausal:
    """Attention in two calls, where diffusers makes one for every piece of the sequence: what is given
    attends to what is before it and to its own image, the image to everything."""

    def __call__(
        self, attn, hidden_states, rotary_emb: Any = None, segments: Any = None, key_valid=None, **unused
    ):
        def heads(layer):
            return layer(hidden_states).unflatten(-1, (-1, attn.inner_dim // attn.heads))

        def rotated(norm, layer):
            x = theirs.apply_rotary_emb_qwen(norm(heads(layer)), rotary_emb, use_real=False)
            return cast(Tensor, x).transpose(1, 2)

        query = rotated(attn.norm_q, attn.to_q)
        key = rotated(attn.norm_k, attn.to_k)
        value = heads(attn.to_v).transpose(1, 2)
        whole, seen = segments
        key_mask = None if key_valid is None else key_valid[:, None, None]
        length = token_mixing.local_text_tokens(whole)

        def attend(query, *keys, mask):
            return F.scaled_dot_product_attention(query, *(t.to(query.dtype) for t in keys), attn_mask=mask)

        seen = seen if length else None
        given = attend(query[:, :, :length], key[:, :, :length], value[:, :, :length], mask=seen)
        image = attend(query[:, :, length:], key, value, mask=key_mask)
        out = torch.cat([given, image], dim=2)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2).type_as(hidden_states)))


def patch_module(transformer, config):
    """Patch the transformer: attention in two calls, positions as in ComfyUI, and images of any size."""
    transformer.__class__ = Joint
    transformer.pos_embed = JointRotary(transformer.pos_embed.theta, transformer.pos_embed.axes_dim)
    for block in transformer.transformer_blocks:
        block.attn.set_processor(BlockCausal())


def _slots(cond):
    """Return where references stand among the tokens of text; empty where that is not said."""
    return cond["image_slots"][0].tolist() if "image_slots" in cond else []


def image_pieces(grid, cond):
    """Return the sequence in pieces: (first token of text, end, the image after them), the last image being
    the latent. References come after the text where image_slots says no place."""
    found = references.grids(grid, cond)
    length = cond["c_crossattn"].shape[1]
    slots = _slots(cond)
    slots += [length] * (len(found) - len(slots))
    return list(zip((0, *slots), (*slots, length), (*found, grid)))


def positions(grid, cond, device):
    """Return (tokens, 3): text counts on all three axes, an image stands still on the first and counts from
    the middle on the others, where images of odd sides and of even ones agree."""
    places = []
    start = 0
    for lo, hi, one in image_pieces(grid, cond):
        text = torch.arange(start, start + hi - lo, device=device, dtype=torch.float32)
        places.append(text[:, None].expand(-1, 3))
        start += hi - lo
        # half a token off where one side is odd and the latent's even, or the other way round: centres agree
        middle = [-(-count // 2) - (count % 2 - own % 2) / 2 for count, own in zip(one.counts, grid.counts)]
        axes = [
            torch.full((1,), start, device=device, dtype=torch.float32),
            *(torch.arange(one.counts[i], device=device) - middle[i] for i in (1, 2)),
        ]
        places.append(torch.cartesian_prod(*axes))
        start += max(one.counts)
    return torch.cat(places)


def before(parts, mask, device):
    """Return (1 or B, 1, tokens, tokens), true where given tokens may look: text at itself and what is before
    it, references at all of their own image too. parts: as ``image_pieces``; mask: (B, text), 0 for padding,
    at which nothing looks, or None."""
    ends = []
    start = 0
    for lo, hi, one in parts:
        image = one.tokens if one is not parts[-1][2] else 0
        text_end = start + hi - lo
        ends += [torch.arange(start + 1, text_end + 1), torch.full((image,), text_end + image)]
        start = text_end + image
    end = torch.cat(ends).to(device)
    seen = (torch.arange(start, device=device) < end[:, None])[None, None]
    return seen if mask is None else seen & visible(parts, mask)[:, None, None, :start]


def visible(parts, mask):
    """Return (B, tokens), false for padding. parts: as ``image_pieces``; mask: (B, text), 0 for padding."""
    found = []
    for lo, hi, one in parts:
        found += [mask[:, lo:hi].bool(), mask.new_ones(len(mask), one.tokens, dtype=torch.bool)]
    return torch.cat(found, dim=1)


def request_mask(parts, cond, device):
    """Return ``before`` of the samples of ``cond``, tokens squared: one for all prompts and samples whose
    pieces and padding are alike, and one for all samples of a prompt whose padding differs."""
    mask, samples = of_all_samples(cond, "attention_mask")
    key: tuple = ("seen", *((lo, hi, one.tokens) for lo, hi, one in parts))
    if mask is not None:
        mask = mask.bool()
        mask = mask[:1] if (mask == mask[:1]).all() else mask
        key = (*key, *map(tuple, mask.tolist()))
    masks = once_a_request(cond, key, before, parts, mask, device)
    return masks if len(masks) == 1 else masks[samples]


def count_text_tokens(cond):
    """Count the tokens of text, and of the references among it."""
    return cond["c_crossattn"].shape[1] + sum(latent[0, 0].numel() for latent in references.references(cond))


def forward_args(config, grid, tokens, sigma, cond):
    """Return the arguments of the forward. diffusers multiplies the timestep by 1000 itself, and ComfyUI
    rounds it here as its pipeline does."""
    batch = tokens.shape[0]
    return dict(
        hidden_states=torch.cat([*references.tokens(grid, cond), tokens], dim=1),
        encoder_hidden_states=cond["c_crossattn"].expand(batch, -1, -1),
        timestep=(sigma.expand(batch) * 1000).to(tokens.dtype) / 1000,
        sequence=once(cond, "sequence", _sequence, grid, cond, batch, tokens.device),
    )


def _sequence(grid, cond, batch, device):
    """Return what the tokens of the sequence are."""
    parts = image_pieces(grid, cond)
    mask = cond.get("attention_mask")
    places = positions(grid, cond, device)
    return JointSequence(
        [(lo, hi, one.tokens) for lo, hi, one in parts],
        places,
        torch.arange(len(places), device=device) >= len(places) - grid.tokens,
        request_mask(parts, cond, device),
        None if mask is None else visible(parts, mask).expand(batch, -1),
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None."""
    wrong = references.refusal(config, grid, cond)
    if wrong:
        return wrong
    grids = references.grids(grid, cond)
    length = cond["c_crossattn"].shape[1]
    if references.method(cond, references.AT_ZERO) != references.AT_ZERO:
        return (
            f"the references are placed by another method than {references.AT_ZERO}, the only one that "
            "this model has; remove Edit Model Reference Method."
        )
    if "image_slots" in cond and (cond["image_slots"] != cond["image_slots"][:1]).any():
        return (
            "image_slots differs from sample to sample, but the references of a batch stand at the "
            "same places; sample the prompts one after the other."
        )
    slots = _slots(cond)
    if len(slots) > len(grids) or slots != sorted(slots) or not all(0 <= slot <= length for slot in slots):
        return (
            f"image_slots is {slots}, but it is where each of the {len(grids)} references stands among "
            f"the {length} tokens of the prompt, in order; encode the prompt with TextEncodeQwenImage21."
        )
    mask = cond.get("attention_mask")
    if mask is not None and (mask.shape[1] != length or not mask[:, 0].all()):
        return (
            f"attention_mask has the shape {list(mask.shape)} for {length} tokens of prompt; give it one "
            f"entry for each token, with padding after the prompt."
        )
    return None


def config_from_shapes(shapes):
    hidden = shapes["img_in.weight"][0]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return dict(
        patch_size=1,
        in_channels=shapes["img_in.weight"][1],
        out_channels=shapes["proj_out.weight"][0],
        num_layers=blocks_of(shapes, "transformer_blocks"),
        attention_head_dim=head,
        num_attention_heads=hidden // head,
        context_in_dim=shapes["txt_in.in_layer.weight"][1],
        mlp_ratio=shapes["transformer_blocks.0.img_mlp.gate_up.weight"][0] // 2 // hidden,
        axes_dims_rope=rope_axes(head),
    )


LAYOUT = Layout(
    signature=(
        "img_in.weight",
        "txt_in.text_norm.weight",
        "txt_in.in_layer.weight",
        "modulation.1.weight",
        "transformer_blocks.0.attn.norm_q.weight",
        "transformer_blocks.0.img_mlp.gate_up.weight",
    ),
    config=config_from_shapes,
    names={
        "transformer_blocks.{}.img_mlp.gate_up": "transformer_blocks.{}.img_mlp.gate_layer "
        "transformer_blocks.{}.img_mlp.proj"
    },
)
FAMILY = Family(
    name="qwen-image-2.1",
    transformer="QwenImage21Transformer2DModel",
    latent=Latent(patch=constant(1, 1, 1), frames=False, pixels=constant(1, 16, 16)),
    io=ModelIO(forward_args, takes_tokens=True),
    blocks=Blocks(
        output_layer="proj_out",
        lists={"transformer_blocks": JOINED},
        text_position="first",  # and references among it
        attention=("text", ("image", "joint")),
        per_token={"rotary_emb": ("joint", 0), "target_token_mask": ("joint", 0)},
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "attention_mask", "ref_latents", "ref_latents_method", "image_slots"),
        widths=entries(c_crossattn="context_in_dim"),
        count_text_tokens=count_text_tokens,
        refusal=refusal,
    ),
    cache=Cache(
        static_text=True,
        prompt_modules=("txt_in", "pos_embed"),
        step_modules=("time_text_embed", "modulation", *LAST_MODULATION),
        image_modules=("img_in",),
        token_modules=("img_in",),
        references_first=True,
    ),
    build=Build(patch_module=patch_module),
    tensor_plan=None,
    layout=LAYOUT,
    # the text is modulated by the step
    variant=lambda config: {} if config.get("causal_condition", True) else {"cache.static_text": False},
)
