"""PixArt-alpha and PixArt-sigma: 28 blocks, noise prediction on a discrete schedule, the prompt read through
cross-attention."""

from dataclasses import asdict
from math import inf, isqrt

import torch
from diffusers.models.embeddings import PatchEmbed, get_2d_sincos_pos_embed

from ..errors import UnsupportedError, quoted
from .blocks import APART, Blocks
from .common.request_arguments import once
from .config_values import entries
from .discrete_schedule import DiscreteSchedule, of_scheduler, prediction
from .family import FP16_OR_BF16, Build, Cache, Conditioning, Family, Latent, ModelIO, Noise
from .key_layout import MLP, Layout, blocks_of, under


class Embedder(PatchEmbed):
    """diffusers' embedder with positions that fit each latent.

    stated_scale: of positions, in a file that has its table, or None.
    """

    stated_scale: float | None

    def fit(self, grid):
        """Scale the position table with the latent's size, as ComfyUI does, or by what is stated. diffusers
        keeps the trained one."""
        height, width = grid.padded.shape[1:]
        middle = (height + width) // 2
        scale = self.stated_scale or max(round(middle / 64), 1)
        table = get_2d_sincos_pos_embed(
            self.proj.out_channels,
            grid.counts[1:],
            interpolation_scale=scale,
            base_size=max(round(middle / 64) * 64 // self.patch_size, 1),
            output_type="pt",
        )
        self.pos_embed = table.float().unsqueeze(0).to(self.pos_embed.device)
        self.height, self.width = grid.counts[1:]


def prepare(transformer, grid):
    """Fit the positions to the latent."""
    transformer.pos_embed.fit(grid)


def patch_module(transformer, config):
    """Let the embedder fit its positions, and keep the scale of a file that has its table."""
    transformer.pos_embed.__class__ = Embedder
    transformer.pos_embed.stated_scale = config.get("position_scale")


def pipeline_entries(pipeline):
    """Return the noise schedule and the scale of latents that a pipeline's folder states, None where it does
    not; no folder has a table of positions. Raises UnsupportedError where it predicts anything but noise."""
    return {
        "schedule": _stated_schedule(pipeline.get("scheduler")),
        "latent_scale": _stated_scale(pipeline.get("vae", {})),
        "position_scale": None,
    }


def _stated_schedule(scheduler):
    if scheduler is None:
        return None
    schedule = of_scheduler(scheduler)
    if schedule is None or prediction(scheduler) != "eps":
        raise UnsupportedError(
            f"the pipeline's scheduler ({quoted(scheduler.get('_class_name'))}) is for a model that predicts "
            f"{prediction(scheduler)}, and PixArt predicts noise; use the folder's own scheduler, with the "
            f"prediction_type epsilon."
        )
    return asdict(schedule)


def _stated_scale(vae):
    scale = vae.get("scaling_factor")
    if scale is not None and not (isinstance(scale, (int, float)) and 0 < scale < inf):
        raise UnsupportedError(
            f"the scaling_factor of the pipeline's VAE is {quoted(scale)}, and it is a number above 0; "
            f"download the folder again."
        )
    return scale


def schedule(config):
    """Return the noise levels of timesteps: those of the pipeline's folder, or of the released models."""
    stated = config.get("schedule")
    return DiscreteSchedule(**stated) if stated else SCHEDULE


def is_alpha(config):
    """Return whether the model is given the image's size. Older folders do not say, and mean the large
    model."""
    uses_size = config["use_additional_conditions"]
    return config["sample_size"] == 128 if uses_size is None else uses_size


def forward_args(config, grid, latent, timestep, cond):
    """Return the arguments of the forward. alpha is also told the image's size and aspect ratio."""
    batch, (height, width) = latent.shape[0], latent.shape[2:]

    def size_argument(name, *numbers):
        if not is_alpha(config):
            return None
        value = cond.get(name)
        if value is None:
            value = once(cond, name, lambda: latent.new_tensor([numbers], dtype=torch.float32))
        return value.expand(batch, len(numbers))

    return dict(
        hidden_states=grid.pad(latent),
        encoder_hidden_states=cond["c_crossattn"],
        timestep=timestep.expand(batch),
        added_cond_kwargs=dict(
            resolution=size_argument("c_size", height * 8.0, width * 8.0),
            aspect_ratio=size_argument("c_ar", height / width),
        ),
    )


HEADS = 16


def config_from_shapes(shapes):
    """Return the arguments of PixArtTransformer2DModel, and position_scale: some files keep their table of
    positions, (1, tokens, width), by whose size ComfyUI scales positions at every size of the latent."""
    hidden, channels, patch, _ = shapes["x_embedder.proj.weight"]
    table = shapes.get("pos_embed")
    scale = None if table is None else max(isqrt(table[1]) * patch // 64, 1)
    return dict(
        num_attention_heads=HEADS,
        attention_head_dim=hidden // HEADS,
        in_channels=channels,
        out_channels=shapes["final_layer.linear.weight"][0] // patch**2,
        num_layers=blocks_of(shapes, "blocks"),
        cross_attention_dim=hidden,
        sample_size=128,
        patch_size=patch,
        caption_channels=shapes["y_embedder.y_proj.fc1.weight"][1],
        use_additional_conditions="csize_embedder.mlp.0.weight" in shapes,
        position_scale=scale,
    )


BLOCK = "transformer_blocks.{}"
TIME = "adaln_single.emb"
LAYOUT = Layout(
    signature=(
        "x_embedder.proj.weight",
        "t_block.1.weight",
        "y_embedder.y_proj.fc1.weight",
        "blocks.0.scale_shift_table",
        "blocks.0.cross_attn.kv_linear.weight",
        "final_layer.linear.weight",
    ),
    config=config_from_shapes,
    unread={
        "y_embedder.y_embedding": "the prompt of training without one; an empty prompt is encoded instead",
        "pos_embed": "the table of positions, which is computed for each size",
    },
    names={
        "x_embedder.proj": "pos_embed.proj",
        "t_block.1": "adaln_single.linear",
        "final_layer.linear": "proj_out",
        "final_layer.scale_shift_table": "scale_shift_table",
        **under("t_embedder", f"{TIME}.timestep_embedder", MLP),
        **under("csize_embedder", f"{TIME}.resolution_embedder", MLP),
        **under("ar_embedder", f"{TIME}.aspect_ratio_embedder", MLP),
        "y_embedder.y_proj.fc1": "caption_projection.linear_1",
        "y_embedder.y_proj.fc2": "caption_projection.linear_2",
        "blocks.{}.scale_shift_table": f"{BLOCK}.scale_shift_table",
        "blocks.{}.attn.qkv": f"{BLOCK}.attn1.to_q {BLOCK}.attn1.to_k {BLOCK}.attn1.to_v",
        "blocks.{}.attn.proj": f"{BLOCK}.attn1.to_out.0",
        "blocks.{}.cross_attn.q_linear": f"{BLOCK}.attn2.to_q",
        "blocks.{}.cross_attn.kv_linear": f"{BLOCK}.attn2.to_k {BLOCK}.attn2.to_v",
        "blocks.{}.cross_attn.proj": f"{BLOCK}.attn2.to_out.0",
        "blocks.{}.mlp.fc1": f"{BLOCK}.ff.net.0.proj",
        "blocks.{}.mlp.fc2": f"{BLOCK}.ff.net.2",
    },
)
SCHEDULE = DiscreteSchedule(start=0.0001, end=0.02, kind="sqrt_linear")
FAMILY = Family(
    name="pixart",
    transformer="PixArtTransformer2DModel",
    latent=Latent(frames=False),
    noise=Noise(prediction="eps", schedule=schedule),
    io=ModelIO(arguments=forward_args, prepare=prepare),
    blocks=Blocks(
        output_layer="proj_out",
        lists={"transformer_blocks": APART},
        attention=("image", "cross"),
        values=(("attn1.to_v",),),
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "c_size", "c_ar"),
        widths=entries(c_crossattn="caption_channels"),
    ),
    cache=Cache(
        prompt_modules=("caption_projection",),
        step_modules=("adaln_single",),
        image_modules=("pos_embed",),
        token_modules=("pos_embed.proj",),
        prompt_layers=("attn2.to_k", "attn2.to_v"),
    ),
    build=Build(dtypes=FP16_OR_BF16, patch_module=patch_module, pipeline=pipeline_entries),
    layout=LAYOUT,
)
