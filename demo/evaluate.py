"""Measure the demo model: python demo/evaluate.py --model demo/shapes-flux --sheet sheet.png"""

import argparse
import sys
import time
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from PIL import Image, ImageDraw

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script or as a module

from . import flow, shapes

COLUMNS = 8
LABEL_HEIGHT = 40  # image pixels under each image of the sheet
BATCH = 16


def paint(model, prompts: list[str], options) -> torch.Tensor:
    """-> images (B, 256, 256, 3) in [0, 1], a batch at a time."""
    images = []
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        seed = options.seed + first
        latent = flow.sample(model, batch, options.steps, options.cfg, options.shift, seed)
        images.append(shapes.decode(latent))
    return torch.cat(images)


def contact_sheet(images, prompts: list[str], checks: list[shapes.Check]) -> Image.Image:
    """All images in a grid, prompts underneath, failed ones in red."""
    height, width = images.shape[1:3]
    rows = -(-len(prompts) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * width, rows * (height + LABEL_HEIGHT)), "black")
    pen = ImageDraw.Draw(sheet)
    for index, (image, prompt, check) in enumerate(zip(images, prompts, checks)):
        corner = index % COLUMNS * width, index // COLUMNS * (height + LABEL_HEIGHT)
        sheet.paste(Image.fromarray((image * 255).round().byte().numpy()), corner)
        label = prompt.replace(" on ", "\non ").replace(" of ", " of\n")
        pen.text((corner[0] + 4, corner[1] + height), label, fill="white" if check else "red")
    return sheet


def share(outcomes: list) -> str:
    """How many of the outcomes are true, as a text."""
    right = sum(map(bool, outcomes))
    return f"{right} of {len(outcomes)} ({right / len(outcomes):.1%})"


def read_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the trained model")
    parser.add_argument("--n", type=int, default=60, help="number of prompts")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg", type=float, default=2.5)
    parser.add_argument("--shift", type=float, default=1.0, help="schedule shift; 1 is linear")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--sheet", type=Path, help="PNG file for a contact sheet")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    # float32: CPUs without bfloat16 arithmetic are slow in it.
    model = FluxTransformer2DModel.from_pretrained(options.model, torch_dtype=torch.float32).eval()
    prompts = shapes.random_prompts(options.n, options.seed)
    start = time.time()
    images = paint(model, prompts, options)
    seconds = (time.time() - start) / len(prompts)
    checks = [shapes.check_image(prompt, image) for prompt, image in zip(prompts, images)]
    for prompt, check in zip(prompts, checks):
        if not check:
            print(f"{prompt}: {'; '.join(check.problems)}")
    print(f"{share(checks)} right, {seconds:.2f} s per image")
    print(f"{share([not check.misplaced for check in checks])} right if shapes do not count")
    if options.sheet:
        contact_sheet(images, prompts, checks).save(options.sheet)


if __name__ == "__main__":
    main()
