"""MiniMax-H3: the arguments of its forward, what it refuses and what is changed in diffusers' modules."""

import torch

#: Flow shift of the video's and of the audio's schedule; the solvers step both on the video's, the audio scaled by their ratio.
SHIFT, AUDIO_SHIFT = 12.0, 3.0
#: Video frames of the latent frames, which repeat, and steps of the audio's clock (40 Hz) a video frame (24 Hz).
FRAMES, CLOCK = (1, 4, 4, 4, 4), 5.0 / 3.0
VIDEO, TEXT, AUDIO = range(3)


def audio_sigma(sigma):
    """The noise level of the audio where the video's is ``sigma``."""
    base = sigma / (SHIFT + sigma * (1.0 - SHIFT))
    return AUDIO_SHIFT * base / (1.0 + (AUDIO_SHIFT - 1.0) * base)


def carry(sigma):
    """The solvers' audio is the model's times the ratio of the two noise levels."""
    sigma, scale = sigma.clamp(min=1e-6), SHIFT / AUDIO_SHIFT
    audio, one = audio_sigma(sigma), torch.ones_like(sigma)
    return [(one, 0.0 * one, one), (audio / sigma, (1.0 - scale) * (audio / sigma), 1.0 + (scale - 1.0) * audio)]


def axis(length, other):
    """Positions along a side of the picture, in thirty-seconds of the square of its area."""
    ratio = length / (length * other) ** 0.5
    return (torch.arange(length, dtype=torch.float64) * (ratio / length) + (1.0 - ratio) / 2.0) * 32.0


def positions(grid, text):
    """(text + audio + video, 3): rows of text by their number; behind them on the same clock the audio, its channels at the picture's sides, and the video."""
    (frames, rows, columns), (_, channels, length) = (part.counts for part in grid.parts)
    y, x = axis(rows, columns), axis(columns, rows)
    spans = torch.tensor([CLOCK * FRAMES[i % len(FRAMES)] for i in range(frames)], dtype=torch.float64)
    clock = torch.cat([torch.zeros(1, dtype=torch.float64), spans[:-1].cumsum(0)]) + text
    heard = torch.arange(length, dtype=torch.float64) + text
    words = torch.arange(text, dtype=torch.float64)
    nought = torch.zeros(1, dtype=torch.float64)
    box = lambda *axes: torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
    audio = [box(heard, nought, side[None]) for side in (x[0], x[-1])]
    return torch.cat([box(words, nought, nought), *audio, box(clock, y, x)]).float()


def forward_args(config, grid, latent, sigma, cond):
    """Times count from noise (0) to picture (1); text is at the video's."""
    (video, audio), text, sigma = grid.unpack(latent), cond["c_crossattn"], sigma.clamp(min=1e-6)
    kinds = [(TEXT, 0, text.shape[1]), (AUDIO, 1, grid.parts[1].tokens), (VIDEO, 0, grid.parts[0].tokens)]
    each = lambda value: torch.cat([torch.full((kind[2],), kind[value], device=latent.device) for kind in kinds])
    tags = each(0)
    rows = lambda tag: (tags == tag).nonzero()[:, 0]
    return dict(
        hidden_states=grid.parts[0].to_tokens(video), audio_hidden_states=grid.parts[1].to_tokens(audio), encoder_hidden_states=text,
        timestep=torch.stack([1.0 - sigma, 1.0 - audio_sigma(sigma)]), timestep_indices=each(1), token_tags=tags, position_ids=positions(grid, text.shape[1]).to(latent.device),
        video_indices=rows(VIDEO), audio_indices=rows(AUDIO), text_indices=rows(TEXT))


def refusal(config, grid, cond):
    """The audio's two channels stand at the sides of the picture."""
    channels = grid.parts[1].counts[1]
    return None if channels == 2 else f"the audio latent has {channels} channels of sound, but MiniMax-H3 makes stereo: shape (batch, {config['audio_in_channels']}, 2, time)."


def adjust(transformer, config):
    """Files hold the rotary frequencies, which diffusers computes."""
    transformer.rope.register_buffer("inv_freq", transformer.rope.inv_freq, persistent=True)
