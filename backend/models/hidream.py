"""HiDream I1 (full, dev, fast) of HiDream.ai: 16 double-stream and 32 single-stream blocks with experts; text
last, of which every block reads a layer of Llama anew."""

from functools import partial

import torch
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

from ..runtime.opaque_ops import opaque
from .blocks import APART, JOINED, BlockAdapter, Blocks
from .common.replaced_classes import replace_classes
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO
from .key_layout import Layout, blocks_of
from .latent_tokens import negated_tokens


def patchify(patch, latent):
    """Cut images (B, C, H, W) into patches; return tokens (p1 p2 C), no mask, sizes and positions. The
    model's own method pads images that are not square."""
    batch = latent.shape[0]
    rows, columns = (side // patch for side in latent.shape[2:])
    cells = latent.unflatten(3, (columns, patch)).unflatten(2, (rows, patch))
    tokens = cells.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, -1)
    axes = [torch.arange(count, device=latent.device) for count in (1, rows, columns)]
    ids = torch.cartesian_prod(*axes).float()
    return tokens, None, [(rows, columns)] * batch, ids.expand(batch, -1, -1)


class Experts(MOEFeedForwardSwiGLU):
    """The experts, whose numbers of tokens a compiled block cannot know."""

    forward = opaque(MOEFeedForwardSwiGLU.forward)


def patch_module(transformer, config):
    """Patch the transformer: images of any shape, and experts that are called whole."""
    transformer.patchify = partial(patchify, config["patch_size"])
    replace_classes(transformer, {MOEFeedForwardSwiGLU: Experts})


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward: Llama's layers (B, layers, tokens, width) in the order of the
    blocks, the last one for all others."""
    llama = cond["encoder_hidden_states_llama3"].unbind(1)
    count = max(config["llama_layers"]) + 1
    return dict(
        hidden_states=grid.pad(latent),
        timesteps=sigma.expand(latent.shape[0]) * 1000,
        encoder_hidden_states_t5=cond["c_crossattn"],
        encoder_hidden_states_llama3=[llama[min(i, len(llama) - 1)] for i in range(count)],
        pooled_embeds=cond["y"],
    )


#: Width of the released size, and the sizes of a head there and in narrower files, which no shape tells.
RELEASED = 2560
HEAD = 128
NARROW = 32


def config_from_shapes(shapes):
    """Return the arguments of the diffusers class; RoPE axes are (4, 2, 2)/8 of a head. Two experts run."""
    width = shapes["x_embedder.proj.weight"][0]
    double = blocks_of(shapes, "double_stream_blocks")
    single = blocks_of(shapes, "single_stream_blocks")
    head = HEAD if width >= RELEASED else NARROW
    return dict(
        patch_size=2,
        in_channels=shapes["x_embedder.proj.weight"][1] // 4,
        out_channels=shapes["final_layer.linear.weight"][0] // 4,
        num_layers=double,
        num_single_layers=single,
        attention_head_dim=head,
        num_attention_heads=width // head,
        caption_channels=[shapes[f"caption_projection.{i}.linear.weight"][1] for i in (double + single, 0)],
        text_emb_dim=shapes["p_embedder.pooled_embedder.linear_1.weight"][1],
        num_routed_experts=shapes["double_stream_blocks.0.block.ff_i.gate.weight"][0],
        num_activated_experts=2,
        axes_dims_rope=(head // 2, head // 4, head // 4),
        max_resolution=(128, 128),
        llama_layers=tuple(range(double + single)),
    )


LAYOUT = Layout(
    signature=(
        "x_embedder.proj.weight",
        "caption_projection.0.linear.weight",
        "double_stream_blocks.0.block.ff_i.gate.weight",
        "single_stream_blocks.0.block.attn1.q_rms_norm.weight",
        "final_layer.linear.weight",
    ),
    config=config_from_shapes,
)


class LlamaInEveryBlock(BlockAdapter):
    """Blocks read a layer of Llama anew, last in the text; the model counts image tokens between lists."""

    def per_block_text(self, arguments):
        return arguments["encoder_hidden_states_llama3"][0].shape[1]

    def between_lists(self, image, whole):
        return whole(image)

    def text_after_blocks(self, text, whole):
        return text[:, :0]  # the model would cut it off as what is after the whole image


def activated_experts(config):
    """Return the share of the experts that run for a token."""
    return config["num_activated_experts"] / config["num_routed_experts"]


#: Tensor parallelism: pattern of modules -> style.
TENSOR_PLAN = {
    **{f"*.attn1.to_{name}": "colwise" for name in ("q", "k", "v", "q_t", "k_t", "v_t")},
    "*.attn1.to_out": "rowwise",
    "*.attn1.to_out_t": "rowwise",
    "*.q_rms_norm*": "norm",
    "*.k_rms_norm*": "norm",
    "*.w1": "colwise",
    "*.w3": "colwise",
    "*.w2": "rowwise",
}
FAMILY = Family(
    name="hidream",
    transformer="HiDreamImageTransformer2DModel",
    latent=Latent(frames=False),
    io=ModelIO(arguments=forward_args, output=negated_tokens),
    blocks=Blocks(
        lists={"double_stream_blocks": APART, "single_stream_blocks": JOINED},
        returns=("image", "text"),
        text="encoder_hidden_states",
        text_position="last",
        values=(("block.attn1.to_v", "block.attn1.to_v_t"),),
        needs_text_token=True,
        output_layer="final_layer",
        adapter=LlamaInEveryBlock(),
        per_token={"image_rotary_emb": ("joint", 1)},
        text_layers=("block.attn1.to_*_t", "block.ff_t.*"),
        routers=("block.ff_i.gate",),
        flop_shares={"block.ff_i.experts.*": activated_experts},
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "y", "encoder_hidden_states_llama3"),
        required=("c_crossattn", "y", "encoder_hidden_states_llama3"),
        widths=lambda config: {
            "c_crossattn": config["caption_channels"][0],
            "encoder_hidden_states_llama3": config["caption_channels"][1],
            "y": config["text_emb_dim"],
        },
    ),
    cache=Cache(
        modulation=("block.adaLN_modulation.1",),
        prompt_modules=("caption_projection.*.linear", "pe_embedder", "p_embedder"),
        step_modules=("t_embedder", "final_layer.adaLN_modulation"),
        image_modules=("x_embedder",),
        token_modules=("x_embedder.proj",),
    ),
    build=Build(patch_module=patch_module),
    tensor_plan=TENSOR_PLAN,
    layout=LAYOUT,
)
