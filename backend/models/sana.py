"""SANA 1.0 and 1.5 of NVIDIA, text to image: 20 to 60 blocks of linear attention, cross-attention to the
prompt and an MLP with a 3 x 3 convolution; one latent pixel (of 32 x 32) a token.

Linear attention is a sum over rows (softmax-free, so what ranks exchange does not grow with the picture); the
convolution reads a line above and below. ComfyUI does not have this model, so its files are diffusers
folders, or the transformer's file out of one; the prompt is Gemma 2 2B's last hidden states.
"""

from .calls.sana import adjust, forward_args
from .layouts.sana import LAYOUT
from .plans import COMMON
from .spec import Family

FAMILY = Family(
    name="sana",
    transformer="SanaTransformer2DModel",
    prediction="flow",
    block_lists=("transformer_blocks",),
    returns=("image",),
    attention=("sum", "cross", "surroundings"),
    prompt_only=("attn2.to_k", "attn2.to_v"),
    prompt_modules=("caption_projection",),
    adjust=adjust,
    patch=lambda config: (1, config["patch_size"], config["patch_size"]),
    latent_channels=lambda config: config["in_channels"],
    frames=False,
    conditioning=("c_crossattn", "attention_mask"),
    required=("c_crossattn",),
    only={"guidance_embeds": (False, "SANA-Sprint, a consistency model whose output no solver here reads,")},
    widths=lambda config: {"c_crossattn": config["caption_channels"]},
    forward_args=forward_args,
    output=lambda output, grid: grid.padded.to_tokens(output[:, : grid.shape[0]]),
    tp_plan=COMMON,
    layout=LAYOUT,
)
