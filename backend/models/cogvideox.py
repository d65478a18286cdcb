"""CogVideoX (2b, 5b) and 1.5 of Zhipu, text or image to video: 30 or 42 joint blocks, v-prediction on a
discrete schedule; text first."""

from operator import itemgetter

import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed

from ..runtime.callbacks import always
from .blocks import APART, Blocks
from .common import references
from .common.adaptive_norms import LAST_MODULATION
from .common.request_arguments import once
from .config_values import constant, entries
from .discrete_schedule import DiscreteSchedule
from .family import BF16_OR_FP16, Build, Cache, Conditioning, Family, Latent, ModelIO, Noise
from .key_layout import Layout, blocks_of, under

HEAD = 64
#: Frames of a video to one of its latent's, but for the first.
TEMPORAL = 4
#: Tokens of a prompt, and latent pixels along the sides of a video, in the released position tables.
TEXT, HEIGHT, WIDTH = 226, 60, 90
#: The learned positions of 1.0's image to video.
TABLE = "patch_embed.pos_embedding"


def rotary(config, grid, device):
    """Return (cos, sin), each (tokens, head size), of axes (1/4, 3/8, 3/8). Before 1.5 ComfyUI stretches the
    image's axes."""
    stretch = 1.0 if config.get("patch_size_t") else config.get("spatial_interpolation_scale", 1.875)
    frames, *sides = grid.counts
    area = (0, 0), tuple(side * stretch for side in sides)
    return get_3d_rotary_pos_embed(config["attention_head_dim"], area, sides, frames, device=device)


def patch_module(transformer, config):
    """Patch the learned positions: of a single file for image to video as in ComfyUI, for the latent's tokens
    in order and not for text; of a folder as in diffusers, but for shorter videos the table's first frames,
    where diffusers has sines."""
    embed = transformer.patch_embed

    def first_frames(height, width, frames, device=None):
        count = (frames - 1) // embed.temporal_compression_ratio + 1
        tokens = (height // embed.patch_size) * (width // embed.patch_size) * count
        return embed.pos_embedding[:, : embed.max_text_seq_length + tokens]

    def add_positions(module, args, joint):
        text = args[0].shape[1]
        table = module.pos_embedding[:, TEXT : TEXT + joint.shape[1] - text]
        return torch.cat([joint[:, :text], joint[:, text:] + table.to(joint.dtype)], dim=1)

    if config.get("learned_alone"):
        embed.use_positional_embeddings = embed.use_learned_positional_embeddings = False
        embed.register_forward_hook(add_positions)
    elif config["use_learned_positional_embeddings"]:
        embed._get_positional_embeddings = first_frames


def forward_args(config, grid, latent, timestep, cond):
    """Return the arguments of the forward. Time comes before channels; image to video has the image's latent
    as further channels (c_concat)."""
    batch = latent.shape[0]
    tables = None
    if config["use_rotary_positional_embeddings"] and not config.get("learned_alone"):
        tables = once(cond, "rotary", rotary, config, grid, latent.device)
    return dict(
        hidden_states=grid.pad(references.with_channels(latent, cond)).transpose(1, 2),
        encoder_hidden_states=cond["c_crossattn"],
        timestep=timestep.expand(batch),
        ofs=cond["ofs"].reshape(-1).expand(batch) if "ofs" in cond else None,
        image_rotary_emb=tables,
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None."""
    return _wrong_size(config, grid, cond) or references.wrong_channels(config["in_channels"], grid, cond)


def _wrong_size(config, grid, cond):
    """Return why a position table is not for this latent or prompt, or None. A single file's learned table
    ends; a folder's learned table fits one size, and any table of a folder one length of the prompt."""
    if config.get("learned_alone"):
        return _why_too_long(config, grid)
    length = cond["c_crossattn"].shape[1]
    most = config.get("max_text_seq_length", TEXT)
    learned = config["use_learned_positional_embeddings"]
    if (learned or not config["use_rotary_positional_embeddings"]) and length != most:
        return (
            f"the prompt has {length} tokens, but this model's position table is for {most}; pad the "
            f"prompt to {most} tokens, as ComfyUI's CogVideoX text encoder does."
        )
    if not learned:
        return None
    size = config["sample_height"], config["sample_width"]
    if grid.padded.shape[-2:] == size and not _why_too_long(config, grid):
        return None
    return (
        f"the latent is {' x '.join(map(str, grid.shape[1:]))}, but this model makes videos of {size[0]} "
        f"x {size[1]} latent pixels only, of at most {config['sample_frames']} frames."
    )


def _why_too_long(config, grid):
    """Return why a table of positions is too short for this latent, or None."""
    frames = (config["sample_frames"] - 1) // TEMPORAL + 1
    most = frames * (config["sample_height"] // 2) * (config["sample_width"] // 2)
    if grid.tokens <= most:
        return None
    counts = " x ".join(map(str, grid.counts))
    return f"the latent is {counts} tokens, but this model has {most} positions; make it smaller or shorter."


def _table_frames(shapes):
    """Count the frames of the videos that a file's position table is for. Without a table they are those of
    the released videos."""
    frame = HEIGHT * WIDTH // 4
    rows = shapes.get(TABLE, (1, TEXT + 13 * frame))[1]
    return ((rows - TEXT) // frame - 1) * TEMPORAL + 1


def config_from_shapes(shapes):
    """Return arguments of the diffusers class, and learned_alone, which it does not take: that is for
    patch_module, forward_args and refusal. 1.5 has a linear patch embedding over two frames."""
    embedding = shapes["patch_embed.proj.weight"]
    time = 1 if len(embedding) == 4 else 2
    return dict(
        num_attention_heads=embedding[0] // HEAD,
        attention_head_dim=HEAD,
        in_channels=embedding[1] if time == 1 else embedding[1] // 8,
        out_channels=shapes["proj_out.weight"][0] // (4 * time),
        sample_height=HEIGHT,
        sample_width=WIDTH,
        sample_frames=_table_frames(shapes),
        time_embed_dim=shapes["time_embedding_linear_1.weight"][0],
        ofs_embed_dim=shapes.get("ofs_embedding_linear_1.weight", (None, None))[1],
        text_embed_dim=shapes["patch_embed.text_proj.weight"][1],
        num_layers=blocks_of(shapes, "blocks"),
        patch_size=2,
        patch_size_t=None if time == 1 else 2,
        patch_bias="patch_embed.proj.bias" in shapes,
        use_rotary_positional_embeddings=True,
        use_learned_positional_embeddings=TABLE in shapes,
        learned_alone=TABLE in shapes,
    )


BLOCK = {
    **{f"{norm}.{part}": f"{norm}.{part}" for norm in ("norm1", "norm2") for part in ("linear", "norm")},
    "q": "attn1.to_q",
    "k": "attn1.to_k",
    "v": "attn1.to_v",
    "norm_q": "attn1.norm_q",
    "norm_k": "attn1.norm_k",
    "attn_out": "attn1.to_out.0",
    "ff_proj": "ff.net.0.proj",
    "ff_out": "ff.net.2",
}
LAYOUT = Layout(
    signature=(
        "patch_embed.proj.weight",
        "patch_embed.text_proj.weight",
        "time_embedding_linear_1.weight",
        "blocks.0.norm1.linear.weight",
        "blocks.0.attn_out.weight",
        "proj_out.weight",
    ),
    config=config_from_shapes,
    names={
        "time_embedding_linear_1": "time_embedding.linear_1",
        "time_embedding_linear_2": "time_embedding.linear_2",
        "ofs_embedding_linear_1": "ofs_embedding.linear_1",
        "ofs_embedding_linear_2": "ofs_embedding.linear_2",
        **under("blocks.{}", "transformer_blocks.{}", BLOCK),
    },
)
SCHEDULE = DiscreteSchedule(0.00085, 0.012, zero_terminal_snr=True)
FAMILY = Family(
    name="cogvideox",
    transformer="CogVideoXTransformer3DModel",
    latent=Latent(channels=itemgetter("out_channels"), frames=True, pixels=constant(TEMPORAL, 8, 8)),
    noise=Noise(prediction="v-ddpm", schedule=always(SCHEDULE)),
    io=ModelIO(
        arguments=forward_args, output=lambda output, grid: grid.padded.to_tokens(output.transpose(1, 2))
    ),
    blocks=Blocks(
        output_layer="proj_out",
        lists={"transformer_blocks": APART},
        returns=("image", "text"),
        text="encoder_hidden_states",
        text_position="first",
        values=(("attn1.to_v",),),
        per_token={"image_rotary_emb": ("image", 0)},
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "c_concat", "ofs"),
        widths=entries(c_crossattn="text_embed_dim"),
        refusal=refusal,
    ),
    cache=Cache(
        modulation=("norm1.linear", "norm2.linear"),
        prompt_modules=("patch_embed.text_proj", "ofs_proj", "ofs_embedding"),
        step_modules=("time_proj", "time_embedding", *LAST_MODULATION),
        image_modules=("patch_embed",),
    ),
    build=Build(patch_module=patch_module, dtypes=BF16_OR_FP16),
    layout=LAYOUT,
)
