"""HunyuanDiT 1.0 to 1.2 of Tencent: 28 or 40 blocks with long skips from the first half to the second,
v-prediction on a discrete schedule.

A skip crosses every stage boundary between its two blocks, with the activation. Placing both blocks on one
stage would send the activation through every stage twice: double latency and bubbles, where skips cost bytes.
"""

from types import SimpleNamespace

import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed_from_grid
from diffusers.models.transformers.hunyuan_transformer_2d import HunyuanDiT2DModel

from .blocks import APART, BlockAdapter, Blocks
from .common.adaptive_norms import LAST_MODULATION
from .common.call_state import call_state
from .common.request_arguments import once
from .config_values import entries
from .discrete_schedule import DiscreteSchedule
from .family import FP16_OR_BF16, Build, Cache, Conditioning, Family, Latent, ModelIO, Noise
from .key_layout import LAYERS, MLP, Layout, blocks_of, under

#: Tokens of CLIP's and of mT5's prompt that have a learned padding: the last ones, as in ComfyUI. mT5's first
#: ones are pooled.
TEXT, TEXT_T5 = 77, 256
#: Tokens along a side of the image to which rotary positions are scaled.
BASE = 32


def schedule(config):
    """Return the noise schedule; 1.0 and 1.1, which are told the image's size, go on to stronger noise."""
    return DiscreteSchedule(0.00085, 0.03 if config["use_style_cond_and_image_meta_size"] else 0.018)


class Padded(HunyuanDiT2DModel):
    """diffusers' model for prompts of any lengths: the padding that its forward reads is as long as they."""

    call: SimpleNamespace

    @property
    def text_embedding_padding(self):
        learned = self._parameters["text_embedding_padding"]
        assert learned is not None, "every file has it"
        lengths = self.call.prompt_lengths
        if lengths == (TEXT, TEXT_T5):
            return learned
        parts = zip(learned.split((TEXT, TEXT_T5)), lengths)
        # nothing reads the rows of tokens without padding, which no mask hides
        rows = [(part[:1].expand(length - len(part), -1), part) for part, length in parts]
        return torch.cat([row for pair in rows for row in pair])


def patch_module(transformer, config):
    """Patch the transformer: timesteps that are not rounded to their type, and prompts of any lengths."""
    transformer.call = call_state(transformer, prompt_lengths=(TEXT, TEXT_T5))
    transformer.__class__ = Padded

    def count(transformer, args, kwargs):
        names = ("encoder_hidden_states", "encoder_hidden_states_t5")
        transformer.call.prompt_lengths = tuple(kwargs[name].shape[1] for name in names)

    transformer.register_forward_pre_hook(count, with_kwargs=True)
    embed = transformer.time_extra_emb
    embed.pooler.register_forward_pre_hook(lambda pooler, args: (args[0][:, :TEXT_T5],))

    def exact(embed, args, kwargs):
        return args, kwargs | {"hidden_dtype": embed.timestep_embedder.linear_1.weight.dtype}

    embed.register_forward_pre_hook(exact, with_kwargs=True)


def rotary(config, grid, device):
    """Return (cos, sin), each (tokens, head size), of positions over the image, fitted into the base
    square."""
    rows, columns = grid.counts[1:]
    height = width = BASE
    if rows > columns:
        width = round(BASE / rows * columns)
    else:
        height = round(BASE / columns * rows)
    axes = [
        round((BASE - size) / 2.0) + torch.arange(count, dtype=torch.float32) * (size / count)
        for size, count in ((width, columns), (height, rows))
    ]
    positions = torch.stack(torch.meshgrid(*axes, indexing="xy")).unsqueeze(1)
    tables = get_2d_rotary_pos_embed_from_grid(config["attention_head_dim"], positions, use_real=True)
    return tuple(table.to(device) for table in tables)


def forward_args(config, grid, latent, timestep, cond):
    """Return the arguments of the forward: two prompts, of CLIP and of mT5, whose padding the model
    replaces among the last tokens."""
    batch = latent.shape[0]
    device = latent.device

    def mask(name, prompt, count):
        given, length = cond.get(name), cond[prompt].shape[1]
        if given is not None and length == count:
            return given
        shown = torch.ones(batch, length, dtype=torch.long, device=device)
        if given is not None:
            shown[:, -count:] = given[:, -count:]
        return shown

    return dict(
        hidden_states=grid.pad(latent),
        timestep=timestep.expand(batch),
        encoder_hidden_states=cond["c_crossattn"],
        text_embedding_mask=mask("text_embedding_mask", "c_crossattn", TEXT),
        encoder_hidden_states_t5=cond["encoder_hidden_states_t5"],
        text_embedding_mask_t5=mask("text_embedding_mask_t5", "encoder_hidden_states_t5", TEXT_T5),
        image_meta_size=cond["image_meta_size"].expand(batch, -1) if "image_meta_size" in cond else None,
        style=torch.zeros(batch, dtype=torch.long, device=device),
        image_rotary_emb=once(cond, "rotary", rotary, config, grid, device),
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. The padding that the model learned has these lengths."""
    lengths = cond["c_crossattn"].shape[1], cond["encoder_hidden_states_t5"].shape[1]
    if lengths[0] >= TEXT and lengths[1] >= TEXT_T5:
        return None
    return (
        f"the prompts have {lengths} tokens, but HunyuanDiT takes at least {TEXT} and {TEXT_T5}; pad them, "
        f"and mask the padding."
    )


HEADS = 16


def config_from_shapes(shapes):
    hidden, channels, patch, _ = shapes["x_embedder.proj.weight"]
    return dict(
        num_attention_heads=HEADS,
        attention_head_dim=hidden // HEADS,
        in_channels=channels,
        patch_size=patch,
        hidden_size=hidden,
        num_layers=blocks_of(shapes, "blocks"),
        mlp_ratio=shapes["blocks.0.mlp.fc1.weight"][0] / hidden,
        learn_sigma=shapes["final_layer.linear.weight"][0] > channels * patch**2,
        cross_attention_dim=shapes["text_embedding_padding"][1],
        cross_attention_dim_t5=shapes["mlp_t5.0.weight"][1],
        pooled_projection_dim=shapes["pooler.c_proj.weight"][0],
        use_style_cond_and_image_meta_size="style_embedder.weight" in shapes,
    )


BLOCK = {
    "norm1": "norm1.norm",
    "default_modulation.1": "norm1.linear",
    "norm3": "norm2",
    "norm2": "norm3",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
}
ATTENTION = {"q_norm": "norm_q", "k_norm": "norm_k", "out_proj": "to_out.0"}
EXTRA = "time_extra_emb"
LAYOUT = Layout(
    signature=(
        "mlp_t5.0.weight",
        "text_embedding_padding",
        "pooler.positional_embedding",
        "x_embedder.proj.weight",
        "extra_embedder.0.weight",
        "blocks.0.attn1.Wqkv.weight",
        "final_layer.linear.weight",
    ),
    config=config_from_shapes,
    swapped=("norm_out.linear",),
    names={
        **under("mlp_t5", "text_embedder", LAYERS),
        "x_embedder.proj": "pos_embed.proj",
        **under("t_embedder", f"{EXTRA}.timestep_embedder", MLP),
        **under("extra_embedder", f"{EXTRA}.extra_embedder", LAYERS),
        "style_embedder.weight": f"{EXTRA}.style_embedder.weight",
        "pooler.positional_embedding": f"{EXTRA}.pooler.positional_embedding",
        **{f"pooler.{part}_proj": f"{EXTRA}.pooler.{part}_proj" for part in "qkvc"},
        "final_layer.linear": "proj_out",
        "final_layer.adaLN_modulation.1": "norm_out.linear",
        **under("blocks.{}", "blocks.{}", BLOCK),
        **under("blocks.{}.attn1", "blocks.{}.attn1", {"Wqkv": "to_q to_k to_v", **ATTENTION}),
        **under(
            "blocks.{}.attn2", "blocks.{}.attn2", {"q_proj": "to_q", "kv_proj": "to_k to_v", **ATTENTION}
        ),
    },
)


class LongSkips(BlockAdapter):
    """A block of the second half takes what its mirror image in the first half made."""

    skip_argument = "skip"

    def skip_source(self, index, total):
        return total - 1 - index if index > total // 2 else None


FAMILY = Family(
    name="hunyuan-dit",
    transformer="HunyuanDiT2DModel",
    latent=Latent(frames=False),
    noise=Noise(prediction="v", schedule=schedule),
    io=ModelIO(arguments=forward_args),
    blocks=Blocks(
        output_layer="proj_out",
        lists={"blocks": APART},
        per_token={"image_rotary_emb": ("image", 0)},
        attention=("image", "cross"),
        values=(("attn1.to_v",),),
        adapter=LongSkips(),
    ),
    conditioning=Conditioning(
        accepted=(
            "c_crossattn",
            "text_embedding_mask",
            "encoder_hidden_states_t5",
            "text_embedding_mask_t5",
            "image_meta_size",
        ),
        required=("c_crossattn", "encoder_hidden_states_t5"),
        widths=entries(c_crossattn="cross_attention_dim", encoder_hidden_states_t5="cross_attention_dim_t5"),
        refusal=refusal,
    ),
    cache=Cache(
        prompt_modules=("text_embedder",),
        image_modules=("pos_embed",),
        token_modules=("pos_embed.proj",),
        step_modules=("time_extra_emb", *LAST_MODULATION),
        modulation=("norm1.linear",),
        prompt_layers=("attn2.to_k", "attn2.to_v"),
        padded_prompt=TEXT + TEXT_T5,
    ),
    build=Build(dtypes=FP16_OR_BF16, patch_module=patch_module),
    layout=LAYOUT,
)
