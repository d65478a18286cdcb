"""Paints a prompt with the bundled model on one rank and on two, through the nodes' own client, socket and
backend."""

import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import torch
from demo_options import METHODS, options
from PIL import Image

from backend.client import pool
from backend.config import ConfigError, ParallelConfig
from backend.protocol import BackendError, RefusedError, Sample
from demo import shapes

MODEL = ROOT / "demo" / "shapes-flux"
BAR = 30


def request(model: str, prompt: str, steps: int, cfg: float, seed: int) -> Sample:
    """The Sample that ComfyUI's nodes would send: noise of the seed, the schedule of diffusers' flow-matching
    scheduler, two prompts."""
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist())
    noise = torch.randn(1, 16, 32, 32, generator=torch.Generator().manual_seed(seed))
    sigmas = torch.as_tensor(scheduler.sigmas, dtype=torch.float32)
    tensors = {"noise": noise, "latent": torch.zeros_like(noise), "sigmas": sigmas}
    for branch, text in (("positive", prompt), ("negative", "")):
        tensors[f"{branch}.c_crossattn"], tensors[f"{branch}.y"] = shapes.encode_prompt(text)
    return Sample(model=model, sampler="euler", cfg=cfg, seed=seed, tensors=tensors)


def show(progress):
    """A progress bar on the terminal."""
    filled = BAR * progress.step // progress.total
    print(
        f"\r  [{'#' * filled}{'.' * (BAR - filled)}] step {progress.step}/{progress.total}",
        end="",
        file=sys.stderr,
        flush=True,
    )


def paint(config: ParallelConfig, options) -> tuple[torch.Tensor, float]:
    """The latent (1, 16, 32, 32) in the model's space, and the median seconds of a run on a warm backend."""
    print(
        f"{config.product} on the {config.resolve_device(torch.cuda.device_count())}: starting ...",
        file=sys.stderr,
    )
    pool.allow(MODEL)
    backend = pool.backend_for(config)
    message = request(
        backend.load(str(MODEL)).model, options.prompt, options.steps, options.cfg, options.seed
    )
    message = replace(message, num_pipeline_patch=config.num_pipeline_patch, warmup_steps=config.warmup_steps)
    seconds = []
    for _ in range(options.repeat + 1):  # the first one warms up
        began = time.perf_counter()
        result = backend.sample(message, show)
        assert result is not None  # nothing cancels it
        seconds.append(time.perf_counter() - began)
        samples = result.tensors["samples"]
    print(file=sys.stderr)
    return samples, statistics.median(seconds[1:])


def save(samples: torch.Tensor, path: Path):
    """Write the image of a latent as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = shapes.decode(shapes.to_vae_units(samples))[0]
    Image.fromarray((image * 255).round().byte().numpy()).save(path)


def device() -> str:
    """cuda where there is a GPU for each of the two ranks; one GPU cannot show what two do, so then the
    CPU."""
    # is_available asks the driver too, which may be too old for this torch
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= 2 else "cpu"


def main():
    chosen = options()
    if chosen.comfyui:
        import demo_comfyui

        return demo_comfyui.run(chosen.comfyui, chosen.out)
    # on the CPU a rank stands for a GPU: one thread each, or one rank would take the cores that two need
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        one, alone = paint(ParallelConfig(device=device()), chosen)
        two_ranks = replace(ParallelConfig(device=device()), **{METHODS[chosen.method]: 2})
        two, together = paint(two_ranks, chosen)
    except (ConfigError, RefusedError, BackendError) as error:
        sys.exit(str(error))
    finally:
        pool.close_all()
    save(two, chosen.out)
    check = shapes.check_image(chosen.prompt, shapes.decode(shapes.to_vae_units(two))[0])
    print(
        f"1 rank: {alone:.2f} s, 2 ranks ({chosen.method}): {together:.2f} s, {alone / together:.2f} times "
        f"as fast (medians of {chosen.repeat})."
    )
    print(f"The two latents differ by {((one - two).norm() / one.norm()).item():.1e} of their size.")
    print(f'{chosen.out}: "{chosen.prompt}"{"" if check else " (" + "; ".join(check.problems) + ")"}')


if __name__ == "__main__":
    main()
