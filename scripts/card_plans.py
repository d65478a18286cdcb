"""What auto takes on two GeForce cards over PCIe, and what image models gain that do not fit one: the tables
of docs/degrees.md and of README's quick start, planned on headers alone.

    python scripts/card_plans.py [--write]

Prints them; --write puts them into the pages. A test compares both. Nothing here is measured: seconds are
backend/planner/cost.py's, on the machine of docs/scaling.md.
"""

import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests/support")]
import memory_table
import torch
from memory_table import EXPERTS, RESERVED
from page_parts import Part, markdown
from published import RTX4090
from released_forms import checkpoint_of

from backend.config import ParallelConfig
from backend.planner.choose import AUTO, EXACT, PlanChoice, choose
from backend.planner.machine import OVERHEAD, RESERVE, Machine, RequestEstimate
from backend.planner.model_shape import ModelShape
from backend.planner.option import Option
from backend.planner.question import Question
from backend.rank_plan.shape_of import shape_of

PART = Part("docs/degrees.md", "cards", "scripts/card_plans.py")
GATHERED_PART = Part("docs/degrees.md", "gathered", "scripts/card_plans.py")
QUICK_PART = Part("README.md", "quick start", "scripts/card_plans.py")
#: The cards of docs/scaling.md; other GeForce cards have other rates and the same links.
CARD = replace(RTX4090, launch=Machine.launch, overhead=OVERHEAD)
GPUS = 2
#: Degree -> what runners-up call its method.
SHORT = {
    "cfg_degree": "CFG",
    "pipefusion_degree": "PipeFusion",
    "ring_degree": "ring",
    "ulysses_degree": "Ulysses",
    "tensor_parallel_degree": "tensor parallel",
}
#: Share of a card's room from which a line says how much is left.
TIGHT = 0.95
FILES = {file.model: file for file in memory_table.FILES}
#: Tokens of images and text: 1024 x 1024; Qwen-Image 1328 x 1328; videos of 832 x 480 and 81 frames.
SQUARE, LARGE, VIDEO = (4096, 512), (83 * 83, 128), (memory_table.WAN, 512)


@dataclass(frozen=True)
class Row:
    """A line: a file of docs/memory.md (both experts: of the file of one), and a request of it."""

    file: str
    tokens: tuple[int, int]
    steps: int
    cfg: float = 1.0

    @property
    def both(self) -> bool:
        """Do two experts share the cards?"""
        return EXPERTS[1] in self.file

    @property
    def shape(self) -> ModelShape:
        """What the planner reads of the file, with products by dequantized weights."""
        return shape_of_file(self.file.replace(EXPERTS[1], EXPERTS[0]))


BOTH = "Wan 2.2 A14B, both experts, fp8 scaled"
#: GiB of each card -> lines of its table.
TABLES = {
    24: (
        Row("Flux.1 dev, fp8", SQUARE, 20),
        Row("Flux.1 dev, Q4_K", SQUARE, 20),
        Row("Z-Image Turbo, int8 ConvRot", SQUARE, 8),
        Row("Krea 2, int8 ConvRot", SQUARE, 8),
        Row("Qwen-Image 2512, fp8", LARGE, 8),
        Row("Qwen-Image, Q4_K", LARGE, 8),
        Row("Qwen-Image 2512, fp8", LARGE, 4),
        Row("Qwen-Image 2512, fp8", LARGE, 20, 4.0),
        Row("Flux.2 dev, fp8 scaled", SQUARE, 20),
        Row(BOTH, VIDEO, 4),
        Row("HunyuanVideo, fp8", VIDEO, 20),
    ),
    16: (
        Row("Flux.1 dev, fp8", SQUARE, 20),
        Row("Z-Image Turbo, int8 ConvRot", SQUARE, 8),
        Row("Krea 2, int8 ConvRot", SQUARE, 8),
        Row("Qwen-Image 2512, fp8", LARGE, 4),
        Row(BOTH, VIDEO, 4),
    ),
}
#: File -> the template that loads it, or loads it after a change of ``model_name``.
TEMPLATES = {
    "Flux.1 dev, fp8": "flux_txt2img",
    "Z-Image Turbo, int8 ConvRot": "z_image_int8_txt2img",
    "Krea 2, int8 ConvRot": "krea2_int8_lora_txt2img",
    "Qwen-Image 2512, fp8": "qwen_image_lightning_txt2img",
    BOTH: "wan22_lightx2v_t2v",
}

#: How weights are stored -> image models of the tables.
GATHERED = {
    "bf16": ("Flux.1 dev", "Flux.2 dev", "Krea 2", "Qwen-Image", "Z-Image Turbo"),
    "fp8": ("Flux.1 dev", "Qwen-Image 2512"),
    "fp8 scaled": ("Flux.2 dev",),
    "int8 ConvRot": ("Krea 2", "Z-Image Turbo"),
    "Q4_K": ("Flux.1 dev", "Qwen-Image"),
}
#: Plans of a model that does not fit -> cfg, and what they set.
DIVIDING: dict[str, tuple[float, dict]] = {
    "`ring_degree`, `shard_weights`": (1.0, {"ring_degree": GPUS, "shard_weights": True}),
    "`ulysses_degree`, `shard_weights`": (1.0, {"ulysses_degree": GPUS, "shard_weights": True}),
    "`tensor_parallel_degree`": (1.0, {"tensor_parallel_degree": GPUS}),
    "`pipefusion_degree`, `num_pipeline_patch` 1, `cfg` 4.0": (
        4.0,
        {"pipefusion_degree": GPUS, "num_pipeline_patch": 1},
    ),
}


@cache
def shape_of_file(name: str) -> ModelShape:
    """Return the shape of a file of docs/memory.md in bf16."""
    return shape_of(checkpoint_of(FILES[name]), torch.bfloat16)


def question(row: Row, card: int) -> Question:
    """Ask the planner about two empty cards of ``card`` GiB, of which CUDA takes what docs/memory.md says."""
    machine = replace(CARD, memory=(card * 2**30 - RESERVED + RESERVE,) * GPUS)
    request = RequestEstimate(*row.tokens, row.steps, 1 if row.cfg == 1.0 else 2)
    return Question(row.shape, request, machine, GPUS, others=(row.shape,) if row.both else ())


def inputs(option: Option) -> str:
    """Write the inputs of Parallel Config that make a plan."""
    written = [f"`{name}` {GPUS}" for name in SHORT if getattr(option.plan, name) == GPUS]
    return ", ".join([*written, *_besides(option)])


def short(option: Option) -> str:
    """Write the methods of a plan."""
    methods = [word for name, word in SHORT.items() if getattr(option.plan, name) == GPUS]
    return " with ".join([*methods, *_besides(option)])


def _besides(option: Option) -> list[str]:
    plan = option.plan
    one_patch = ["`num_pipeline_patch` 1"] if plan.pipefusion_degree > 1 and plan.patches == 1 else []
    return [*one_patch, *(["`shard_weights`"] if plan.shard_weights else [])]


def times(choice: PlanChoice, option: Option) -> str:
    """Write how many times as fast as one card a plan is."""
    return f"{choice.one.sampling_seconds / option.sampling_seconds:.1f}"


def turns(option: Option) -> str:
    """Write whether the experts of a model leave each other room in turn."""
    return ", in turns" if option.swap_seconds else ""


def cells(row: Row, card: int) -> tuple[str, ...]:
    """Return the line of a file on two cards."""
    asked = question(row, card)
    choice = choose(asked, AUTO)
    exact = choose(asked, EXACT)
    option, room = choice.option, choice.option.room
    others = [exact.option, *exact.runners_up] if option.plan.has_stale_kv else list(exact.runners_up)
    others = [each for each in others if each.plan.world_size == GPUS]  # one GPU is 1.0 times itself
    tight = f" ({option.bytes / 1e9:.1f} of {room / 1e9:.1f} GB)" if option.bytes > TIGHT * room else ""
    runners_up = ", ".join(f"{short(each)}{turns(each)} {times(choice, each)}" for each in others[:2])
    name = row.file if choice.one.fits else f"{row.file} (does not fit one)"
    took = f"{inputs(option)}{turns(option)}{tight}"
    return name, f"{row.cfg}, {row.steps}", took, times(choice, option), runners_up


def table(card: int) -> str:
    """Write the table of two cards of ``card`` GiB."""
    head = ("your model", "`cfg`, steps", "auto takes", "times one GPU", "exact runners-up")
    return markdown(head, [cells(row, card) for row in TABLES[card]])


def tables() -> str:
    """Write the tables of all cards."""
    return "\n".join(f"Two cards of {card} GB:\n\n{table(card)}" for card in TABLES)


def quick() -> str:
    """Write README's table: what auto takes for a template on two cards of either size."""
    sizes = sorted(TABLES, reverse=True)
    rows = []
    for row in TABLES[min(sizes)]:
        plans = []
        for card in sizes:
            name, _, took, factor, _ = cells(row, card)
            plans.append(f"{took}: {factor}{name.removeprefix(row.file)}")
        rows.append((row.file, TEMPLATES[row.file], f"{row.cfg}, {row.steps}", *plans))
    head = ("your model", "template", "`cfg`, steps", *(f"two of {card} GB" for card in sizes))
    return markdown(head, rows)


def gain(file: str, card: int, cfg: float, degrees: dict) -> float:
    """Return how many times as fast as one card a plan is, whether it fits or not."""
    tokens = LARGE if file.startswith("Qwen") else SQUARE
    asked = question(Row(file, tokens, 20, cfg), card)
    one, plan = (asked.option(each) for each in (ParallelConfig(), ParallelConfig(**degrees)))
    return one.sampling_seconds / plan.sampling_seconds


def gathered() -> str:
    """Write least and most that plans gain of image models, by how their weights are stored."""
    rows = []
    for form, models in GATHERED.items():
        cells = [f"{form} ({', '.join(models)})"]
        for cfg, degrees in DIVIDING.values():
            gains = [gain(f"{model}, {form}", card, cfg, degrees) for model in models for card in TABLES]
            least, most = f"{min(gains):.1f}", f"{max(gains):.1f}"
            cells.append(least if least == most else f"{least} to {most}")
        rows.append(tuple(cells))
    return markdown(("weights", *DIVIDING), rows)


if __name__ == "__main__":
    made = tables()
    if "--write" in sys.argv[1:]:
        PART.write(made)
        GATHERED_PART.write(gathered())
        QUICK_PART.write(quick())
    print(made)
    print(gathered())
