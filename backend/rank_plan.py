"""What each rank of a configuration would hold, compute and send, from a checkpoint's headers alone: nothing
is loaded, no rank is started."""

import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase

import torch

from .config import ParallelConfig
from .loading.checkpoint import Checkpoint, open_checkpoint
from .loading.load_report import blocks_text
from .parallel import tensor_parallel
from .parallel.block_cost import IMAGE_ROWS, TEXT_ROWS, rows_through
from .parallel.mesh import Axis, layout, single
from .parallel.modulation_cache import embeddings_ahead
from .parallel.sequence import Sequence, Span, TokenShards, patches, whole_sequence
from .parallel.stage_split import Stages
from .parallel.ulysses_ring import head_shards

#: Calls of the model in a request that says nothing of them.
CALLS = 28


@dataclass(frozen=True)
class RankPlan:
    """One rank. ``patches``: (text rows, image rows) of this rank in each patch; bytes are per rank,
    host_bytes those of weights that wait in host memory (offload_modulation), modulation_bytes the most of
    modulation that is computed ahead, ``bytes_per_step`` in a steady step by mechanism.

    Samples are taken to have one prompt, whose modulation they share; where it depends on the time alone
    positive and negative prompts share theirs too, which halves both."""

    rank: int
    place: dict[str, int]
    stage: int
    blocks: tuple[int, int]
    heads: int
    patches: list[tuple[int, int]]
    weight_bytes: int
    host_bytes: int
    kv_bytes: int
    modulation_bytes: int
    bytes_per_step: dict[str, int]

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        sent = (
            ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in self.bytes_per_step.items())
            or "nothing"
        )
        host = f" (and {self.host_bytes / 1e6:.1f} MB in host memory)" if self.host_bytes else ""
        ahead = f", modulation {self.modulation_bytes / 1e6:.1f} MB" if self.modulation_bytes else ""
        return (
            f"rank {self.rank}: stage {self.stage}, {blocks_text(self.blocks)}, {self.heads} heads, "
            f"{len(self.patches)} patches, "
            f"weights {self.weight_bytes / 1e6:.1f} MB{host}, keys and values {self.kv_bytes / 1e6:.1f} "
            f"MB{ahead}, sends per step: {sent}"
        )


def describe(
    config: ParallelConfig,
    model: str | Checkpoint,
    image_rows: int = IMAGE_ROWS,
    text_rows: int = TEXT_ROWS,
    batch: int = 1,
    branches: int = 2,
    dtype: torch.dtype | None = None,
    calls: int = CALLS,
) -> list[RankPlan]:
    """A RankPlan for every rank of ``config`` with the transformer at ``model``.

    image_rows, text_rows: tokens of a request (4096 + 512: Flux at 1024 x 1024); branches: 2 with a negative
    prompt; dtype: of the weights (the file's by default); calls: of the model with each prompt, one a step
    for most solvers. Raises ConfigError and UnsupportedError as loading does.
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    work = _Workload(
        config.validate(),
        checkpoint,
        image_rows,
        text_rows,
        max(1, batch // config.data_parallel_degree),
        branches // config.cfg_degree,
        dtype or checkpoint.dtype,
        calls,
    )
    ranks = layout(config)
    return [
        work.plan(rank, dict(zip(config.degrees, (ranks == rank).nonzero()[0].tolist())))
        for rank in range(config.world_size)
    ]


@dataclass(frozen=True)
class _Workload:
    """The request and model that the plans are for."""

    config: ParallelConfig
    checkpoint: Checkpoint
    image_rows: int
    text_rows: int
    batch: int
    branches: int
    dtype: torch.dtype
    calls: int

    def plan(self, rank: int, place: dict[str, int]) -> RankPlan:
        config, family = self.config, self.checkpoint.family
        stages = self.checkpoint.stages(config)
        blocks = stages.blocks[place["pp"]]
        sp_rank = place["ring"] * config.ulysses_degree + place["ulysses"]
        parts = self._parts(
            Sequence(
                self.text_rows if family.blocks.text_position else 0,
                self.image_rows,
                family.blocks.text_position,
            ),
            sp_rank,
        )
        heads = self._heads(place)
        return RankPlan(
            rank,
            place,
            place["pp"],
            (blocks.start, blocks.stop),
            heads,
            [(len(part.local.text), part.local.stream) for part in parts],
            *self._weight_bytes(place, stages),
            self._kv_bytes(len(blocks), heads, place, parts),
            self._modulation_bytes(place, stages),
            {name: size for name, size in self._sent(place, stages, heads, parts, sp_rank).items() if size},
        )

    def _parts(self, sequence: Sequence, sp_rank: int) -> list[TokenShards]:
        if not self._buffered:
            return [whole_sequence(sequence, sp_rank, self.config.sp_degree)]
        return patches(sequence, self.config.patches, sp_rank, self.config.sp_degree)

    @property
    def _all_heads(self) -> int:
        """Attention heads before Ulysses divides them."""
        heads = self.checkpoint.family.blocks.heads(self.checkpoint.config)
        return (
            heads // self.config.tensor_parallel_degree if self.config.split_scheme == "megatron" else heads
        )

    @property
    def _width(self) -> int:
        """Features of a token inside the blocks."""
        return self.checkpoint.family.blocks.hidden_width(self.checkpoint.config)

    @property
    def _head_size(self) -> int:
        return self.checkpoint.family.blocks.head_size(self.checkpoint.config)

    def _heads(self, place) -> int:
        axis = Axis(None, place["ulysses"], self.config.ulysses_degree, ())
        return head_shards(self._all_heads, axis)[axis.rank]

    def _weight_bytes(self, place, stages: Stages) -> tuple[int, int]:
        """Those on the device and those in host memory."""
        transformer, names, blocks = (
            self.checkpoint.empty,
            self.checkpoint.block_names,
            stages.blocks[place["pp"]],
        )
        absent = tuple(name + "." for i, name in enumerate(names) if i not in blocks)
        modulation = (
            {layer for block in names for layer in self.checkpoint.modulation(block)}
            if self.config.offload_modulation
            else ()
        )
        cuts = self._cuts(place)
        count, host = 0, 0
        for name, parameter in transformer.named_parameters():
            module = name.rpartition(".")[0]
            if stages.holders.get(module, place["pp"]) != place["pp"] or (
                module not in stages.holders and absent and name.startswith(absent)
            ):
                continue
            cut = cuts.get(module)
            rows, columns = (
                (sum(map(len, cut.outputs)), sum(map(len, cut.inputs)))
                if cut
                else (parameter.shape[0], parameter[0].numel() if parameter.ndim else 1)
            )
            values = rows * (columns if parameter.ndim > 1 else 1)
            count, host = (count, host + values) if module in modulation else (count + values, host)
        shares = self.config.sp_degree * self.config.data_parallel_degree if self.config.shard_weights else 1
        return -(-count * self.dtype.itemsize // shares), host * self.dtype.itemsize

    def _cuts(self, place) -> dict[str, tensor_parallel.Shard]:
        tp = self.config.tensor_parallel_degree
        if tp == 1:
            return {}
        rows = max(r for r in range(1, tp + 1) if tp % r == 0 and r * r <= tp)
        row, column = divmod(place["tp"], tp // rows)
        mesh = replace(
            single(),
            tp=Axis(None, place["tp"], tp, ()),
            tp_inputs=Axis(None, row, rows, ()),
            tp_outputs=Axis(None, column, tp // rows, ()),
        )
        family, transformer = self.checkpoint.family, self.checkpoint.empty
        return tensor_parallel.shards(transformer, family, self.config.split_scheme, mesh)

    @property
    def _buffered(self) -> bool:
        """Are stale keys and values read?"""
        return self.config.pipefusion_degree > 1 and self.config.patches > 1

    def _kv_bytes(self, blocks: int, heads: int, place, parts: list[TokenShards]) -> int:
        """Buffers of stale keys and values; without them what is kept of text that no step changes, of the
        rows of a Ulysses group."""
        sequence, u = parts[0].sequence, self.config.ulysses_degree
        if not self._buffered:
            kept = (
                sum(parts[0].lengths("text")[place["ring"] * u : (place["ring"] + 1) * u])
                if self.checkpoint.family.cache.static_text
                else 0
            )
            return (
                2 * self.batch * heads * kept * self._head_size * self.dtype.itemsize * blocks * self.branches
            )
        kept = 2 if self.config.stale_kv == "extrapolate" else 1
        if "sum" in self.checkpoint.family.blocks.attention:
            return (
                kept
                * self.batch
                * blocks
                * self.branches
                * (self.config.patches * self._sum_bytes + sequence.image * self._width * self.dtype.itemsize)
            )
        return (
            kept
            * 2
            * self.batch
            * heads
            * sequence.joint
            * self._head_size
            * self.dtype.itemsize
            * blocks
            * self.branches
        )

    def _sent(self, place, stages, heads, parts, sp_rank) -> Counter:
        """Bytes of one step by mechanism; formulas: see the modules that send them."""
        config, size, blocks = (
            self.config,
            self.batch * self.branches * self.dtype.itemsize,
            stages.blocks[place["pp"]],
        )
        sent = Counter()
        u, r, width = config.ulysses_degree, config.ring_degree, self._width
        head = size * self._head_size
        mixes = "sum" in self.checkpoint.family.blocks.attention
        for whole in parts:
            part = (
                replace(whole, text=Span(0, 0)) if self.checkpoint.family.cache.static_text else whole
            )  # in a steady step
            sent += self._mixed(len(blocks), part) if mixes else Counter()
            lengths, own = part.lengths("joint"), len(part.local)

            def groups(rows):
                return [sum(rows[i * u : (i + 1) * u]) for i in range(r)]

            gathered, travelling = groups(lengths)[place["ring"]], groups(whole.lengths("joint"))
            sent["ulysses"] += (
                0
                if mixes
                else len(blocks) * head * (3 * (self._all_heads - heads) * own + heads * (gathered - own))
            )
            passed = (
                gathered * (r - 1)
                if self._buffered
                else sum(travelling[(place["ring"] - hop) % r] for hop in range(r - 1))
            )
            sent["ring"] += 0 if mixes else len(blocks) * head * 2 * heads * passed
            if place["pp"] < config.pipefusion_degree - 1:
                sent["pipeline"] += size * own * width
            sent += self._outputs(place, len(part.local.image), len(part.image))
        prompts = self.branches * self.dtype.itemsize
        sent["tensor"] = self._reduced(place, stages, parts) * prompts
        sent["modulation"] = sum(self._features(name, place) for name in stages.hosted(place["pp"])) * prompts
        return sent

    @property
    def _sum_bytes(self) -> int:
        """The state of linear attention in float32, for one sample and block."""
        return 4 * self._all_heads * self._head_size * (self._head_size + 1)

    def _mixed(self, blocks: int, part: TokenShards) -> Counter:
        """What the modules of parallel/mixing.py send for one part; a picture is taken to be square."""
        ranks, calls = part.sp_size, blocks * self.batch * self.branches
        line = math.isqrt(self.image_rows) + 1
        rows = len(part.local.image) if self._buffered else min(line, len(part.local.image))
        others = (
            ranks - 1 if rows == len(part.local.image) else (part.sp_rank > 0) + (part.sp_rank < ranks - 1)
        )
        return Counter(
            {
                "linear-attention state": calls * 2 * (ranks - 1) * self._sum_bytes // ranks,
                "halo": calls * others * rows * self._width * self.dtype.itemsize,
            }
        )

    def _modulation_bytes(self, place, stages: Stages) -> int:
        """Of what the memos of this rank's blocks hold at once (memo.py); where weights are sharded, of one
        model call."""
        widths = [
            sum(
                self._features(layer, place)
                for i in blocks
                for layer in self.checkpoint.modulation(self.checkpoint.block_names[i])
            )
            for blocks in stages.blocks
        ]
        most = self.batch * self.branches
        if not self.config.shard_weights:
            most = min(
                self.calls * self.branches, max(self.branches, embeddings_ahead(max(widths), self.dtype))
            )
        return most * widths[place["pp"]] * self.dtype.itemsize

    def _features(self, layer: str, place) -> int:
        """Width of a modulation layer's output on this rank."""
        cut = self._cuts(place).get(layer)
        return (
            self.checkpoint.empty.get_submodule(layer).out_features
            if cut is None
            else sum(cut.widths) or sum(map(len, cut.outputs))
        )

    def _outputs(self, place, own: int, rows: int) -> Counter:
        """Model outputs, float32: from the last stage to the first, joined over SP there, then exchanged
        between the guidance branches."""
        config = self.config
        family = self.checkpoint.family
        features = (
            4
            * self.batch
            * self.branches
            * family.latent.channels(self.checkpoint.config)
            * math.prod(family.latent.patch(self.checkpoint.config))
        )
        sent = Counter()
        if config.pipefusion_degree > 1 and place["pp"] == config.pipefusion_degree - 1:
            sent["outputs"] += own * features
        if place["pp"] == 0:
            sent["outputs"] += own * features * (config.sp_degree - 1)
            sent["cfg"] += rows * features * (config.cfg_degree - 1)
        return sent

    def _reduced(self, place, stages: Stages, parts: list[TokenShards]) -> int:
        """Elements that all-reduce and all-gather of tensor parallelism send for one prompt and its
        samples."""
        text, image = sum(len(part.local.text) for part in parts), sum(part.local.stream for part in parts)
        text = (
            text if self.checkpoint.family.blocks.text_position else self.text_rows * len(parts)
        )  # every rank and patch reads the whole prompt
        names = {name: i for i, name in enumerate(self.checkpoint.block_names)}
        total = 0
        for module, cut in self._cuts(place).items():
            block = next(name for name in names if module.startswith(name + "."))
            if not (
                stages.holders[module] == place["pp"]
                if module in stages.holders
                else names[block] in stages.blocks[place["pp"]]
            ):
                continue
            rows = self._rows_of(block, module, text, image)
            if cut.reduce:
                total += 2 * (cut.reduce.size - 1) * rows * cut.reduced_features // cut.reduce.size
            if cut.gather:
                total += (cut.gather.size - 1) * rows * sum(map(len, cut.outputs))
        return total

    def _rows_of(self, block: str, module: str, text: int, image: int) -> int:
        """Rows of a step, of all samples, through a linear layer; modulation has one."""
        family, inner = self.checkpoint.family, module.removeprefix(block + ".")
        if any(fnmatchcase(inner, pattern) for pattern in family.cache.modulation):
            return 1
        return self.batch * rows_through(
            inner, self.checkpoint.empty.get_submodule(block), block.rpartition(".")[0], family, image, text
        )
