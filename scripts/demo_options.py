"""What ./scripts/demo takes on its command line. Standard library only: it is read before the environment is
made."""

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DESCRIPTION = "Makes an image with the bundled model on one rank and on two, and says how long each took."
PROMPT = "a red circle left of a blue square on black"
#: Name -> ParallelConfig fields of the ways to use two ranks.
METHODS = {
    "cfg": "cfg_degree",
    "ulysses": "ulysses_degree",
    "ring": "ring_degree",
    "pipefusion": "pipefusion_degree",
}


def png(name: str) -> Path:
    """A file's name on the command line; raises ArgumentTypeError unless it ends in .png."""
    path = Path(name)
    if path.suffix.lower() != ".png" or path.is_dir():
        raise argparse.ArgumentTypeError(f"{name!r} is not the name of a .png file")
    return path


def count(text: str) -> int:
    """A number of the command line; raises ArgumentTypeError where it is not at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="./scripts/demo", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--prompt", default=PROMPT, help=f'like "{PROMPT}"')
    parser.add_argument(
        "--method", choices=METHODS, default="cfg", help="how the two ranks share the work (default: cfg)"
    )
    parser.add_argument("--steps", type=count, default=20)
    parser.add_argument("--cfg", type=float, default=2.5)
    parser.add_argument("--seed", type=int, default=10)
    parser.add_argument(
        "--repeat", type=count, default=3, help="timed runs on each number of ranks (the median is shown)"
    )
    parser.add_argument("--out", type=png, default=ROOT / "output" / "demo.png")
    parser.add_argument(
        "--comfyui",
        type=Path,
        metavar="PATH",
        help="queue workflows/api/demo.json in this ComfyUI, headless, instead",
    )
    return parser.parse_args()


if __name__ == "__main__":
    options()
