"""Models that ComfyUI does not have, by diffusers, called as ComfyUI calls its own."""

import torch
from diffusers import Flux3Transformer2DModel, QwenImage21Transformer2DModel, SanaTransformer2DModel


class Diffusers(torch.nn.Module):
    """A small SANA of diffusers, called as ComfyUI calls its own models; its keys are diffusers'."""

    def __init__(self):
        super().__init__()
        self.model = SanaTransformer2DModel(
            num_attention_heads=14,
            num_layers=3,
            num_cross_attention_heads=4,
            cross_attention_dim=448,
            caption_channels=64,
        )
        self.dtype = torch.float32

    def forward(self, x, timestep, context, attention_mask, **ignored):
        return self.model(x, context, timestep, encoder_attention_mask=attention_mask).sample


class DiffusersFlux3(torch.nn.Module):
    """A small FLUX.3 of diffusers, called as ComfyUI calls its own models."""

    def __init__(self):
        super().__init__()
        self.model = Flux3Transformer2DModel(
            num_layers=4,
            num_single_layers=2,
            attention_head_dim=32,
            num_attention_heads=4,
            joint_attention_dim=64,
            axes_dims_rope=(8, 8, 8, 8),
        )
        self.dtype = torch.float32

    def forward(self, x, timestep, context, **ignored):
        height, width, rows = *x.shape[-2:], context.shape[1]
        image = (
            torch.cartesian_prod(
                torch.arange(1), torch.arange(height), torch.arange(width), torch.arange(1)
            ).float()
            * 0.5
        )
        text = torch.cartesian_prod(torch.arange(1), torch.arange(1), torch.arange(1), torch.arange(rows))
        out = self.model(
            x.flatten(2).transpose(1, 2), context, timestep / 1000, image, text, return_dict=False
        )[0]
        return out.transpose(1, 2).reshape(x.shape)


FLUX3 = {
    "attn.to_q": "q_proj",
    "attn.to_k": "k_proj",
    "attn.to_v": "v_proj",
    "attn.to_out.0": "attn_out",
    "attn.norm_q.weight": "norm.query_norm.scale",
    "attn.norm_k.weight": "norm.key_norm.scale",
    "ff.linear_in": "mlp_in",
    "ff.linear_out": "mlp_out",
    "single_transformer_blocks.": "single_blocks.",
    "x_embedders.": "emb_in.",
    "context_embedder.": "txt_in.",
    "timestep_embedder.linear_1": "time_in.in_layer",
    "timestep_embedder.linear_2": "time_in.out_layer",
    "proj_out.": "final_layer.image.linear.",
    "norm_out.linear": "final_layer.image.adaLN_modulation.1",
    "modulations.image.linear": "modulations.image.lin",
    "modulations.image_cond.linear": "modulations.image_cond.lin",
    "modulations.txt.linear": "modulations.txt.lin",
}


def flux3_file(key: str) -> str:
    """Black Forest Labs' name of a parameter of diffusers'."""
    for ours, theirs in FLUX3.items():
        key = key.replace(ours, theirs)
    return "content_" + key if key.startswith("mode_blocks.") else key


class DiffusersQwenImage21(torch.nn.Module):
    """A small Qwen-Image 2.1 of diffusers, called as ComfyUI calls its own models and fed as its pipeline
    feeds it."""

    def __init__(self):
        super().__init__()
        self.model = QwenImage21Transformer2DModel(
            in_channels=64,
            num_layers=4,
            attention_head_dim=32,
            num_attention_heads=4,
            context_in_dim=64,
            axes_dims_rope=(4, 14, 14),
        )
        self.dtype = torch.float32

    def forward(self, x, timestep, context, attention_mask=None, **ignored):
        height, width, rows, tokens = *x.shape[-2:], context.shape[1], x.shape[-2] * x.shape[-1]
        slots = (torch.arange(rows + tokens // 4) >= rows).expand(x.shape[0], -1)
        out = self.model(
            x.flatten(2).transpose(1, 2),
            context,
            timestep,
            [[(1, height, width)]] * x.shape[0],
            slots,
            attention_mask,
            return_dict=False,
        )[0]
        return out[:, -tokens:].transpose(1, 2).reshape(x.shape)
