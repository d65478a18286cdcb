"""Whether a load or a request fits on the device of every rank, before any collective of it starts. All ranks
gather what is free, in one round of a few integers; rank 0 adds what each needs (rank_plan). All decide the
same from the same numbers: either all go on, or none does and the backend stays up."""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch

from ..config import ParallelConfig
from ..errors import RAN_OUT, SHORT, UnsupportedError, reason
from ..hardware.device_memory import DeviceMemory, host_free, is_out_of_memory
from ..loading.checkpoint import Checkpoint
from ..planner.memory import spare_bytes
from ..protocol import ModelCall, Sample
from ..quantization.dequantized_cache import may_cache_dequantized
from ..quantization.kernels import MatmulChoice
from ..quantization.packed_weight import scratch_bytes
from ..rank_plan.describe import RankPlan, describe
from ..rank_plan.need import Need, load_need, request_need, weight_need
from ..rank_plan.remedies import NO_SETTING, fitting
from ..rank_plan.request_size import RequestSize
from ..rank_plan.workload import Workload
from ..sampling.model_inputs import ModelInputs
from ..sampling.runs import Prepared
from ..serving.broadcast import ControlChannel
from ..units import fine_gigabytes

#: Plans of requests that are cached: of two experts with and without a negative prompt.
CACHED_PLANS = 4
#: Request that a model should bear once it is loaded, where a load asks what would fit.
TYPICAL = RequestSize()
#: What a load is refused for, and what then is left.
LOADING = ("to load this model", "nothing is loaded")


@dataclass(frozen=True)
class RankMemory:
    """What one rank needs and has in one round, in bytes.

    device: name of its memory. need: ``loras`` included. free: what any process may take of the device.
    cached: what its own allocator can give again. ready: False where it ran out of memory for the request's
    own tensors or its LoRAs. loras: what it lacks for LoRAs next to quantized weights.
    """

    rank: int
    device: str
    need: Need
    free: int
    cached: int
    ready: bool = True
    loras: int = 0

    @property
    def wanted(self) -> int:
        """Bytes that have to be free on the device for what the rank likely needs."""
        return self.need.likely - self.cached


class RefusedByAllRanks(UnsupportedError):
    """All ranks refuse, and none goes on. ``lacking``: rank -> bytes that should be free on its device."""

    def __init__(self, message: str, lacking: dict[int, int] | None = None):
        super().__init__(message)
        self.lacking = lacking or {}


class InsufficientMemory(RefusedByAllRanks):
    """Some rank lacks memory."""


class FatalOutOfMemory(RuntimeError):
    """An allocation failed while other ranks wait: this rank ends, and torchrun ends the others."""

    __module__ = SHORT


def crowded(memories: list[RankMemory], bound: Callable[[Need], int]) -> list[RankMemory]:
    """Return the ranks whose memory does not hold their needs by ``bound``, the largest need first."""
    shared: dict[str, list[RankMemory]] = defaultdict(list)
    for memory in memories:
        shared[memory.device].append(memory)
    short = []
    for ranks in shared.values():
        free = min(memory.free for memory in ranks) + sum(memory.cached for memory in ranks)
        if sum(bound(memory.need) for memory in ranks) > free:
            short += ranks
    return sorted(short, key=lambda memory: -bound(memory.need))


def short_ranks(memories: list[RankMemory], can_make_room: Collection[int] = ()) -> list[RankMemory]:
    """Return the ranks that cannot run: those that are not ready; where all are, those without room for the
    least that they need; else, of the ranks ``can_make_room`` for which the client can still make room, those
    without room for what is likely."""
    failed = [memory for memory in memories if not memory.ready]
    likely = crowded(memories, attrgetter("likely"))
    can_wait = [memory for memory in likely if memory.rank in can_make_room]
    return failed or crowded(memories, attrgetter("least")) or can_wait


@dataclass(frozen=True)
class Planned:
    """A load or a request, ``work``, as rank 0 has planned it, with the ``needs`` of every rank.

    is_loaded: the ranks hold the weights of ``plans``; another configuration would free them. parked: ranks
    whose weights are in host memory and have to come back. others: other models are on the devices, which the
    client may unload. inputs: of a request, as it was checked.
    """

    work: Workload
    plans: list[RankPlan]
    needs: list[Need]
    is_loaded: bool
    parked: Collection[int] = ()
    others: bool = False
    inputs: ModelInputs | None = None

    def with_weights(self, parked: Collection[int]) -> "Planned":
        """Return the same where the weights of the ranks ``parked`` have yet to come to the device."""
        needs = list(self.needs)
        for rank in parked:
            size = self.plans[rank].weight_bytes
            needs[rank] = Need(needs[rank].least + size, needs[rank].likely + size)
        return replace(self, needs=needs, parked=parked)

    def shortage(
        self, memories: list[RankMemory], short: RankMemory, is_host: Sequence[bool], own: ParallelConfig
    ) -> str:
        """Say which rank lacks how much, and what would fit. ``is_host``, ``own``: as in fitting."""
        capacity = [memory.free + memory.cached for memory in memories]
        text = _shortage(short, *LOADING)
        if self.is_loaded:
            for rank, size in enumerate(map(weight_need, self.plans, is_host)):
                capacity[rank] += size if rank not in self.parked else 0
            plan = self.plans[short.rank]
            returning = plan.weight_bytes if short.rank in self.parked else 0
            text = _shortage(short, "for this request", "nothing was run", plan, returning)
        remedies = fitting(self.work, capacity, is_host, own)
        remedy = f"It would fit with {', or '.join(remedies)}." if remedies else NO_SETTING
        return f"{text} {remedy}"


class Admission:
    """One backend's rounds. Every rank makes one at the same time as the others."""

    def __init__(self, config: ParallelConfig, control: ControlChannel, memory: DeviceMemory):
        self.config = config
        self.control = control
        self.memory = memory
        gathered: list[tuple[str, bool]] = control.all_gather_object((memory.name, memory.is_host))
        #: Name of each rank's memory: its own where torch does not name it.
        self.names = [name or f"that of rank {rank}" for rank, (name, _) in enumerate(gathered)]
        #: Whether each rank's memory is the host's.
        self.is_host = [is_host for _, is_host in gathered]
        #: The requests that were planned last: a warm run plans nothing, nor does one of two experts.
        self._plans: deque[tuple[Checkpoint, tuple, list[RankPlan]]] = deque(maxlen=CACHED_PLANS)
        #: Whether weights may take what is left: not once a request next to them needed more than was likely.
        self.caches_dequantized = may_cache_dequantized()
        #: What the last round was about, if that was a call of the model.
        self._admitted: tuple | None = None

    def plan_load(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Planned:
        """Plan a load on every rank; ``dtype``: of its weights. Raises ConfigError, UnsupportedError."""
        plans = describe(self.config, checkpoint, TYPICAL, dtype)
        mapped = dtype == checkpoint.dtype or checkpoint.is_quantized
        kind = self.memory.device.type
        needs = [load_need(plan, kind, mapped, own) for plan, own in zip(plans, self.is_host)]
        work = Workload(self.config, checkpoint, TYPICAL, dtype, {})
        return Planned(work, plans, needs, is_loaded=False)

    def plan_request(
        self,
        config: ParallelConfig,
        checkpoint: Checkpoint,
        size: RequestSize,
        dtype: torch.dtype,
        choices: Mapping[str, MatmulChoice] | None = None,
    ) -> Planned:
        """Plan a request for a loaded model on every rank. ``config``: the backend's with the request's
        settings; ``checkpoint``: of the model, itself not loaded; ``choices``: how its quantized parameters
        multiply."""
        key = (dtype, config, size)
        known = [plans for owner, about, plans in self._plans if owner is checkpoint and about == key]
        plans = known[0] if known else describe(config, checkpoint, size, dtype, choices)
        if not known:
            self._plans.append((checkpoint, key, plans))
        held = scratch_bytes(self.memory.device)
        needs = [request_need(plan, held) for plan in plans]
        work = Workload(config, checkpoint, size, dtype, choices or {})
        return Planned(work, plans, needs, is_loaded=True)

    def forget(self):
        """Let the checkpoints of plans go, and with them their files."""
        self._plans.clear()

    def check(
        self,
        planned: Planned | None,
        ready: bool = True,
        can_make_room: Collection[int] = (),
        lacking_loras: int = 0,
    ) -> list[RankMemory]:
        """Gather the memory of all ranks in one collective, and return it. Raises InsufficientMemory on all
        ranks if one of them is short.

        planned: given on rank 0 alone. ready: False where this rank ran out of memory for the request's own
        tensors or its LoRAs. can_make_room: ranks for which the client can still make room.
        lacking_loras: bytes that this rank lacks for LoRAs.
        """
        self._admitted = None
        memories = self._gather(planned.needs if planned else [], ready, lacking_loras)
        short = short_ranks(memories, can_make_room)
        if not short:
            return memories
        lacking = {memory.rank: memory.wanted for memory in short}
        # a client makes room and comes again: what would fit, which takes seconds to plan, waits for the last
        if planned is None or planned.others or any(rank in can_make_room for rank in lacking):
            loads = planned is not None and not planned.is_loaded
            text = _shortage(short[0], *(LOADING if loads else ("for this", "nothing was run")))
            if planned and planned.others:
                text += " Other models are on the ranks; unload them."
            raise InsufficientMemory(text, lacking)
        raise InsufficientMemory(planned.shortage(memories, short[0], self.is_host, self.config), lacking)

    def prepare(
        self,
        message: Sample | ModelCall,
        prepare: Callable[[], Prepared],
        parked: Collection[int],
        planned: Planned | None,
        lacking_loras: Callable[[], int] = lambda: 0,
    ) -> Prepared:
        """Return what ``prepare`` makes of a request where every rank has room for it. A call like the one
        before needs no round. ``parked``: ranks to which the model's weights have to come back first, the
        same on every rank; ``lacking_loras``: bytes of LoRAs next to quantized weights that come back too, or
        that ``prepare`` has no room for. Raises InsufficientMemory."""
        if parked:
            self.check(
                planned and planned.with_weights(parked),
                can_make_room=message.can_make_room,
                lacking_loras=lacking_loras(),
            )
        about = _about(message)
        if about is not None and about == self._admitted and not message.can_make_room:
            return prepare()
        prepared = _ready_or_none(prepare, self.memory)
        lacking = 0 if prepared is not None else lacking_loras()
        memories = self.check(planned, prepared is not None, message.can_make_room, lacking)
        self._admitted = about
        assert prepared is not None  # check() has refused what is not
        return replace(prepared, spare=self._spare(memories, prepared))

    def _spare(self, memories: list[RankMemory], prepared: Prepared) -> int:
        """Count what this rank may take of what is left on its device besides what all ranks there need. On
        the CPU neither swap nor what holds the pages of the model's file."""
        own = memories[self.control.rank]
        here = [memory for memory in memories if memory.device == own.device]
        free = min(memory.free for memory in here)
        if self.memory.device.type == "cpu":
            free = min(free, host_free(swap=False)) - len(here) * prepared.model.report.weight_bytes
        # what one rank's allocator caches is of no use to another
        left = min(free - sum(memory.wanted for memory in here), free - len(here) * own.wanted) // len(here)
        return spare_bytes(left, own.need.likely) if self.caches_dequantized else 0

    def _gather(self, needs: list[Need], ready: bool, lacking_loras: int) -> list[RankMemory]:
        """Gather every rank's memory; ``needs``: of all ranks, on rank 0, without LoRAs that they lack."""
        needs = needs or [Need(0, 0)] * len(self.names)
        given = [number for need in needs for number in (need.least, need.likely)]
        own = [self.memory.free(), self.memory.cached(), int(ready), lacking_loras, *given]
        rows = self.control.all_gather_numbers(own)
        given = rows[0][4:]  # as rank 0 knows them: least and likely need of each rank
        memories = []
        for rank, (free, cached, is_ready, loras, *_) in enumerate(rows):
            need = Need(given[2 * rank] + loras, given[2 * rank + 1] + loras)
            device = self.names[rank]
            memories.append(RankMemory(rank, device, need, free, cached, bool(is_ready), loras))
        return memories


def out_of_memory_error(rank: int, ranks: int, memory: DeviceMemory, error: BaseException) -> Exception:
    """Return what to raise where an allocation has failed in the middle of a request: InsufficientMemory
    where there is no other rank, which may wait in a collective; else what ends this one."""
    free = fine_gigabytes(memory.free() + memory.cached())
    text = f"rank {rank} {RAN_OUT} in the middle of a request, with {free} free on its device"
    if ranks == 1:
        text += f"; the model stays loaded. Use a smaller latent or batch, or more ranks ({reason(error)})."
        return InsufficientMemory(text, {})
    return FatalOutOfMemory(f"{text} ({reason(error, 160)}); use a smaller latent or batch, or more ranks")


def _about(message: Sample | ModelCall) -> tuple | None:
    """Return what decides the memory of a call: the same on every rank. None for a sample, which is looked at
    each time: others may have used the device since."""
    if isinstance(message, Sample):
        return None
    shapes = [(name, tuple(value.shape)) for name, value in sorted(message.tensors.items())]
    return message.model, str(message.latent_shapes), tuple(shapes), *sorted(message.cached)


def _ready_or_none(prepare: Callable[[], Prepared], memory: DeviceMemory) -> Prepared | None:
    """Return what ``prepare`` makes, or None where memory runs out: no other rank waits for this one yet, so
    it says so in the next round."""
    try:
        return prepare()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    memory.release()
    return None


def _shortage(
    memory: RankMemory, what: str, result: str, plan: RankPlan | None = None, returning: int = 0
) -> str:
    """Say which rank lacks how much; ``returning``: bytes of weights that come back."""
    parts = {"weights": returning, "LoRAs next to quantized weights": memory.loras}
    if plan is not None:
        parts |= {
            "keys and values": plan.kv_bytes,
            "activations about": plan.activation_bytes,
            "gathered weights": plan.gathered_bytes,
            "modulation": plan.modulation_bytes,
        }
    need = f"{fine_gigabytes(memory.need.likely)} {what}"
    listed = ", ".join(f"{name} {fine_gigabytes(size)}" for name, size in parts.items() if size >= 1e7)
    if listed:
        need += f" ({listed})"
    if memory.need.least < memory.need.likely:
        need += f", at least {fine_gigabytes(memory.need.least)},"
    free = fine_gigabytes(memory.free + memory.cached)
    return f"rank {memory.rank} needs about {need} but {free} are free on its device, so {result}."
