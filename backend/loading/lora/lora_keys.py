"""LoRA files: which tensors of a transformer their keys name.

A key is PREFIX + MODULE + ROLE (lora_spellings.py). MODULE is a module of the single file (ComfyUI's and
BFL's names, kohya's with _ for .) or of the diffusers class: the family's Layout says which parameters.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import astuple, dataclass
from pathlib import Path

from ...errors import UnsupportedError, quoted, some
from ..files.allowed_folders import ANYWHERE, Folders
from ..files.regular_files import file_state
from ..files.safetensors_files import TensorFiles
from .adapters import SCALES, Adapter, Difference, LoHa, LoRA, LoRAByHead
from .lokr import LoKr
from .lora_file_bytes import matrix
from .lora_header import HeaderAlpha, header_alpha
from .lora_spellings import DEFAULT, KEY, REFUSED, TEXT_ENCODER, USO_KEYS, check_spelling, from_uso
from .lora_targets import Target, Targets
from .lora_validation import check_form

KINDS: tuple[type[Adapter], ...] = (LoRA, LoHa, LoKr, Difference)
#: Modules that read the latent, under the names of single files and of diffusers.
INPUTS = ("img_in", "x_embedder", "patch_embedding", "patchify_proj", "proj_in", "pos_embed")
#: Keys that are named under a node, of those that are left out; the log has more.
MAX_NAMED = 3
#: Far beyond the node's 100, and far below what float32 holds.
MAX_STRENGTH = 1_000_000


class MisfitError(UnsupportedError):
    """An adapter that does not fit; a file with half or more of such is refused. ``short``: it and why."""

    def __init__(self, short: str, message: str):
        self.short = short
        super().__init__(message)


@dataclass(frozen=True)
class LoraUse:
    """A LoRA file and how much of it is added. ``stamp`` changes with the file; empty where there is none."""

    path: str
    strength: float
    stamp: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lora:
    """A LoRA file and what it changes of one transformer. ``unmatched``: keys that name nothing there;
    ``left_out``: tensors whose change is not added, and why. ``header``: an alpha that is not read. ``keys``:
    how many the file has."""

    path: str
    adapters: list[tuple[Target, Adapter]]
    unmatched: list[str]
    left_out: list[str]
    header: HeaderAlpha | None = None
    keys: int = 0

    @property
    def of_text(self) -> list[str]:
        """The unmatched keys that are for a text encoder."""
        return [key for key in self.unmatched if TEXT_ENCODER.match(key)]

    @property
    def unknown(self) -> list[str]:
        """The other unmatched keys."""
        return [key for key in self.unmatched if not TEXT_ENCODER.match(key)]

    @property
    def warning(self) -> str:
        """Say which keys are unmatched, what is left out and which alpha is not read; empty: none."""
        of = f"of the LoRA {Path(self.path).name} were not loaded"
        sentences = []
        if self.unknown:
            what = f"{len(self.unknown)} keys {of}, because this model has nothing of their names"
            sentences.append(f"{what}: {some(self.unknown, 20)}.")
        if self.of_text:
            what = f"{len(self.of_text)} keys {of}, because they are for the text encoder"
            sentences.append(f"{what}: {some(self.of_text)}.")
        if self.left_out:
            sentences.append(f"{len(self.left_out)} changes {of}: {'; '.join(self.left_out[:5])}.")
        if self.header:
            sentences.append(f"Of the LoRA {Path(self.path).name}: {self.header}.")
        return " ".join(sentences)

    @property
    def note(self) -> str:
        """One short line for the graph: how much is added, and what is not."""
        changed = [target.name.partition("[")[0] for target, _ in self.adapters]
        layers = len({name.removesuffix(".bias").removesuffix(".weight") for name in changed})
        parts = [f"LoRA on {layers} layer{'s' * (layers > 1)}"]
        if self.unknown:
            left = f"{len(self.unknown)} of {self.keys} keys left out, for which this model has nothing"
            parts.append(f"{left} ({some(self.unknown, MAX_NAMED)})")
        if self.of_text:
            of_text = f"{len(self.of_text)} of {self.keys} keys are for the text encoder"
            parts.append(f"{of_text}, which this node does not use")
        if self.left_out:
            left = f"{len(self.left_out)} of {len(self.adapters) + len(self.left_out)} changes left out"
            parts.append(f"{left}, which do not fit")
        if self.header:
            parts.append(str(self.header))
        return " · ".join(parts)


def lora_stack(loras: list, folders: Folders = ANYWHERE) -> tuple[LoraUse, ...]:
    """Check the ``loras`` of a message, [[path, strength], ...]. Raises UnsupportedError."""
    uses = []
    for lora in loras:
        if not _is_use(lora):
            what = f"loras holds {quoted(lora, 200)}, which is not a pair of a path and a strength"
            raise UnsupportedError(f"{what} (a finite number, at most {MAX_STRENGTH:,}).")
        path, strength = lora
        folders.check(path)
        uses.append(LoraUse(path, float(strength), file_state(Path(path))))
    return tuple(uses)


def stack_digest(stack: tuple[LoraUse, ...]) -> str:
    """Return what tells LoRAs with their strengths, in this state of their files, from others."""
    return hashlib.sha256(json.dumps([astuple(use) for use in stack]).encode()).hexdigest()[:16]


def _is_use(lora) -> bool:
    match lora:
        case [str(), bool()]:
            return False
        case [str(), int() | float() as strength]:
            return abs(strength) <= MAX_STRENGTH  # False for NaN
    return False


def open_lora(path: str, targets: Targets, model: str) -> Lora:
    """Open the LoRA at ``path`` for the transformer of ``targets``, which messages call ``model``, by its
    header. Raises UnsupportedError where it names nothing there, has other sizes or an unsupported kind."""
    where = Path(path)
    if not where.is_file():
        raise UnsupportedError(
            f"there is no LoRA at {path:.300}; refresh the page and choose lora_name again."
        )
    files = TensorFiles([where])
    is_uso = files.shapes.keys() >= USO_KEYS
    if not is_uso:
        check_spelling(where.name, files.shapes)
    modules = defaultdict(dict)
    unmatched = []
    for key in files.shapes:
        match = KEY.fullmatch(from_uso(key) if is_uso else key)
        if match is None or match.lastgroup in modules[match["stem"]]:
            unmatched.append(key)
        else:
            modules[match["stem"]][match.lastgroup] = key
    adapters = []
    misfits = []
    for stem, keys in modules.items():
        bias = {"difference": keys.pop("bias")} if "bias" in keys else {}
        for leaf, roles in (("", keys), (".bias", bias)):
            target = targets.find(stem, leaf) if set(roles) - SCALES else None
            if target is None:
                unmatched += roles.values()
                continue
            try:
                adapters.append((target, _adapter(where.name, files, roles, target, model)))
            except MisfitError as error:
                misfits.append(error)
    if misfits and len(misfits) >= len(adapters):  # it was made for another model
        raise misfits[0]
    if not adapters:
        raise _nothing_here(where.name, files.shapes, targets, model)
    chosen, twice = _once_each(adapters)
    left_out = [each.short for each in misfits] + [
        f"{target.name} is changed by another one, too" for target in twice
    ]
    header = header_alpha(files.metadata, [adapter for _, adapter in chosen])
    return Lora(path, chosen, unmatched, left_out, header, len(files.shapes))


def _once_each(adapters: list[tuple[Target, Adapter]]) -> tuple[list[tuple[Target, Adapter]], list[Target]]:
    """Split adapters into those to add and the targets of others: of several that change one parameter, that
    of the largest tensor counts. Files of Z-Image have a stacked tensor and, once more, its parts under names
    that ComfyUI does not know (diffusers' converter drops them as redundant)."""
    taken = set()
    chosen = []
    twice = []
    for target, adapter in sorted(adapters, key=lambda each: -len(each[0].pieces)):
        if taken.isdisjoint(target.pieces):
            taken |= target.pieces.keys()
            chosen.append((target, adapter))
        else:
            twice.append(target)
    return chosen, twice


def _nothing_here(name: str, keys: Collection[str], targets: Targets, model: str) -> UnsupportedError:
    """Say why nothing of a LoRA is for this model."""
    others = [key for key in keys if not TEXT_ENCODER.match(key)]
    if not others:
        return UnsupportedError(
            f"the LoRA {name} is for the text encoder alone, which this node does not use; add it with "
            f"ComfyUI's Load LoRA at strength_model 0. Its keys begin with {some(keys)}."
        )
    return UnsupportedError(
        f"the LoRA {name} was made for another model and has nothing for {model}; choose a LoRA of "
        f"this model. Its keys begin with {some(others)}, while this model has modules like "
        f"{targets.examples}, looked for with and without the prefixes diffusion_model., transformer., "
        f"conditional_transformer., lora_unet_, lora_transformer_ and lycoris_."
    )


def _adapter(name: str, files: TensorFiles, keys: dict[str, str], target: Target, model: str) -> Adapter:
    if "refused" in keys:
        match = KEY.fullmatch(keys["refused"])
        assert match  # the key was sorted by this pattern
        kind, remedy = next(
            remedy_of_word for word, remedy_of_word in REFUSED.items() if word in match["refused"]
        )
        what = f"the LoRA {name} has {quoted(keys['refused'])} ({kind}), which is not supported"
        raise UnsupportedError(f"{what}; {remedy}.")
    if "difference" in keys:  # which counts alone in ComfyUI, too
        keys = {role: key for role, key in keys.items() if role == "difference" or role in SCALES}
    kind = next((kind for kind in KINDS if set(keys) - SCALES in kind.ROLES), None)
    if kind is None:
        what = f"of {target.name} it has only {some(keys.values())}"
        raise MisfitError(what, f"the LoRA {name} is incomplete: {what}; download it again.")
    if kind is LoRA and target.head and DEFAULT in keys["up"]:
        adapter = LoRAByHead(files, keys, target.shape, target.head)
    else:
        adapter = kind(files, keys, target.shape)
    check_form(name, adapter)
    is_control = adapter.size == (target.shape[0], 2 * target.shape[1])
    if is_control and target.name.split(".")[0] in INPUTS:
        raise UnsupportedError(
            f"the LoRA {name} widens the input of {target.name} from {target.shape[1]} to {adapter.size[1]}, "
            f"as a control LoRA does, which is not supported; use KSampler for it, or a model that was made "
            f"with this control."
        )
    if adapter.size != target.shape:
        size = _by_side(adapter.size)
        here = _by_side(target.shape)
        raise MisfitError(
            f"that of {target.name} is {size}, but the tensor is {here}",
            f"the LoRA {name} was made for another model: its change of {target.name} is {size}, but in "
            f"{model} that tensor is {here}; choose a LoRA of this model.",
        )
    magnitudes = keys.get("dora_scale")
    height, width = target.shape
    if magnitudes and matrix(files.shapes[magnitudes]) not in ((height, 1), (1, width)):
        raise UnsupportedError(
            f"the LoRA {name} has {quoted(magnitudes)} of {_by_side(files.shapes[magnitudes])}, which is "
            f"neither a row nor a column of a tensor of {_by_side(target.shape)}; download the file again."
        )
    return adapter


def _by_side(shape) -> str:
    return " x ".join(map(str, shape))
