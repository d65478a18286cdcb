"""Train the demo model: python demo/train.py --minutes 30 --out demo/shapes-flux"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script or as a module

from . import flow, latents, scenes, text

PEAK_RATE = 1e-3
WARMUP_STEPS = 100
UNCAPTIONED_SHARE = 0.1  # teaches the empty prompt, which guidance (cfg) needs
EMA_DECAY = 0.999
SHIFT = 3.0
# Half-size images cost a quarter, and words, colours and places are learnt from them as well;
# edges need the full size.
COARSE_STRIDE = 2
COARSE_BATCH_FACTOR = 2
CHECKPOINT_SECONDS = 180


def build_model() -> FluxTransformer2DModel:
    """A Flux architecture of about 5 million parameters."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=latents.CHANNELS * 4,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=32,
        num_attention_heads=6,
        joint_attention_dim=text.WIDTH,
        pooled_projection_dim=text.WIDTH,
        axes_dims_rope=(4, 14, 14),
        guidance_embeds=False,
    )


def make_batch(size: int, rng: random.Random, stride: int = 1):
    """-> (image tokens (B, 256 / stride^2, 64) in [-1, 1], caption from `flow.encode_prompts`)."""
    examples = [scenes.random_example(rng, scenes.SIZE // stride) for _ in range(size)]
    images = torch.stack([image for image, _, _ in examples])
    prompts = ["" if rng.random() < UNCAPTIONED_SHARE else prompt for _, prompt, _ in examples]
    return flow.to_tokens(latents.pack(images)), flow.encode_prompts(prompts)


def random_times(size: int) -> torch.Tensor:
    """(B,) noise levels in (0, 1): half logit-normal, half of them shifted towards noise.

    Places are decided at high noise, and shifted schedules spend most of their steps there.
    """
    times = torch.sigmoid(torch.randn(size))
    shifted = SHIFT * times / (1 + (SHIFT - 1) * times)
    return torch.where(torch.rand(size) < 0.5, shifted, times)


def flow_loss(model, image_tokens, caption, stride: int = 1) -> torch.Tensor:
    """Mean squared error of the predicted velocity noise - image."""
    times = random_times(len(image_tokens))
    noise = torch.randn_like(image_tokens)
    mixing = times.view(-1, 1, 1)
    noisy = mixing * noise + (1 - mixing) * image_tokens
    with torch.autocast("cpu", torch.bfloat16):
        guess = flow.velocity(model, noisy, times, caption, stride)
    return F.mse_loss(guess.float(), noise - image_tokens)


def learning_rate(step: int, progress: float) -> float:
    """Linear warm-up by steps, then linear decay over `progress` in [0, 1]."""
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * max(0.02, 1 - progress)


def update_average(average: dict, model, step: int) -> None:
    """Move the running average of the weights towards the model's; quicker in the first steps."""
    decay = min(EMA_DECAY, (1 + step) / (10 + step))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            average[name].lerp_(weight, 1 - decay)


def save_model(average: dict, folder: Path) -> None:
    """Write the averaged weights as a diffusers folder in bfloat16."""
    model = build_model()
    model.load_state_dict(average)
    model.bfloat16().save_pretrained(folder)
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config["latent_format"] = "shapes"  # how loaders separate this model's latents from a VAE's
    config_file.write_text(json.dumps(config, indent=2) + "\n")
    (folder / "diffusion_pytorch_model.safetensors").chmod(0o644)  # written for its owner only


def train(options) -> dict:
    """Train for `options.minutes`; returns the averaged weights by name."""
    model, rng = build_model(), random.Random(options.seed)
    if options.resume:
        model.load_state_dict(load_file(options.resume))
    average = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), PEAK_RATE, betas=(0.9, 0.99), weight_decay=0.01)
    start, step, saved, recent = time.time(), 0, 0.0, None
    while (progress := (elapsed := time.time() - start) / (options.minutes * 60)) < 1:
        rate = options.rate * learning_rate(step, progress)
        coarse = progress < options.coarse
        loss = train_step(model, optimizer, rate, next_batch(options.batch, rng, coarse))
        update_average(average, model, step)
        recent = loss if recent is None else 0.98 * recent + 0.02 * loss
        step += 1
        if step % 50 == 0:
            print(f"step {step}  {elapsed:.0f} s  loss {recent:.4f}", flush=True)
        if elapsed - saved > CHECKPOINT_SECONDS:
            save_file(average, options.checkpoint)
            saved = elapsed
    save_file(average, options.checkpoint)
    return average


def next_batch(size: int, rng: random.Random, coarse: bool) -> tuple:
    """Arguments of `flow_loss`: a batch of half-size or full-size images."""
    if coarse:
        return *make_batch(size * COARSE_BATCH_FACTOR, rng, COARSE_STRIDE), COARSE_STRIDE
    return *make_batch(size, rng), 1


def train_step(model, optimizer, rate: float, batch) -> float:
    """One optimizer step at a learning rate; returns the loss."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = flow_loss(model, *batch)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30, help="wall time of the training")
    parser.add_argument("--out", type=Path, required=True, help="folder for the trained model")
    parser.add_argument("--coarse", type=float, default=0.4, help="share of time on half-size images")
    parser.add_argument("--batch", type=int, default=16, help="full-size images per step")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on the learning rate")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", type=Path, help="checkpoint to start from")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default=Path(tempfile.gettempdir()) / "shapes-flux.safetensors",
        help="file for the weights so far",
    )
    return parser.parse_args()


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    save_model(train(options), options.out)


if __name__ == "__main__":
    main()
