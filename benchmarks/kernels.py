"""Every attention kernel on every head size and with a mask: seconds a call, and its distance from torch's.

    python benchmarks/kernels.py [--device cuda] [--kernel NAME] [--head-size SIZE ...] [--json FILE]

One call of 8 heads over 4096 tokens in bf16 on a GPU, over 256 in float32 on the CPU. What a kernel cannot
compute is torch's own, as in the ranks (backend/parallel/attention/kernel_table.py); "own" says whether it
was not. With --json each line is written as it comes, an object: {"kernel", "head_size", "masked", "seconds",
"distance", "own"}, or {"kernel", "head_size", "masked"} with "unavailable": why it cannot be chosen, or
"failed": what it raised."""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
import torch
from torch import Tensor

from backend.config import CHOICES
from backend.parallel.attention.attention_kernels import attend
from backend.parallel.attention.kernel_choice import why_unavailable
from backend.parallel.attention.kernel_table import activated, fits, kernel_of
from backend.runtime.parent_pipe import be_killed_with_parent, end_with_parent

KERNELS = CHOICES["attention"][1:]
#: Of the released models: most have 128; PixArt 72, Hunyuan-DiT 88, Lumina 2 96, which kernels pad or lack.
HEAD_SIZES = (64, 72, 88, 96, 128, 256)
HEADS = 8
#: Device -> tokens, dtype, timed calls.
SIZES = {"cuda": (4096, torch.bfloat16, 20), "cpu": (256, torch.float32, 3)}


def inputs(device: str, head_size: int, masked: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v (1, HEADS, tokens, head size), and a mask that hides the last tenth of the keys. As in
    requests tokens lie slower than heads, queries and keys next to each other."""
    tokens, dtype, _ = SIZES[device]
    generator = torch.Generator().manual_seed(head_size)
    drawn = torch.randn(1, tokens, HEADS, 3 * head_size, generator=generator).to(device, dtype)
    q, k, v = drawn.transpose(1, 2).chunk(3, dim=-1)
    mask = torch.arange(tokens, device=device).view(1, 1, 1, -1) < tokens - tokens // 10
    return q, k, v, mask if masked else None


def seconds(device: str, call) -> float:
    """Time one call, after one that is not timed."""
    rounds = SIZES[device][2]
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / rounds


def row(kernel: str, device: str, head_size: int, masked: bool) -> dict:
    """Measure one kernel; a failure is its reason, so that the others go on."""
    case = {"kernel": kernel, "head_size": head_size, "masked": masked}
    capabilities = [torch.cuda.get_device_capability()] if device == "cuda" else []
    why = why_unavailable(
        kernel, device=device, dtype=SIZES[device][1], head_size=head_size, capabilities=capabilities
    )
    if why:
        return {**case, "unavailable": why}
    q, k, v, mask = inputs(device, head_size, masked)
    own = kernel_of(kernel).call is None or fits(kernel, q, k, masked, lse=False)
    wanted = attend("auto", q.float(), k.float(), v.float(), mask)
    try:
        with activated(kernel):
            out = attend(kernel, q, k, v, mask)
            spent = seconds(device, lambda: attend(kernel, q, k, v, mask))
    except Exception as error:  # a wheel raises what it likes
        return {**case, "failed": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    distance = ((out.float() - wanted).norm() / wanted.norm()).item()
    return {**case, "seconds": spent, "distance": distance, "own": own}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--kernel", choices=KERNELS, help="this one alone")
    parser.add_argument("--head-size", type=int, nargs="+", choices=HEAD_SIZES, default=HEAD_SIZES)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--ends-with-stdin", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.ends_with_stdin:
        end_with_parent()
        be_killed_with_parent()
    for kernel in [chosen.kernel] if chosen.kernel else KERNELS:
        for head_size in chosen.head_size:
            for masked in (False, True):
                measured = row(kernel, chosen.device, head_size, masked)
                print(measured, flush=True)
                if chosen.json:
                    with chosen.json.open("a") as file:
                        file.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
