"""Self-check of a transformer: every parallel method of two ranks against one process, on the CPU, with
random prompts.

    python scripts/check_family.py MODEL [MODEL ...]

MODEL is a file or a diffusers folder; small ones do (any widths, random weights). Prints how the blocks are
taken apart and the relative difference of each method's latent. Exact methods must stay below 1e-5;
PipeFusion's stale steps drift, and no drift at all would mean that nothing was stale. Ends with status 1
where a check fails.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

#: The environment variable that names the file in which the ranks meet.
STORE_VARIABLE = "PARALLEL_DIT_CHECK_STORE"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--size", default="12x16", help="rows x columns of the latent (12x16)")
    parser.add_argument("--frames", type=int, default=3, help="of the latent of a video model")
    parser.add_argument(
        "--latents",
        default="",
        help="shapes of the latents of a model that denoises several at once, 24x3x12x16,32x2x15 for "
        "MiniMax-H3",
    )
    parser.add_argument("--text", type=int, default=9, help="text tokens")
    parser.add_argument(
        "--conditioning",
        help="safetensors file with positive.NAME and negative.NAME tensors, by ComfyUI's names of model "
        "arguments, for families that need more than a prompt",
    )
    parser.add_argument("--json", type=Path, help="write the results there too")
    return parser.parse_args()


def start_ranks() -> int:
    """Run this command line on two ranks that meet in files of a private folder, as the ranks of a backend
    do; the exit status. This process is their agent: it imports neither the engine nor diffusers."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run_agent

    from backend.client.launching.agent_command import rendezvous_flags
    from backend.client.launching.rank_environment import closed_doors

    with tempfile.TemporaryDirectory(prefix="parallel-dit-") as folder:
        os.environ.update(closed_doors(dict(os.environ)))
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", STORE_VARIABLE: f"{folder}/ranks-store"}
        arguments = [*rendezvous_flags(Path(folder)), "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
        arguments += ["--log-dir", f"{folder}/ranks", __file__, *sys.argv[1:]]
        try:
            run_agent(arguments)
        except ChildFailedError:
            return 1
    return 0


def main():
    chosen = options()
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, and for every rank
    if "RANK" not in os.environ:
        sys.exit(start_ranks())
    import family_ranks

    family_ranks.run(chosen, os.environ[STORE_VARIABLE])


if __name__ == "__main__":
    main()
