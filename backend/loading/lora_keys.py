"""LoRA files: which tensors of a transformer their keys name.

A key is PREFIX + MODULE + ROLE (lora_spellings.py). MODULE is a module of the single file (ComfyUI's and
BFL's names, kohya's with _ for .) or of the diffusers class; the family's Layout says which parameters either
one means, so no family needs code here.
"""

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path

from ..errors import UnsupportedError, quoted, some
from ..models.key_layout import Layout, Shapes
from .adapters import SCALES, Adapter, Difference, LoHa, LoRA, LoRAByHead, matrix
from .allowed_folders import ANYWHERE, Folders
from .lokr import LoKr
from .lora_selection import MisfitError, Target, check_most, once_each
from .lora_spellings import ALIASES, DEFAULT, KEY, PREFIX, REFUSED, ROWS, USO_KEYS, check_spelling, from_uso
from .lora_validation import check_form
from .parameter_sources import Source, sources
from .safetensors_files import TensorFiles

KINDS: tuple[type[Adapter], ...] = (LoRA, LoHa, LoKr, Difference)
#: Modules that read the latent, under the names of single files and of diffusers.
INPUTS = ("img_in", "x_embedder", "patch_embedding", "patchify_proj", "proj_in", "pos_embed")
#: Parameters that are rows of one tensor, which LoRAs can name without the rest of it.
QKV = (".to_q.weight", ".to_k.weight", ".to_v.weight")
#: The number of a block in a key.
BLOCK_NUMBER = re.compile(r"\.\d+\.")
#: Keys that are named under a node, of those that are left out; the log has more.
MAX_NAMED = 3
#: Far beyond the node's 100, and far below what float32 holds.
MAX_STRENGTH = 1_000_000


@dataclass(frozen=True)
class LoraUse:
    """A LoRA file and how much of it is added. ``stamp`` changes with the file; empty where there is none."""

    path: str
    strength: float
    stamp: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lora:
    """A LoRA file and what it changes of one transformer. ``unmatched``: keys that name nothing there;
    ``left_out``: tensors whose change is not added, and why."""

    path: str
    adapters: list[tuple[Target, Adapter]]
    unmatched: list[str]
    left_out: list[str]

    @property
    def warning(self) -> str:
        """A sentence on the unmatched keys and one on what is left out, empty where there are none."""
        of = f"of the LoRA {Path(self.path).name} were not loaded"
        sentences = []
        if self.unmatched:
            what = f"{len(self.unmatched)} keys {of}, because this model has nothing of their names"
            sentences.append(f"{what}: {some(self.unmatched, 20)}.")
        if self.left_out:
            sentences.append(f"{len(self.left_out)} changes {of}: {'; '.join(self.left_out[:5])}.")
        return " ".join(sentences)

    @property
    def note(self) -> str:
        """One short line for the graph: how much is added, and what is not."""
        parts = [f"changes added: {len(self.adapters)}"]
        if self.unmatched:
            named = some(self.unmatched, MAX_NAMED)
            parts.append(f"keys left out, for which this model has nothing: {len(self.unmatched)} ({named})")
        if self.left_out:
            parts.append(f"changes left out, which do not fit: {len(self.left_out)}")
        return " · ".join(parts)


class Targets:
    """Every tensor of a transformer under both of its names, the single file's and diffusers'."""

    def __init__(self, layout: Layout, shapes: Shapes):
        """``shapes``: the diffusers transformer's parameters."""
        self.layout = layout
        self.shapes = shapes
        ours = [Target(name, matrix(shape), {name: Source(name)}) for name, shape in shapes.items()]
        stacked = defaultdict(dict)
        for name, source in sources(layout, shapes).items():
            stacked[source.key][name] = source
        heads = {module: shapes[norm][0] for module, norm in layout.by_head.items() if norm in shapes}
        theirs = [_stack(key, pieces, shapes, heads) for key, pieces in stacked.items()]
        #: Parameter -> all parameters that the single file keeps in the same tensor, as that tensor.
        self.together = {name: target for target in theirs for name in target.pieces}
        for key, pieces in stacked.items():
            qkv = {name: source for name, source in pieces.items() if name.endswith(QKV)}
            if 0 < len(qkv) < len(pieces):
                theirs.append(_stack(f"{key.removesuffix('.weight')}_qkv.weight", qkv, shapes))
        for name, source in sources(replace(layout, names=layout.apart), shapes).items():
            if source.key != name:
                theirs.append(Target(source.key, matrix(shapes[name]), {name: Source(source.key)}))
        self.ours = _by_name(ours)
        self.theirs = _by_name(theirs)

    def find(self, stem: str, leaf: str = "") -> Target | None:
        """Find the tensor that a key without its role names, or rows of one (stem_of_rows); ``leaf``: a
        parameter other than the weight."""
        if rows := ROWS.fullmatch(stem):
            whole = self.find(rows[1], leaf)
            return whole and self._rows_of(whole, int(rows[2]), int(rows[3]))
        prefix = PREFIX.match(stem)
        assert prefix  # it matches the empty string too
        stem = stem[prefix.end() :] + leaf
        spelled = self.layout.spell(f"{stem}.weight").removesuffix(".weight")
        names = [stem.replace(".", "_"), spelled.replace(".", "_")]
        names.append(self.layout.spell(f"{names[0]}_weight", "_").removesuffix("_weight"))
        names += [names[0].replace(other, ours) for other, ours in ALIASES]
        orders = (self.ours, self.theirs) if prefix[1] else (self.theirs, self.ours)
        return next((targets[name] for name in names for targets in orders if name in targets), None)

    def _rows_of(self, whole: Target, lo: int, hi: int) -> Target | None:
        """Return rows lo..hi of a tensor; None where they are no whole parameters."""
        pieces = {}
        count = 0
        for name, source in whole.pieces.items():
            height, _ = matrix(self.shapes[name])
            if lo <= source.lo and source.lo + height <= hi:
                pieces[name] = replace(source, lo=source.lo - lo, hi=None)
                count += height
        if not pieces or count != hi - lo:
            return None
        return Target(f"{whole.name}[{lo}:{hi}]", (count, whole.shape[1]), pieces)

    @cached_property
    def parts(self) -> dict[str, list[int]]:
        """Return the weights of the single file that hold several parameters -> where in their rows these
        begin and end."""
        stacked = {target.name: target for target in self.together.values() if len(target.pieces) > 1}
        edges = defaultdict(set)
        for key, target in stacked.items():
            for name, source in target.pieces.items() if key.endswith(".weight") else ():
                edges[key] |= {source.lo, source.lo + self.shapes[name][0]}
        return {key: sorted(rows) for key, rows in edges.items()}

    @property
    def examples(self) -> str:
        """Modules under their first and second names, for messages."""
        examples = []
        for targets in (self.theirs, self.ours):
            names = [
                target.name.removesuffix(".weight")
                for name, target in targets.items()
                if name == target.name.replace(".", "_") and ".0." in target.name and min(target.shape) > 1
            ]
            examples += sorted(names, key=lambda name: "att" not in name)[:2]
        return ", ".join(dict.fromkeys(examples))


def lora_stack(loras: list, folders: Folders = ANYWHERE) -> tuple[LoraUse, ...]:
    """Check the ``loras`` of a message, [[path, strength], ...]. Raises UnsupportedError."""
    uses = []
    for lora in loras:
        if not _is_use(lora):
            what = f"loras holds {quoted(lora, 200)}, which is not a pair of a path and a strength"
            raise UnsupportedError(f"{what} (a finite number, at most {MAX_STRENGTH:,}).")
        path, strength = lora
        folders.check(path)
        uses.append(LoraUse(path, float(strength), file_state(path)))
    return tuple(uses)


def file_state(path: str) -> tuple[int, ...]:
    """Return what changes with the file at ``path``; empty where there is none."""
    file = Path(path)
    if not file.is_file():
        return ()
    found = file.stat()
    return found.st_mtime_ns, found.st_size


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
    """Open the LoRA at ``path`` for the transformer of ``targets``, reading the header alone; ``model`` names
    that in messages. Raises UnsupportedError where it names nothing of the transformer, has other sizes or an
    unsupported kind of adapter."""
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
    check_most(len(adapters), misfits)
    if not adapters:
        raise UnsupportedError(
            f"the LoRA {where.name} was made for another model and has nothing for {model}; choose a LoRA of "
            f"this model. Its keys begin with {some(files.shapes)}, while this model has modules like "
            f"{targets.examples}, looked for with and without the prefixes diffusion_model., transformer., "
            f"conditional_transformer., lora_unet_, lora_transformer_ and lycoris_."
        )
    kept, twice = once_each(adapters)
    left_out = [each.short for each in misfits] + [
        f"{target.name} is changed by another one, too" for target in twice
    ]
    return Lora(path, kept, unmatched, left_out)


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
        size = _times(adapter.size)
        here = _times(target.shape)
        raise MisfitError(
            f"that of {target.name} is {size}, but the tensor is {here}",
            f"the LoRA {name} was made for another model: its change of {target.name} is {size}, but in "
            f"{model} that tensor is {here}; choose a LoRA of this model.",
        )
    magnitudes = keys.get("dora_scale")
    height, width = target.shape
    if magnitudes and matrix(files.shapes[magnitudes]) not in ((height, 1), (1, width)):
        raise UnsupportedError(
            f"the LoRA {name} has {quoted(magnitudes)} of {_times(files.shapes[magnitudes])}, which is "
            f"neither a row nor a column of a tensor of {_times(target.shape)}; download the file again."
        )
    return adapter


def _stack(
    key: str, pieces: Mapping[str, Source], shapes: Shapes, heads: Mapping[str, int] | None = None
) -> Target:
    """Return the tensor that has the rows of these parameters. ``heads``: module -> rows of a head."""
    matrices = [matrix(shapes[name]) for name in pieces]
    module = BLOCK_NUMBER.sub(".{}.", key.removesuffix(".weight"), count=1)
    head = (heads or {}).get(module, 0)
    return Target(key, (sum(rows for rows, _ in matrices), matrices[0][1]), pieces, head)


def _by_name(targets: list[Target]) -> dict[str, Target]:
    """Return every target under its module's name and under its own."""
    return {
        name.replace(".", "_"): target
        for target in targets
        for name in (target.name, target.name.removesuffix(".weight").removesuffix(".scale"))
    }


def _times(shape) -> str:
    return " x ".join(map(str, shape))
