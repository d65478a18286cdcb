"""MiniMax-H3: 50 blocks over one stream of text, stereo audio and video; both latents are denoised at once,
each on a noise schedule of its own."""

from operator import itemgetter

import torch

from .blocks import JOINED, Blocks
from .common.call_state import OwnTokens
from .common.minimax_h3_model import end_with_own_tokens
from .common.request_arguments import once
from .common.tensor_plans import COMMON
from .config_values import constant, entries
from .family import Build, Cache, Conditioning, Family, Latent, ModelIO, Nested
from .key_layout import Layout, blocks_of, under

#: Flow shift of the video's and the audio's schedule; solvers step both on the video's.
SHIFT, AUDIO_SHIFT = 12.0, 3.0
#: Video frames of the latent frames, which repeat; steps of the audio's clock (40 Hz) a video frame (24 Hz).
FRAMES, CLOCK = (1, 4, 4, 4, 4), 5.0 / 3.0
VIDEO, TEXT, AUDIO = range(3)
KINDS = {"video": VIDEO, "audio": AUDIO, "text": TEXT}
#: Times of reference images and reference audio, which are almost, and quite, without noise.
REFERENCE_TIMES = (0.999, 1.0)


def audio_sigma(sigma):
    """Return the noise level of the audio where the video's is ``sigma``."""
    base = sigma / (SHIFT + sigma * (1.0 - SHIFT))
    return AUDIO_SHIFT * base / (1.0 + (AUDIO_SHIFT - 1.0) * base)


def rescale(sigma):
    """Return the factors of both streams: the solvers' audio is the model's times the ratio of the two noise
    levels."""
    sigma = sigma.clamp(min=1e-6)
    scale = SHIFT / AUDIO_SHIFT
    audio = audio_sigma(sigma)
    one = torch.ones_like(sigma)
    return [
        (one, 0.0 * one, one),
        (audio / sigma, (1.0 - scale) * (audio / sigma), 1.0 + (scale - 1.0) * audio),
    ]


def axis(length, other):
    """Return the positions along a side of the image, in thirty-seconds of the square of its area."""
    ratio = length / (length * other) ** 0.5
    return (torch.arange(length, dtype=torch.float64) * (ratio / length) + (1.0 - ratio) / 2.0) * 32.0


def positions(grid, text, references, origin):
    """Return (text + references + audio + video, 3): text by number; at ``origin`` on the same clock the
    audio, its channels at the image's sides, and the video. ``references``: positions of the reference
    tokens."""
    (frames, rows, columns), (_, channels, length) = (one.counts for one in grid.grids)
    y = axis(rows, columns)
    x = axis(columns, rows)
    spans = torch.tensor([CLOCK * FRAMES[i % len(FRAMES)] for i in range(frames)], dtype=torch.float64)
    clock = torch.cat([torch.zeros(1, dtype=torch.float64), spans[:-1].cumsum(0)]) + origin
    moments = torch.arange(length, dtype=torch.float64) + origin
    words = torch.arange(text, dtype=torch.float64)
    nought = torch.zeros(1, dtype=torch.float64)
    texts = torch.cartesian_prod(words, nought, nought)
    audio = [torch.cartesian_prod(moments, nought, side[None]) for side in (x[0], x[-1])]
    video = torch.cartesian_prod(clock, y, x)
    return torch.cat([texts, references.double().cpu(), *audio, video]).float()


def forward_args(config, grid, tokens, sigma, cond):
    """Return the arguments of the forward. Times count from noise (0) to image (1); text has the video's
    time. Reference tokens (keyframes, references and their audio) stand between text and audio."""
    video, audio = grid.divide(tokens)
    sigma = sigma.clamp(min=1e-6)
    times = [1.0 - sigma, 1.0 - audio_sigma(sigma)]
    if "given_tags" in cond and cond["given_tags"].shape[1]:
        clean = cond.get("given_times")
        if clean is None:
            clean = once(cond, "reference times", sigma.new_tensor, REFERENCE_TIMES)
        times += [torch.maximum(now, least) for now, least in zip(times, clean.reshape(-1))]

    def with_references(name, tokens):
        return torch.cat([cond[name], tokens.to(cond[name])], dim=1) if name in cond else tokens

    return dict(
        hidden_states=with_references("given_video", video),
        audio_hidden_states=with_references("given_audio", audio),
        encoder_hidden_states=cond["c_crossattn"],
        timestep=torch.stack(times),
        latent_tokens=(audio.shape[1], video.shape[1]),
        **once(cond, "sequence", _sequence, grid, cond, tokens.device),
    )


def _sequence(grid, cond, device):
    """Return the arguments that say what the tokens of the sequence are. They are made on the host: a device
    would be waited for at every index."""
    video_tokens, audio_tokens = (one.tokens for one in grid.grids)
    text_length = cond["c_crossattn"].shape[1]
    references = torch.empty(0, dtype=torch.long)
    if "given_tags" in cond:
        references = cond["given_tags"][0].long().cpu()

    def full(value, count):
        return torch.full((count,), value)

    kinds = torch.cat(
        [full(TEXT, text_length), references, full(AUDIO, audio_tokens), full(VIDEO, video_tokens)]
    )
    reference_moments = torch.where(references == AUDIO, 3, 2)
    moments = torch.cat(
        [full(0, text_length), reference_moments, full(1, audio_tokens), full(0, video_tokens)]
    )
    tags = kinds
    if "text_tags" in cond:
        tags = torch.cat([cond["text_tags"][0].long().cpu(), kinds[text_length:]])
    given = cond["given_positions"][0] if len(references) else torch.empty(0, 3)
    origin = float(cond["origin"].reshape(-1)[0]) if "origin" in cond else text_length
    places = positions(grid, text_length, given, origin)
    arguments = dict(
        timestep_indices=moments,
        token_tags=tags,
        position_ids=places,
        **{f"{name}_indices": (kinds == kind).nonzero()[:, 0] for name, kind in KINDS.items()},
    )
    return {name: value.to(device) for name, value in arguments.items()}


def count_text_tokens(cond):
    """Count the tokens before the audio: of text, and references."""
    return cond["c_crossattn"].shape[1] + (cond["given_tags"].shape[1] if "given_tags" in cond else 0)


def refusal(config, grid, cond):
    """Return why these inputs do not run, or None. The audio's two channels stand at the sides of the image.
    Reference tokens are described in full."""
    channels = grid.grids[1].counts[1]
    if channels != 2:
        return (
            f"the audio latent has {channels} channels of audio, but MiniMax-H3 makes stereo: shape "
            f"(batch, {config['audio_in_channels']}, 2, time)."
        )
    if "text_tags" in cond and not set(cond["text_tags"].flatten().tolist()) <= {VIDEO, TEXT, AUDIO}:
        return (
            f"text_tags are of {VIDEO} (an image's token), {TEXT} (text) and {AUDIO} (audio), but these "
            f"hold others; encode the prompt again."
        )
    if ("given_tags" in cond) != ("given_positions" in cond):
        return (
            "given_tags (what each reference token is) and given_positions (where it stands) come together; "
            "send both."
        )
    return _wrong_references(config, cond)


def _wrong_references(config, cond):
    """Return why reference tokens are not what their tags say, or None."""
    tags = cond.get("given_tags", torch.empty(1, 0))
    given = []
    tagged = []
    for name, kind, width in (
        ("given_video", VIDEO, 4 * config["in_channels"]),
        ("given_audio", AUDIO, config["audio_in_channels"]),
    ):
        tokens = cond.get(name, torch.empty(1, 0, width))
        if tokens.shape[2] != width:
            return (
                f"{name} has width {tokens.shape[2]}, but a token of this model has {width} numbers; "
                f"encode it with the VAE of this model."
            )
        given.append(tokens.shape[1])
        tagged.append(int((tags == kind).sum()) // len(tags))
    if given == tagged and sum(tagged) == tags.shape[1]:
        return None
    return (
        f"given_video and given_audio have {given[0]} and {given[1]} tokens, but given_tags has {tagged[0]} "
        f"of video (0) and {tagged[1]} of audio (2)."
    )


def patch_module(transformer, config):
    """Patch the transformer: rotary frequencies from the file, which diffusers computes; a last layer for
    the tokens of each latent."""
    end_with_own_tokens(transformer, LATENTS.order)
    transformer.rope.register_buffer("inv_freq", transformer.rope.inv_freq, persistent=True)


def config_from_shapes(shapes):
    head = shapes["blocks.0.attn.q_norm.weight"][0]
    first = shapes["time_embedder.proj_in.weight"]
    return dict(
        patch_size=(1, 2, 2),
        hidden_size=shapes["video_patch_proj.weight"][0],
        in_channels=shapes["video_patch_proj.weight"][1] // 4,
        audio_in_channels=shapes["audio_patch_proj.weight"][1],
        num_layers=blocks_of(shapes, "blocks"),
        num_refiner_layers=blocks_of(shapes, "token_refiner.blocks"),
        attention_head_dim=head,
        num_attention_heads=shapes["blocks.0.attn.qkv_proj.weight"][0] // (3 * head),
        ffn_dim=shapes["blocks.0.mlp.fc2.weight"][1],
        text_dim=shapes["condition_proj.weight"][1],
        freq_dim=first[1],
        time_embed_hidden_dim=first[0],
        time_embed_dim=shapes["time_embedder.proj_out.weight"][0],
        rope_freq_dim=shapes["rope.inv_freq"][0],
    )


BLOCK = {
    "attn.qkv_proj": "attn.to_q attn.to_k attn.to_v",
    "attn.out_proj": "attn.to_out.0",
    "attn.q_norm": "attn.norm_q",
    "attn.k_norm": "attn.norm_k",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    **{name: name for name in ("norm1", "norm2", "adaln_proj.linear")},
}
LAYOUT = Layout(
    signature=(
        "video_patch_proj.weight",
        "audio_patch_proj.weight",
        "time_embedder.proj_in.weight",
        "token_refiner.blocks.0.attn.qkv_proj.weight",
        "blocks.0.adaln_proj.linear.weight",
        "final_layer.audio_out.weight",
    ),
    config=config_from_shapes,
    swapped=("transformer_blocks.{}.ff.net.0.proj", "token_refiner.refiner_blocks.{}.ff.net.0.proj"),
    names={
        **under("blocks.{}", "transformer_blocks.{}", BLOCK),
        **under("token_refiner.blocks.{}", "token_refiner.refiner_blocks.{}", BLOCK),
        "video_patch_proj": "proj_in",
        "audio_patch_proj": "audio_proj_in",
        "condition_proj": "context_embedder",
        "time_embedder.proj_in": "time_embedder.linear_1",
        "time_embedder.proj_out": "time_embedder.linear_2",
        "final_layer.norm": "norm_out.norm",
        "final_layer.adaln_proj.linear": "norm_out.linear",
        "final_layer.video_out": "proj_out",
        "final_layer.audio_out": "audio_proj_out",
    },
    by_head={
        "blocks.{}.attn.qkv_proj": "transformer_blocks.0.attn.norm_q.weight",
        "token_refiner.blocks.{}.attn.qkv_proj": "token_refiner.refiner_blocks.0.attn.norm_q.weight",
    },
)
#: Given tokens: their values, what each is, where and when it stands.
REFERENCES = ("given_video", "given_audio", "given_tags", "given_positions", "given_times")
LATENTS = Nested(
    ("video", "audio"),
    patches=lambda config: (tuple(config["patch_size"]), (1, 1, 1)),
    channels=lambda config: (config["in_channels"], config["audio_in_channels"]),
    order=(1, 0),
    rescale=rescale,
)
FLOAT32 = (
    "rope.inv_freq",
    "proj_in.*",
    "audio_proj_in.*",
    "time_embedder.*",
    "proj_out.*",
    "audio_proj_out.*",
)
FAMILY = Family(
    name="minimax-h3",
    transformer="MiniMaxH3Transformer3DModel",
    latent=Latent(pixels=constant(4, 16, 16), nested=LATENTS),
    io=ModelIO(forward_args, takes_tokens=True, output=lambda output, grid: -output),
    blocks=Blocks(
        output_layer="outputs",
        adapter=OwnTokens(),
        lists={"transformer_blocks": JOINED},
        text_position="first",
        values=(("attn.to_v",),),
        per_token={"adaln_indices": ("joint", 0), "rotary_emb": ("joint", 0)},
        width=itemgetter("hidden_size"),
    ),
    conditioning=Conditioning(
        accepted=("c_crossattn", "text_tags", *REFERENCES, "origin"),
        widths=entries(c_crossattn="text_dim"),
        precise=("given_video", "given_audio", "given_positions", "given_times", "origin"),
        count_text_tokens=count_text_tokens,
        refusal=refusal,
    ),
    cache=Cache(
        prompt_modules=("rope", "context_embedder", "token_refiner"),
        step_modules=("time_proj", "time_embedder", "norm_out.linear"),
        image_modules=("proj_in", "audio_proj_in"),
        token_modules=("proj_in", "audio_proj_in"),
        token_latents={"proj_in": "video", "audio_proj_in": "audio"},
        references_first=True,
        modulation=("adaln_proj.linear",),
        modulation_per_sample=False,
    ),
    build=Build(float32=FLOAT32, patch_module=patch_module),
    tensor_plan={"*.ff.net.0.proj": "gated colwise", **COMMON},
    layout=LAYOUT,
)
