"""HunyuanVideo of Tencent, text or image to video (v1 concat, v2 replace): 20 double-stream and 40
single-stream blocks in the released size; text last, refined inside the model.

The tokens of a given first frame (v2) have a timestep of their own: diffusers' image_condition_type
"token_replace". The weights are text to video's, and only the request shows which it is, so blocks and
embeddings take both ways.
"""

import math
from operator import itemgetter
from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers.models.embeddings import CombinedTimestepTextProjEmbeddings
from diffusers.models.transformers import transformer_hunyuan_video as hunyuan

from . import flux
from .blocks import APART, BlockAdapter, Blocks
from .common import references
from .common.adaptive_norms import LAST_MODULATION, AdaLayerNormContinuous, AdaLayerNormZero
from .common.double_stream import DOUBLE_STREAM, SINGLE_STREAM
from .common.request_arguments import distilled_guidance
from .common.tensor_plans import COMMON, PARALLEL_MLP, TEXT_LAYERS
from .config_values import constant, entries
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO, Noise
from .key_layout import IN_OUT, Layout, blocks_of, rope_axes, under


def _parts(linear, embedding, first_embedding, parts):
    """Return so many ``parts`` (B, D) of the modulation by the request's timestep, and by the first frame's.
    A cached layer returns the first frame's modulation through ``second``."""
    first = getattr(linear, "second", linear)
    made = (linear(F.silu(embedding)), first(F.silu(first_embedding)))
    return [each.chunk(parts, dim=1) for each in made]


class Norm(AdaLayerNormZero):
    def forward(self, x, emb: Any = None, replaced=None, tokens=0):
        if replaced is None:
            return super().forward(x, emb=emb)
        usual, first = _parts(self.linear, emb, replaced, 6)
        normed = self.norm(x)
        pieces = ((normed[:, :tokens], first), (normed[:, tokens:], usual))
        modulated = [piece * (1 + part[1][:, None]) + part[0][:, None] for piece, part in pieces]
        return torch.cat(modulated, dim=1), *usual[2:], *first[2:]


class FirstFrameBlock(hunyuan.HunyuanVideoTokenReplaceTransformerBlock):
    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        attention_mask=None,
        freqs_cis=None,
        token_replace_emb=None,
        num_tokens=None,
    ):
        if token_replace_emb is None:
            return hunyuan.HunyuanVideoTransformerBlock.forward(
                cast(Any, self), hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis
            )
        count = num_tokens[0] if isinstance(num_tokens, tuple) else num_tokens
        return super().forward(
            hidden_states, encoder_hidden_states, temb, attention_mask, freqs_cis, token_replace_emb, count
        )


class SingleBlock(hunyuan.HunyuanVideoSingleTransformerBlock):
    """``frame_tokens``: how many tokens of text and of image are replaced, or one number for both: as
    ComfyUI, and unlike Tencent's code, this counts a frame's tokens from the text's first token on."""

    def forward(
        self,
        hidden_states,
        encoder_hidden_states,
        temb,
        attention_mask=None,
        image_rotary_emb=None,
        token_replace_emb=None,
        frame_tokens: Any = None,
    ):
        if token_replace_emb is None:
            return super().forward(
                hidden_states, encoder_hidden_states, temb, attention_mask, image_rotary_emb
            )
        tokens = hidden_states.shape[1]
        texts = encoder_hidden_states.shape[1]
        if not isinstance(frame_tokens, tuple):
            frame_tokens = min(frame_tokens, texts), max(0, frame_tokens - texts)
        text, image = frame_tokens
        device = hidden_states.device
        replaced = torch.cat(
            [torch.arange(tokens, device=device) < image, torch.arange(texts, device=device) < text]
        )[None, :, None]
        usual, first = _parts(self.norm.linear, temb, token_replace_emb, 3)

        def part(index: int) -> torch.Tensor:
            # shift, scale, gate, each where it is used: all three are as large as queries, keys and values
            return torch.where(replaced, first[index][:, None], usual[index][:, None])

        joined = torch.cat([hidden_states, encoder_hidden_states], dim=1)
        x = self.norm.norm(joined) * (1 + part(1)) + part(0)
        read = self.attn(
            hidden_states=x[:, :tokens],
            encoder_hidden_states=x[:, tokens:],
            attention_mask=attention_mask,
            image_rotary_emb=image_rotary_emb,
        )
        both = torch.cat([torch.cat(read, dim=1), self.act_mlp(self.proj_mlp(x))], dim=2)
        x = joined + part(2) * self.proj_out(both)
        return x[:, :tokens], x[:, tokens:]


class Condition(hunyuan.HunyuanVideoConditionEmbedding):
    """``guidance`` (B,), or None without it; (B, 2) and (B, 1) where the first frame's timestep follows."""

    def forward(self, timestep, pooled_projection, guidance=None):
        if guidance is None or guidance.ndim == 1:
            return self.embedding(timestep, pooled_projection, guidance), None
        *given, frame = guidance.unbind(1)
        embedding = self.embedding(timestep, pooled_projection, *given)
        replaced = self.embedding(frame, pooled_projection, *given)
        # for cached layers and the last norm, which are given the embedding alone: no field of a tensor
        embedding.second = replaced  # pyright: ignore[reportAttributeAccessIssue]
        return embedding, replaced

    def embedding(self, timestep, pooled_projection, guidance=None):
        """Return what blocks are modulated by, (B, D)."""
        if guidance is None:
            return CombinedTimestepTextProjEmbeddings.forward(cast(Any, self), timestep, pooled_projection)
        return super().forward(timestep, pooled_projection, guidance)[0]


class LastNorm(AdaLayerNormContinuous):
    """The last norm, with a second modulation for the first frame's tokens. ``frame``: how many these are;
    ``tokens``: how many of them are in the call under way."""

    frame = 0
    tokens = 0

    def forward(self, x, embedding):
        replaced = getattr(embedding, "second", None)
        if replaced is None or self.tokens == 0:
            return super().forward(x, embedding)
        # first what calls without a first frame ask for too: cached layers tell their calls apart by number
        usual = super().forward(x[:, self.tokens :], embedding)
        return torch.cat([super().forward(x[:, : self.tokens], replaced), usual], dim=1)


def patch_module(transformer, config):
    """Make every module that has two ways one of those above; their weights stay."""
    embed = transformer.time_text_embed
    embed.image_condition_type = None
    embed.__class__ = Condition
    transformer.norm_out.__class__ = LastNorm
    for block in transformer.transformer_blocks:
        block.__class__ = FirstFrameBlock
        block.norm1.__class__ = Norm
        block.norm1.emb = None
    for block in transformer.single_transformer_blocks:
        block.__class__ = SingleBlock


def prepare(transformer, grid):
    """Set how many tokens a frame has, which the last norm needs."""
    norm = transformer.norm_out
    norm.frame = norm.tokens = grid.counts[1] * grid.counts[2]


class FirstFrame(BlockAdapter):
    """num_tokens and frame_tokens count the first frame's tokens, which come first."""

    def cut(self, call, tokens):
        counted = {"num_tokens": ("image",), "frame_tokens": ("text", "image")}
        given = {name: kinds for name, kinds in counted.items() if call.get(name) is not None}
        return {name: tokens.leading(call[name], kinds) for name, kinds in given.items()}

    def leave(self, transformer, tokens):
        norm: Any = transformer.norm_out
        norm.tokens = tokens.leading(norm.frame, ("image",))[0]


def all_tokens(text):
    """Return a mask (B, tokens) that hides none of ``text`` (B, tokens, D)."""
    return torch.ones(text.shape[:2], dtype=torch.long, device=text.device)


def forward_args(config, grid, latent, sigma, cond):
    """Return the arguments of the forward. Timesteps and guidance run to 1000; c_concat: further channels,
    the image's latent and mask."""
    batch = latent.shape[0]
    text = cond["c_crossattn"]
    guidance = distilled_guidance(config, cond, batch)
    guidance = None if guidance is None else guidance * 1000
    if "guiding_frame_index" in cond:  # v2: the first frame is given, at this timestep
        frame = cond["guiding_frame_index"].reshape(-1).expand(batch)
        guidance = torch.stack([frame] if guidance is None else [guidance, frame], dim=1)
    return dict(
        hidden_states=grid.pad(references.with_channels(latent, cond)),
        encoder_hidden_states=text,
        encoder_attention_mask=cond.get("attention_mask", all_tokens(text)),
        pooled_projections=cond["y"][:, : config["pooled_projection_dim"]],
        timestep=sigma.expand(batch) * 1000,
        guidance=guidance,
    )


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. Image to video models need more channels."""
    if cond["y"].shape[1] < config["pooled_projection_dim"]:
        return (
            f"y has width {cond['y'].shape[1]}, but this model reads {config['pooled_projection_dim']}; "
            f"encode the prompt with HunyuanVideo's text encoders."
        )
    return references.wrong_channels(config["in_channels"], grid, cond)


def shared_config(shapes):
    """Return what HunyuanVideo, 1.5 and HunyuanImage 2.1 derive alike."""
    hidden, channels, *patch = shapes["img_in.proj.weight"]
    head = shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    return dict(
        in_channels=channels,
        out_channels=shapes["final_layer.linear.weight"][0] // math.prod(patch),
        num_attention_heads=hidden // head,
        attention_head_dim=head,
        num_layers=blocks_of(shapes, "double_blocks"),
        num_refiner_layers=blocks_of(shapes, "txt_in.individual_token_refiner.blocks"),
        text_embed_dim=shapes["txt_in.input_embedder.weight"][1],
    )


def video_config(shapes):
    """Return what HunyuanVideo and 1.5 derive alike."""
    config = shared_config(shapes)
    _, _, patch_size_t, patch_size, _ = shapes["img_in.proj.weight"]
    axes = rope_axes(config["attention_head_dim"])
    return config | dict(patch_size=patch_size, patch_size_t=patch_size_t, rope_axes_dim=axes)


def config_from_shapes(shapes):
    return video_config(shapes) | dict(
        num_single_layers=blocks_of(shapes, "single_blocks"),
        guidance_embeds="guidance_in.in_layer.weight" in shapes,
        pooled_projection_dim=shapes["vector_in.in_layer.weight"][1],
    )


TEXT = "context_embedder"
REFINER = {
    "norm1": "norm1",
    "norm2": "norm2",
    "adaLN_modulation.1": "norm_out.linear",
    "self_attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "self_attn.proj": "attn.to_out.0",
    "mlp.0": "ff.net.0.proj",
    "mlp.2": "ff.net.2",
}
#: Names that HunyuanVideo and HunyuanVideo 1.5 share.
NAMES = {
    "img_in.proj": "x_embedder.proj",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
    "txt_in.input_embedder": f"{TEXT}.proj_in",
    **under("txt_in.t_embedder", f"{TEXT}.time_text_embed.timestep_embedder", IN_OUT),
    **under("txt_in.c_embedder", f"{TEXT}.time_text_embed.text_embedder", IN_OUT),
    **under(
        "txt_in.individual_token_refiner.blocks.{}", f"{TEXT}.token_refiner.refiner_blocks.{{}}", REFINER
    ),
    **DOUBLE_STREAM,
}
#: Tencent's own spelling -> ComfyUI's.
SPELLINGS = (
    ("txt_in.t_embedder.mlp.0.", "txt_in.t_embedder.in_layer."),
    ("txt_in.t_embedder.mlp.2.", "txt_in.t_embedder.out_layer."),
    ("txt_in.c_embedder.linear_1.", "txt_in.c_embedder.in_layer."),
    ("txt_in.c_embedder.linear_2.", "txt_in.c_embedder.out_layer."),
    ("_mod.linear.", "_mod.lin."),
    (".modulation.linear.", ".modulation.lin."),
    ("_attn_qkv.", "_attn.qkv."),
    ("_attn_proj.", "_attn.proj."),
    ("mlp.fc1.", "mlp.0."),
    ("mlp.fc2.", "mlp.2."),
    ("_in.mlp.0.", "_in.in_layer."),
    ("_in.mlp.2.", "_in.out_layer."),
    ("_attn_q_norm.weight", "_attn.norm.query_norm.scale"),
    ("_attn_k_norm.weight", "_attn.norm.key_norm.scale"),
    (".q_norm.weight", ".norm.query_norm.scale"),
    (".k_norm.weight", ".norm.key_norm.scale"),
    (".query_norm.weight", ".query_norm.scale"),
    (".key_norm.weight", ".key_norm.scale"),
)
LAYOUT = Layout(
    signature=(
        "img_in.proj.weight",
        "txt_in.individual_token_refiner.blocks.0.norm1.weight",
        "double_blocks.0.img_attn.norm.query_norm.scale",
        "single_blocks.0.linear1.weight",
        "vector_in.in_layer.weight",
        "final_layer.linear.weight",
    ),
    absent=("cond_type_embedding.weight",),
    config=config_from_shapes,
    swapped=("norm_out.linear",),
    spellings=SPELLINGS,
    names=NAMES | flux.EMBEDDERS | SINGLE_STREAM,
)
FAMILY = Family(
    name="hunyuan-video",
    transformer="HunyuanVideoTransformer3DModel",
    latent=Latent(channels=itemgetter("out_channels"), frames=True, pixels=constant(4, 8, 8)),
    noise=Noise(clean_inpaint=True),
    io=ModelIO(arguments=forward_args, prepare=prepare),
    blocks=Blocks(
        lists={"transformer_blocks": APART, "single_transformer_blocks": APART},
        returns=("image", "text"),
        text="encoder_hidden_states",
        text_position="last",
        values=(("attn.to_v", "attn.add_v_proj"),),
        needs_text_token=True,
        text_layers=TEXT_LAYERS,
        per_token={"freqs_cis": ("image", 0), "image_rotary_emb": ("image", 0)},
        output_layer="proj_out",
        adapter=FirstFrame(),
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "y", "guidance", "attention_mask", "c_concat", "guiding_frame_index"),
        required=("c_crossattn", "y"),
        widths=entries(c_crossattn="text_embed_dim"),
        refusal=refusal,
    ),
    cache=Cache(
        prompt_modules=("rope",),
        step_modules=("time_text_embed", "context_embedder", *LAST_MODULATION),
        image_modules=("x_embedder",),
        token_modules=("x_embedder.proj",),
        modulation=("norm1.linear", "norm1_context.linear", "norm.linear"),
    ),
    build=Build(patch_module=patch_module),
    tensor_plan=COMMON | PARALLEL_MLP,
    layout=LAYOUT,
)
