"""Work that is the same in every step, or for every patch of one, computed once and cached.

Two kinds of layers inside the blocks: modulation (adaLN, arXiv 2212.09748), whose input depends on timestep,
guidance and pooled prompt alone, and the prompt's keys and values in cross-attention. Before the blocks,
modules for the prompt and for positions. The modulation of many evaluations is one GEMM a layer, over the
embeddings that differ: samples, and often prompts, share theirs.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...hardware.host_memory import HostMemory, on_device
from ...runtime.opaque_ops import SECOND, opaque
from .. import comm
from ..mesh import Mesh
from ..step_context import StepContext
from .modulation_chunks import embeddings_ahead, evaluations_ahead
from .modulation_plan import ModulationPlan, equal_rows

#: Calls of cached layers since the request began, by kind: what tests count.
COMPUTED: Counter[str] = Counter()
#: Timesteps a sample up to which an evaluation's answers are cached. A frame may have one, and a soft mask
#: gives each token one: held for all prompts at once, their modulation may be gigabytes.
TIMESTEPS = 64


@dataclass
class CurrentCall:
    """Which rows of the cached tables belong to the call under way; shared by all cached layers of a model.
    context: None between requests. rows: (prompt, evaluation computed ahead) -> rows, one a sample.
    indices: rows -> the same on the device."""

    context: StepContext | None = None
    rows: Mapping[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)
    indices: Mapping[tuple[int, ...], Tensor] = field(default_factory=dict)

    def take(self, table: Tensor, context: StepContext, prompt: str, shared: bool, count: int) -> Tensor:
        """Return the ``count`` rows of a ``table`` for the samples of ``context``; ``shared``: of its
        evaluation. Twice as many as samples: those of a second timestep follow."""
        rows = self.rows[prompt, context.evaluation]
        if not shared:
            if count == 2 * len(context.sample_span):
                half = len(rows) // 2
                rows = rows[:half][context.samples] + rows[half:][context.samples]
            else:
                rows = rows[context.samples]
            if len(set(rows)) == 1:  # no copy; shared rows are not samples, and a model may reshape them
                return table[rows[0]].expand(len(rows), -1)
        if rows not in self.indices:  # of one sample with two timesteps, or of some samples
            return torch.stack([table[row] for row in rows])
        return table[self.indices[rows]]


class CachedLayer(nn.Module):
    """Returns cached outputs in the place of ``layer``.

    kind: "modulation" or "step" (once an evaluation), "prompt" or "shape" (once a request). shared: what is
    computed ahead holds for all samples of a batch. table: modulation computed ahead, (rows, features).
    known: (prompt, samples, which call of a forward) -> the output.
    """

    caches_outputs = True

    def __init__(self, layer: nn.Module, kind: str, current: CurrentCall, shared: bool = False):
        super().__init__()
        self.layer = layer
        self.kind = kind
        self.current = current
        self.shared = shared
        self.known: dict[tuple, Any] = {}
        self.table: Tensor | None = None
        self.calls = 0
        self.last: StepContext | None = None

    def opaque_width(self) -> int:
        """Return the features of the layer's output on this rank."""
        return layer_features(self.layer)

    @opaque
    def forward(self, *args, **kwargs) -> Any:
        context = self.current.context
        if context is None:
            return self.layer(*args, **kwargs)
        if self.table is not None:
            return self.current.take(self.table, context, context.prompt, self.shared, len(args[0]))
        self.calls = self.calls + 1 if self.last is context else 0
        self.last = context
        key = (context.prompt, context.sample_span, self.calls)
        if self.kind == "step" and len(args[0]) > TIMESTEPS * len(context.sample_span):
            return self.layer(*args, **kwargs)
        if key not in self.known:
            self._forget_other_spans(context)
            COMPUTED[self.kind] += 1
            self.known[key] = self.layer(*args, **kwargs)
        return self.known[key]

    def _forget_other_spans(self, context: StepContext):
        """Forget outputs for the same samples in other spans: a pipeline takes them one by one or at once."""
        for prompt, span, call in [*self.known]:
            if context.regroups(prompt, span):
                del self.known[prompt, span, call]

    @partial(opaque, suffix=SECOND)
    def second(self, x: Tensor) -> Tensor:
        """Return the layer's output for ``x``, a call's second embedding (LayerCache.modulate_ahead)."""
        context = self.current.context
        if self.table is None or context is None:
            return self.layer(x)
        return self.current.take(self.table, context, _second(context.prompt), False, len(x))

    @property
    def bytes(self) -> int:
        tensors = [] if self.table is None else [self.table]
        for output in self.known.values():
            tensors += output if isinstance(output, tuple) else (output,)
        return sum(tensor.nbytes for tensor in tensors)

    def store(self, table: Tensor | None):
        """Cache the outputs (rows, features) for the rows of CurrentCall.rows, or (None) forget them."""
        COMPUTED[self.kind] += table is not None
        self.table = table


def _second(prompt: str) -> str:
    """Name a prompt's second embeddings in CurrentCall.rows."""
    return f"{prompt}+"


def layer_features(layer: nn.Module) -> int:
    """Return the width of a linear layer's output on this rank."""
    shard = getattr(layer, "shard", None)
    if shard is None:
        assert isinstance(layer.out_features, int), "modulation layers are linear"
        return layer.out_features
    return shard.features


@dataclass
class LayerCache:
    """The cached layers of one model on this rank.

    offload_device: where modulation weights wait between requests. dtype: theirs.
    hosted[i]: modulation layers that this stage computes for stage i of ``mesh.pp`` (stage_split.py);
    hosted_elsewhere[i]: cached layers here whose weights stage i holds.
    width: numbers of modulation on the stage that has most. most_bytes: of modulation cached at once.
    """

    offload_device: torch.device
    dtype: torch.dtype
    mesh: Mesh
    current: CurrentCall = field(default_factory=CurrentCall)
    layers: list[CachedLayer] = field(default_factory=list)
    hosted: list[list[nn.Module]] = field(default_factory=list)
    hosted_elsewhere: list[list[CachedLayer]] = field(default_factory=list)
    width: int = 0
    plan: ModulationPlan | None = None
    most_bytes: int = 0

    @property
    def modulations(self) -> list[CachedLayer]:
        return [layer for layer in self.layers if layer.kind == "modulation"]

    @property
    def held(self) -> list[CachedLayer]:
        """Cached layers of modulation that have their weights on this rank."""
        elsewhere = set(chain(*self.hosted_elsewhere))
        return [layer for layer in self.modulations if layer not in elsewhere]

    @property
    def offloaded(self) -> list[nn.Module]:
        if self.offload_device == self.mesh.device:
            return []
        return [*(cached.layer for cached in self.held), *chain(*self.hosted)]

    def offload(self, page_locked: bool = True):
        """Move modulation weights off the device, if asked for; ``page_locked``: for a faster way back."""
        memory = HostMemory(pinned=True) if page_locked and self.mesh.device.type == "cuda" else None
        for layer in self.offloaded:
            if memory:
                layer._apply(memory.moved)
            else:
                layer.to(self.offload_device)

    def begin_request(self):
        """Forget what the request before has cached and counted."""
        COMPUTED.clear()
        self.end_request()
        self.most_bytes = 0

    def end_request(self):
        """Return nothing from the cache until the next request."""
        self._forget_modulation()
        self.plan = None
        self.current.context = None
        self.forget_outputs()
        for layer in self.layers:
            layer.last = None

    def forget_outputs(self):
        """Forget what layers have returned, except modulation that is computed ahead."""
        for layer in self.layers:
            layer.known.clear()

    def begin_evaluation(self, evaluation: int):
        """Have an evaluation's modulation ready if it is computed ahead. Collective over pp, tp and FSDP."""
        self._forget_step()
        if self.plan is None:
            self._forget_modulation()
        elif evaluation >= self.plan.computed:
            self._compute(self.plan, evaluation)

    @contextmanager
    def before_steps(self, context: StepContext) -> Iterator[None]:
        """Return cached outputs in a call before the steps, of an evaluation's embedding alone."""
        self._forget_step()
        self.current.context = context
        try:
            yield
        finally:
            self.current.context = None
            self._forget_step()

    def modulate_ahead(self, embeddings: dict[str, list[Tensor]], samples: int, most_samples: int):
        """Compute modulation, one GEMM a layer for a chunk of evaluations; others follow in begin_evaluation.

        ``embeddings[prompt][evaluation]`` (B, D) is what blocks get then, its attribute ``second`` what some
        of their tokens get. ``samples``: of this replica; ``most_samples``: of the one that has most, the
        same on all, or they would wait for gathers that others do not make. Collective as begin_evaluation.
        """
        each: dict[tuple[str, int], Tensor] = {}
        seconds: dict[tuple[str, int], Tensor] = {}
        for prompt, evaluations in embeddings.items():
            for evaluation, embedding in enumerate(evaluations):
                each[prompt, evaluation] = embedding
                if hasattr(embedding, "second"):
                    seconds[_second(prompt), evaluation] = vars(embedding)["second"]
        each |= seconds
        different, places = self._different(torch.cat(list(each.values())))
        next_place = iter(places)
        rows = {key: tuple(next(next_place) for _ in embedding) for key, embedding in each.items()}
        count = len(next(iter(embeddings.values())))
        sizes = Counter[int]()
        for (_, evaluation), embedding in each.items():
            sizes[evaluation] += len(embedding)
        at_once = self._at_once(max(sizes.values()), samples, most_samples)
        most = embeddings_ahead(self.width, self.dtype.itemsize)
        self.plan = ModulationPlan(different, rows, count, most, at_once)
        self._compute(self.plan, 0)

    def _at_once(self, embeddings: int, samples: int, most_samples: int) -> int:
        """Return how many evaluations, of so many ``embeddings`` on a replica of so many ``samples``, a chunk
        has where replicas gather weights together; 0 where a rank takes as many as fit. Embeddings are a
        multiple of samples, of which each replica has one at least (check_batch). How many embeddings
        differ is known to each replica alone, and one with more chunks than others would wait for their
        gathers: so all count as different, and a large batch has short chunks."""
        if self.mesh.weights is None or self.mesh.dp.size == 1:
            return 0
        if not any(cached.shared for cached in self.modulations):
            embeddings = embeddings // samples * most_samples
        return evaluations_ahead(self.width, self.dtype.itemsize, embeddings)

    def _different(self, every: Tensor) -> tuple[Tensor, list[int]]:
        """Return those of the embeddings (n, D) that differ, in order, and which of them each one equals."""
        # shapes depend on it, so all ranks take the first one's, and with FSDP how often they gather
        sharded = () if self.mesh.weights is None else (self.mesh.sp,)
        groups = comm.broadcast(equal_rows(every), (self.mesh.tp, self.mesh.pp, *sharded)).tolist()
        first_rows: dict[int, int] = {}  # group of equal embeddings -> its first one
        for row, group in enumerate(groups):
            first_rows.setdefault(group, row)
        places = {group: place for place, group in enumerate(first_rows)}
        return every[list(first_rows.values())], [places[group] for group in groups]

    def _compute(self, plan: ModulationPlan, first: int):
        self._forget_modulation()
        chunk = plan.chunks[first]
        plan.computed = chunk.end
        self.current.rows = chunk.rows
        self.current.indices = plan.indices
        inputs = F.silu(plan.embeddings_of(chunk)).to(self.dtype)
        for cached in self.held:
            cached.store(self._computed(cached.layer, inputs))
        if self.hosted:
            self._send_hosted(inputs)

    def _forget_modulation(self):
        self.most_bytes = max(self.most_bytes, sum(cached.bytes for cached in self.modulations))
        self.current.rows = {}
        self.current.indices = {}
        for cached in self.modulations:
            cached.known.clear()
            cached.store(None)

    def _forget_step(self):
        for cached in self.layers:
            if cached.kind == "step":
                cached.known.clear()

    def _send_hosted(self, inputs: Tensor):
        """Compute for other stages, and receive what they computed for this one."""
        none = [inputs.new_empty(0)]
        sent = [
            torch.cat([self._computed(layer, inputs) for layer in layers] or none, dim=-1)
            for layers in self.hosted
        ]
        widths = [[layer_features(cached.layer) for cached in layers] for layers in self.hosted_elsewhere]
        shapes = [(len(inputs), sum(features)) for features in widths]
        received = comm.all_to_all(sent, shapes, self.mesh.pp, "modulation")
        for modulation, features, layers in zip(received, widths, self.hosted_elsewhere):
            for cached, table in zip(layers, modulation.split(features, dim=-1)):
                cached.store(table)

    def _computed(self, layer: nn.Module, inputs: Tensor) -> Tensor:
        """Apply a layer to ``inputs`` (rows, D), with its weights on their device meanwhile."""
        if self.offload_device == inputs.device:
            return layer(inputs)
        with on_device(layer, inputs.device):
            return layer(inputs)
