"""The strength that a LoRA was trained for, where its file's header alone has it.

Trainers of PEFT's kind may write alpha into the header and no tensor of it: as JSON (diffusers'
lora_adapter_metadata), under the transformer's name (SimpleTuner) or as plain ``alpha`` (lightx2v's Turbo
LoRAs of MiniMax-H3). ComfyUI reads tensors alone, and the ranks add what ComfyUI adds.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from .adapters import Adapter

#: Names of alpha, after the name of a part of the pipeline ("transformer.lora_alpha").
ALPHAS = ("lora_alpha", "network_alpha", "alpha")
#: The entry that holds PEFT's configuration as JSON (diffusers).
PEFT = "lora_adapter_metadata"
TEXT_ENCODER = "text_encoder"
#: How an entry says yes.
YES = (True, "true", "True")


@dataclass(frozen=True)
class HeaderAlpha:
    """The alpha of a header for changes of ``rank``, and the strength that makes of rank what it says."""

    alpha: float
    rank: int
    strength: float

    def __str__(self):
        what = f"its header says alpha {self.alpha:g} at rank {self.rank}, which ComfyUI does not read"
        return f"{what}: strength {self.strength:.4g} is as trained"


def header_alpha(metadata: Mapping[str, str], adapters: Collection[Adapter]) -> HeaderAlpha | None:
    """Return what the header says that no tensor does; None where both agree, where any change has an alpha
    of its own, and where the header's is not one number for changes of one rank."""
    ranks = {adapter.rank for adapter in adapters if adapter.rank is not None}
    if len(ranks) != 1 or any("alpha" in adapter.keys for adapter in adapters):
        return None
    entries = dict(_entries(metadata))
    if any(name.endswith("_pattern") and value for name, value in entries.items()):
        return None  # some changes have another one
    alphas = {_number(value) for name, value in entries.items() if name.rpartition(".")[2] in ALPHAS}
    if len(alphas) != 1:
        return None
    rank = ranks.pop()
    alpha = alphas.pop()
    is_by_root = any(value in YES for name, value in entries.items() if name.endswith("use_rslora"))
    strength = alpha / (math.sqrt(rank) if is_by_root else rank)
    if not 0 < strength < math.inf or strength == 1:
        return None
    return HeaderAlpha(alpha, rank, strength)


def _entries(metadata: Mapping[str, str]) -> Iterator[tuple[str, object]]:
    """Yield the header's entries and those of PEFT's configuration, without the text encoders'."""
    parts = [metadata, _peft(metadata.get(PEFT, "{}"))]
    for part in parts:
        yield from ((name, value) for name, value in part.items() if not name.startswith(TEXT_ENCODER))


def _peft(text: str) -> dict:
    """Return PEFT's configuration; {} where it is no JSON object, which no weight depends on."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(value: object) -> float:
    """Return the number that an entry holds, as one or as text; NaN where it holds none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan
