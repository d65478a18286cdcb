"""Which ranks hold which released files: the tables of docs/memory.md, by describe() on headers alone.

    python scripts/memory_table.py [--write]

Prints them; --write puts them into the page. A test compares both.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
from page_parts import Part, markdown
from released_forms import File, checkpoint_of

from backend.config import ConfigError, ParallelConfig
from backend.errors import UnsupportedError
from backend.loading.checkpoint import Checkpoint
from backend.rank_plan import RankPlan, RequestSize, describe

PART = Part("docs/memory.md", "memory", "scripts/memory_table.py")
RANKS = (2, 4, 8)
#: Name -> fields of ParallelConfig for a number of ranks.
METHODS = {
    "Ulysses": lambda ranks: {"ulysses_degree": ranks},
    "TP": lambda ranks: {"tensor_parallel_degree": ranks},
    "PipeFusion": lambda ranks: {"pipefusion_degree": ranks},
    "FSDP": lambda ranks: {"ulysses_degree": ranks, "shard_weights": True},
}
#: Memory of cards in GiB, and what CUDA, its allocator and the screen take of it, in bytes.
CARDS = (12, 16, 24, 32, 48, 80)
RESERVED = 1_500_000_000
#: Calls of the model in a request, without CFG, as distilled models take.
CALLS = 8
#: Tokens of Wan at 832 x 480 and 81 frames, of LTX at 1280 x 704 and 121.
WAN, LTX = 21 * 30 * 52, 16 * 22 * 40
FLUX, WAN22 = "saved__flux1-dev", "wan2.2-i2v-A14B"
H3 = "h3__minimax_h3_fl2va_int8_convrot__hash_known_"
LTX23 = "var__ltx-2.3-22b-dev_all_in_one"
FILES = (
    File("Flux.1 dev, bf16", "", FLUX),
    File("Flux.1 dev, fp8", "", "var__flux1-dev-fp8-e4m3fn__Kijai_"),
    File("Flux.1 Kontext, fp8 scaled", "", "var__flux1-kontext_fp8_scaled_legacy"),
    File("Flux.1 dev, Q8_0", "Q8_0", FLUX),
    File("Flux.1 dev, Q4_K", "Q4_K", FLUX),
    File("Flux.2 dev, bf16", "", "flux2-dev"),
    File("Flux.2 dev, fp8 scaled", "fp8 scaled", "flux2-dev"),
    File("Flux.2 dev, Q4_K", "Q4_K", "flux2-dev"),
    File("Flux.2 klein 9B, int8 ConvRot", "", "var__flux2-klein-9b_int8_convrot"),
    File("Flux.2 klein 9B, nvfp4", "", "var__flux2-klein-9b_nvfp4_comfy_quant"),
    File("Flux.2 klein 4B, bf16", "", "flux2-klein-4b"),
    File("Qwen-Image, bf16", "", "saved__qwen-image"),
    File("Qwen-Image, int8 ConvRot", "int8 ConvRot", "saved__qwen-image"),
    File("Qwen-Image 2512, fp8", "", "var__qwen_image_2512_fp8_scaled_comfy_quant"),
    File("Qwen-Image, Q4_K", "Q4_K", "saved__qwen-image"),
    File("Qwen-Image 2.1, int8 ConvRot", "int8 ConvRot", "QwenImage21Transformer2DModel"),
    File("Z-Image Turbo, bf16", "", "z-image-turbo"),
    File("Z-Image Turbo, int8 ConvRot", "int8 ConvRot", "z-image-turbo"),
    File("Krea 2, bf16", "", "saved__krea2"),
    File("Krea 2, int8 ConvRot", "int8 ConvRot", "saved__krea2"),
    File("Wan 2.2 A14B, one expert, bf16", "", WAN22, WAN),
    File("Wan 2.2 A14B, one expert, int8 ConvRot", "int8 ConvRot", WAN22, WAN),
    File("Wan 2.2 A14B, one expert, fp8 scaled", "", "var__wan2.2_fp8_e5m2_scaled_KJ", WAN),
    File("Wan 2.2 A14B, one expert, Q4_K", "Q4_K", WAN22, WAN),
    File("LTX-2.3 22B, bf16", "", LTX23, LTX),
    File("LTX-2.3 22B, fp8 scaled", "fp8 scaled", LTX23, LTX),
    File("MiniMax-H3, int8 ConvRot", "", H3, LTX),
    File("HunyuanVideo, fp8", "", "var__hunyuan_video_720_cfgdistill_fp8_e4m3fn__Kijai_", WAN),
)
#: Models of two experts: both stay loaded where both are used.
EXPERTS = ("Wan 2.2 A14B, one expert", "Wan 2.2 A14B, both experts")


def planned(checkpoint: Checkpoint, file: File, **fields) -> list[RankPlan] | None:
    """Plan every rank of a file; None where a degree does not fit the model."""
    config = ParallelConfig(**fields)
    request = RequestSize(file.image, file.text, prompts=1, calls=CALLS)
    try:
        return describe(config, checkpoint, request)
    except (ConfigError, UnsupportedError):
        return None


def gigabytes_of_plans(plans: list[RankPlan] | None, experts: int) -> float | None:
    """Count what the fullest rank holds of ``experts`` such files, in 1e9 bytes."""
    if plans is None:
        return None
    return max(plan.device_bytes + (experts - 1) * plan.weight_bytes for plan in plans) / 1e9


def needs(file: File) -> Iterator[tuple[str, dict[tuple[str, int], float | None]]]:
    """Yield (name, (method, ranks) -> gigabytes) of a file, and of two experts of it."""
    checkpoint = checkpoint_of(file)
    counts = {file.model: 1}
    if file.model.startswith(EXPERTS[0]):
        counts[file.model.replace(*EXPERTS)] = 2
    plans = {("one rank", 1): planned(checkpoint, file)}
    for method, fields in METHODS.items():
        for ranks in RANKS:
            plans[method, ranks] = planned(checkpoint, file, **fields(ranks))
    for name, experts in counts.items():
        yield name, {which: gigabytes_of_plans(of_file, experts) for which, of_file in plans.items()}


def fewest(needs_of: dict[tuple[str, int], float | None], card: int) -> tuple[int, list[str]]:
    """Return the fewest cards of ``card`` GiB that hold a model, and by which methods; 0 where none do."""
    room = (card * 2**30 - RESERVED) / 1e9
    for ranks in (1, *RANKS):
        methods = [
            name for (name, count), need in needs_of.items() if count == ranks and need and need <= room
        ]
        if methods:
            return ranks, methods
    return 0, []


def fits(
    needs_of: dict[tuple[str, int], float | None],
    card: int,
    needs_of_one: dict[tuple[str, int], float | None],
) -> str:
    """Write the fewest cards of ``card`` GiB that hold a model, and by which methods. ``needs_of_one``: of
    one expert, where these are of two: auto lets them take turns where fewer cards hold one."""
    ranks, methods = fewest(needs_of, card)
    written = f"{ranks}: {', '.join(methods)}" if ranks > 1 else "1" if ranks else "no"
    of_one, _ = fewest(needs_of_one, card)
    return f"{written} ({of_one}, in turns)" if of_one and of_one != ranks else written


def rows(file: File) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the lines of a file in both tables."""
    source = "derived" if file.form or file.header.endswith("Model") else "released"
    lines = []
    of_models = list(needs(file))
    _, of_one = of_models[0]
    for name, need in of_models:
        cells = (f"{value:.1f}" if value else "-" for value in need.values())
        lines.append(((name, source, *cells), (name, *(fits(need, card, of_one) for card in CARDS))))
    return lines


def tables(files: tuple[File, ...] = FILES) -> str:
    """Write both tables."""
    lines = [line for file in files for line in rows(file)]
    head = ("file", "header", "1 rank", *(f"{method} {ranks}" for method in METHODS for ranks in RANKS))
    cards = ("file", *(f"{card} GB" for card in CARDS))
    held = markdown(head, [line[0] for line in lines])
    return f"{held}\n## Which cards they fit\n\n{markdown(cards, [line[1] for line in lines])}"


if __name__ == "__main__":
    made = tables()
    if "--write" in sys.argv[1:]:
        PART.write(made)
    print(made)
