"""The tensors of a transformer under all names that LoRA files have for them."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from ...models.key_layout import Layout, Shapes
from ..parameter_sources import Source, sources
from .adapters import MatrixShape
from .lora_file_bytes import matrix
from .lora_spellings import ALIASES, PREFIX, ROWS

#: Parameters that are rows of one tensor, which LoRAs can name without the rest of it.
QKV = (".to_q.weight", ".to_k.weight", ".to_v.weight")
#: Names of diffusers' fused projections -> the parameters that are their rows, in this order.
FUSED = {
    ".to_qkv.weight": QKV,
    ".to_added_qkv.weight": (".add_q_proj.weight", ".add_k_proj.weight", ".add_v_proj.weight"),
}
#: The number of a block in a key.
BLOCK_NUMBER = re.compile(r"\.\d+\.")


@dataclass(frozen=True)
class Target:
    """A tensor that a LoRA can name, seen as a matrix of ``shape``. ``pieces``: parameters -> their rows of
    it; ``name`` is for messages. ``head``: rows of a head, where DiffSynth has the rows head by head."""

    name: str
    shape: MatrixShape
    pieces: Mapping[str, Source]
    head: int = 0


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
        self.ours = _by_name(ours + _fused(shapes))
        self.theirs = _by_name(theirs)

    def find(self, stem: str, leaf: str = "") -> Target | None:
        """Find the tensor, or rows of it (stem_of_rows), that a key without its role names; ``leaf``: a
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
        """Return weights of the single file with several parameters -> the rows where these begin and end."""
        edges = defaultdict(set)
        for name, target in self.together.items():
            if len(target.pieces) > 1 and target.name.endswith(".weight"):
                first = target.pieces[name].lo
                edges[target.name] |= {first, first + self.shapes[name][0]}
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


def _stack(
    key: str, pieces: Mapping[str, Source], shapes: Shapes, heads: Mapping[str, int] | None = None
) -> Target:
    """Return the tensor that has the rows of these parameters. ``heads``: module -> rows of a head."""
    matrices = [matrix(shapes[name]) for name in pieces]
    module = BLOCK_NUMBER.sub(".{}.", key.removesuffix(".weight"), count=1)
    head = (heads or {}).get(module, 0)
    return Target(key, (sum(rows for rows, _ in matrices), matrices[0][1]), pieces, head)


def _fused(shapes: Shapes) -> list[Target]:
    """Return the matrices that diffusers makes of the queries, keys and values of one input
    (``fuse_qkv_projections``), by which trainers name LoRAs whether they are fused or not."""
    targets = []
    for fused, ends in FUSED.items():
        for prefix in [name.removesuffix(ends[0]) for name in shapes if name.endswith(ends[0])]:
            key = prefix + fused
            matrices = {prefix + end: matrix(shapes[prefix + end]) for end in ends if prefix + end in shapes}
            widths = {width for _, width in matrices.values()}
            if key in shapes or len(matrices) < len(ends) or len(widths) > 1:
                continue
            edges = accumulate((height for height, _ in matrices.values()), initial=0)
            pieces = {name: Source(key, *rows) for name, rows in zip(matrices, pairwise(edges))}
            targets.append(_stack(key, pieces, shapes))
    return targets


def _by_name(targets: list[Target]) -> dict[str, Target]:
    """Return every target under its module's name and under its own."""
    return {
        name.replace(".", "_"): target
        for target in targets
        for name in (target.name, target.name.removesuffix(".weight").removesuffix(".scale"))
    }
