"""What every rank does with a message, in step with the others."""

import os
import traceback
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from ..config import ParallelConfig
from ..engine import Engine
from ..errors import ARRANGING, RAN_OUT, reason
from ..hardware.device_memory import check_not_lost, is_out_of_memory
from ..loading import parking
from ..loading.load_report import by_rank
from ..loading.lora.lora_keys import lora_stack, stack_digest
from ..loading.model_key import check_same, check_unchanged, content_key, model_key, other_lora
from ..loading.weight_loading import CheckedLoad
from ..parallel import mesh as meshes
from ..protocol import Arrange, Load, ModelCall, Release, Sample, Shutdown, Unload
from ..quantization import native_trial
from ..quantization.kernels import NATIVE
from ..quantization.matmul import Product
from ..runtime.callbacks import nothing
from ..sampling.model_runner import LoadedModel
from ..sampling.runs import Prepared
from ..sampling.step_loop import Callbacks, RequestCancelled
from ..serving.broadcast import ControlChannel
from ..serving.step_times import StepClock
from . import kernel_round, start
from .admission import (
    Admission,
    FatalOutOfMemory,
    InsufficientMemory,
    Planned,
    RefusedByAllRanks,
    out_of_memory_error,
)

#: So many steps a host may be ahead of its GPU, which waits for one that compiles.
STEPS_AHEAD = 3


class Worker:
    """What every rank does with a message; rank 0 (Leader) adds the clients."""

    def __init__(self, begun: start.Start):
        self.device = begun.device
        self.mesh = meshes.build(begun.config, begun.device, begun.store)
        self.engine = Engine(begun.config, self.mesh, begun.folders)
        self.control = ControlChannel(self.mesh.control)
        self.pids = self.control.all_gather_object(os.getpid())
        #: Rank -> the number of its machine.
        self.machines = self.control.all_gather_object(int(os.environ.get("GROUP_RANK", "0")))
        capabilities = self.control.all_gather_object(list(self.engine.capabilities))
        self.engine.capabilities = {(major, minor) for of_rank in capabilities for major, minor in of_rank}
        self.engine.parks = all(self.control.all_gather_object(self.engine.parks))
        self.admission = Admission(begun.config, self.control, self.engine.memory)
        self.reports: dict[str, list[dict]] = {}
        #: Attention kernel, type, head size, with log-sum-exp? -> why requests are refused; empty: they run.
        self.tried: dict[tuple, str] = {}
        beats = begun.beats
        #: Models of which a call has ended, and whether it compiled.
        self.called: set[tuple[str, str]] = set()
        self.clock = StepClock(beats.ring(int(os.environ["LOCAL_RANK"])) if beats else None)

    def follow(self):
        """Do what rank 0 broadcasts until it broadcasts Shutdown; on ranks 1 to N - 1."""
        while not isinstance(message := self.control.receive(), Shutdown):
            with suppress(RequestCancelled, RefusedByAllRanks):  # rank 0 answers the client
                self.obey(message)
            del message  # its tensors make room for those of the next one
            self.clock.note_memory(self.engine.memory.reserved())

    def obey(self, message):
        """Do what a message says, as every other rank does now."""
        if isinstance(message, Load):
            self.load(message)
        elif isinstance(message, Unload):
            self.unload(message)
        elif isinstance(message, Release):
            self.release(message.ranks, message.forget)
        elif isinstance(message, Arrange):
            self.arrange(ParallelConfig(**message.config))
        elif isinstance(message, Sample):
            self.run_sample(message, Callbacks())
        elif isinstance(message, ModelCall):
            self.run_call(message)

    def run_sample(
        self, message: Sample, callbacks: Callbacks, planned: Planned | None = None, on_cancelled=nothing
    ) -> tuple[Tensor, dict]:
        """Denoise where every rank has room; rank 0 gives what it has ``planned``, and what gets the step of
        a cancelled request: ``on_cancelled`` has been called whenever RequestCancelled is raised. Raises
        InsufficientMemory and RequestCancelled."""
        prepared = self._admitted(message, self.engine.prepare_sample, planned)
        self.clock.new_request()
        first = (0, message.warmup_steps) if message.compile == "blocks" else ()
        self.clock.compiling = {begin + step for begin in first for step in range(STEPS_AHEAD)}
        timed = replace(callbacks, on_begin=self.clock.begin)
        ended: Exception | None = None
        result: Any = None
        try:
            result = self._guarded(partial(self.engine.sample, message, timed, prepared))
        except (RequestCancelled, RefusedByAllRanks) as error:  # whose frames hold keys and values
            ended = error.with_traceback(None)
            if isinstance(error, RequestCancelled):
                self.clock.note_memory(self.engine.memory.reserved())  # what clients count, who go on
                on_cancelled(error.step)  # now: to give memory back, a rank waits for its GPU's step
            if isinstance(error, InsufficientMemory) and prepared.model.dequantized_bytes:
                self.admission.caches_dequantized = False
        finally:
            self.clock.begin(None)
        # not after an error, which ends a rank among several: its GPU may wait for a peer's, and it for that
        has_cache = prepared.model.dequantized_bytes and self.mesh.device.type == "cuda"
        self.release([*message.shared_ranks, self.mesh.rank] if has_cache else message.shared_ranks)
        if ended is not None:
            raise ended
        return result

    def run_call(self, message: ModelCall, planned: Planned | None = None) -> tuple[Tensor, dict]:
        """Call the model once, as run_sample. A call like the one before is not looked at again."""
        # what is not looked at again may find no memory: others have used the device since
        prepared = self._guarded(partial(self._admitted, message, self.engine.prepare_call, planned))
        how = (message.model, message.compile)
        self.clock.compiling = {0} if message.compile == "blocks" and how not in self.called else ()
        self.clock.begin(0)
        try:
            result = self._guarded(partial(self.engine.forward, message, prepared))
            self.called.add(how)
            return result
        finally:
            self.clock.begin(None)

    def _admitted(self, message: Sample | ModelCall, prepare, planned: Planned | None) -> Prepared:
        """Return what ``prepare`` makes of a message where every rank has room. Raises RefusedByAllRanks."""
        model = self.engine.models[message.model]
        prepare = partial(prepare, message, planned.inputs if planned else None)
        self._try_kernel(message.attention, model)
        stack = self.engine.lora_stacks.get(message.model, ())
        parked = model.parked_on

        def lacking_lora_bytes() -> int:
            if model.parked_on:  # the weights are to come back, where they have left
                return model.held_lora_bytes if model.parked else 0
            return 0 if model.weights.stack == stack else model.lora_bytes(stack)

        try:
            return self.admission.prepare(message, prepare, parked, planned, lacking_lora_bytes)
        except InsufficientMemory:
            if parked:  # again, as all ranks count: some have weights back, others had no room for theirs
                self.engine.park(model, parked)
            raise

    def _try_kernel(self, name: str, model: LoadedModel):
        """Try a kernel with the model's heads on every rank, once. Raises RefusedByAllRanks."""
        merges = self.engine.config.ring_degree > 1
        gather = self.control.all_gather_object
        if refused := kernel_round.refusal(name, model, merges, self.mesh.device, self.tried, gather):
            raise RefusedByAllRanks(refused)

    def _guarded(self, run):
        """Run; where memory runs out, say so with numbers. Raises InsufficientMemory on a single rank, which
        goes on, and FatalOutOfMemory on others."""
        try:
            return run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = out_of_memory_error(self.mesh.rank, self.mesh.world_size, self.engine.memory, error)
        if self.mesh.world_size == 1:
            self.engine.memory.release()  # only here: the error held what was computed
        raise failure

    def release(self, ranks: list, forget: Sequence = ()):
        """Give cached memory back, on those ranks. ``forget``: as in Release."""
        if forget:
            self.engine.argument_cache.forget(forget)
        if self.mesh.rank in ranks:
            self.engine.memory.release()

    def unload(self, message: Unload) -> list[int]:
        """Free a model, or move its weights to host memory on the ranks that are named, where their machines
        have room. Return the ranks that have none on their device now."""
        ranks = range(self.mesh.world_size)
        named = frozenset(rank for rank in ranks if rank in message.ranks or not message.ranks)
        parked = self._park(message.model, named, message.yields) if message.park else None
        if parked is not None or message.keeps:
            return sorted(parked or ())
        self.engine.unload(message.model)
        self.forget_unloaded()
        return list(ranks)

    def _park(self, name: str, ranks: frozenset[int], yields: list[str]) -> frozenset[int] | None:
        """Park a model on ``ranks`` if every machine has room, once models that ``yields`` names have left
        as far as it takes: those that are parked on every rank, and none where all of them do not make room.
        Return all ranks on which it is parked, or None. One that is among them has room where all of them
        together have. A method of its own, so that ``unload`` holds no reference to a model that it frees."""
        model = self.engine.models.get(name)
        if model is None or not model.can_park or not self.engine.parks:
            return None
        leaving = ranks - model.parked_on
        world_size = self.mesh.world_size
        parked = {key for key, each in self.engine.models.items() if len(each.parked_on) == world_size}
        spare = [key for key in yields if key in parked and key != name]
        while leaving and not self._has_room(model, leaving, next_to=spare if name in yields else ()):
            if not spare or not self._has_room(model, leaving, without=spare):
                return None
            self.engine.unload(spare.pop(0))
            self.forget_unloaded()
        self.engine.park(model, ranks)
        return model.parked_on

    def _has_room(
        self, model: LoadedModel, leaving: Set[int], next_to: Sequence[str] = (), without: Sequence[str] = ()
    ) -> bool:
        """Return whether every machine has room for the weights of its ``leaving`` ranks, and for the parked
        models ``next_to`` them, which have theirs already; or would have at best ``without`` such models."""
        rank = self.mesh.rank
        own = model.report.weight_bytes + model.held_lora_bytes
        page_locked = parking.page_locked_bytes()
        there = self._parked_bytes(next_to)
        # with a model that is freed, every rank gives back what it keeps page locked
        back = self._parked_bytes(without) + page_locked if without else 0
        reusable = min(own, page_locked) if not without and rank in leaving else 0
        sizes = self.control.all_gather_numbers([own if rank in leaving else 0, reusable, there, back])
        here = [sizes[each] for each, machine in enumerate(self.machines) if machine == self.machines[rank]]
        size, reused, others, freed = map(sum, zip(*here))
        return all(self.control.all_gather_object(parking.has_room(size + others, reused + others + freed)))

    def _parked_bytes(self, names: Sequence[str]) -> int:
        """Return the host memory that parked models and their LoRAs take of this rank."""
        models = [self.engine.models[name] for name in names]
        parked = [each for each in models if self.mesh.rank in each.parked_on]
        return sum(each.report.weight_bytes + each.held_lora_bytes for each in parked)

    def forget_unloaded(self):
        """Keep nothing of models that are no longer loaded: a plan's checkpoint maps a whole file."""
        self.reports = {key: it for key, it in self.reports.items() if key in self.engine.models}
        self.called = set()  # one may be loaded again
        self.admission.forget()

    def load(
        self,
        message: Load,
        own: str = "",
        on_progress=nothing,
        planned: Planned | None = None,
        checked: CheckedLoad | None = None,
    ) -> list[str]:
        """Load on this rank; return the reasons of all ranks that could not (then none keeps it). Where the
        model is loaded already, name LoRAs. What the load cost each rank is in ``reports``. ``own``: the key
        under which rank 0 has checked the model, which all ranks use. Nothing is loaded, and no reason
        returned, where some rank cannot multiply natively as it should: rank 0 checks the model again, and
        refuses it. Raises InsufficientMemory before anything is read, or where a rank's memory ran out while
        it read."""
        own = own or model_key(message)
        key = self.control.all_gather_object(own)[0]
        if key in self.engine.models:
            return self._name_loras(key, message)
        self.admission.check(planned, can_make_room=message.can_make_room)
        products = [(kind, dtype) for kind, dtype in message.products]
        reasons = self._try_products(products)
        if reasons or (message.matmul == NATIVE and not self.engine.refused.keys().isdisjoint(products)):
            return reasons
        contents = [""] * self.mesh.world_size
        if max(self.machines):  # each machine reads its own file
            contents = self.control.all_gather_object(content_key(message.path))
        own_reason = ""
        ran_out = False
        try:
            how = (message.weight_dtype, message.matmul, message.autodetected)
            check_same(message.path, own=contents[self.mesh.rank], first=contents[0])
            self.engine.load(key, message.path, *how, on_progress, checked)
            check_unchanged(message, own)
            print(self.engine.models[key].report)
        except Exception as error:  # out of memory, a disk that fails: this rank's peers wait for it
            traceback.print_exc()
            own_reason = str(error) or type(error).__name__
            ran_out = is_out_of_memory(error)
        return self._agree_on_load(key, own_reason, ran_out, planned)

    def _agree_on_load(self, key: str, own_reason: str, ran_out: bool, planned: Planned | None) -> list[str]:
        """Gather why ranks could not load a model; return these reasons, for which none keeps it. Raises
        InsufficientMemory, and RuntimeError on a rank whose GPU is lost."""
        report = None if own_reason else self.engine.models[key].report.as_dict()
        gathered = self.control.all_gather_object([own_reason, report, ran_out])
        reasons = by_rank([reason for reason, _, _ in gathered])
        if own_reason and not ran_out:  # a lost GPU ends its rank now, and not in somebody's next request
            check_not_lost(self.mesh.device, f"the GPU was lost while the model was loaded: {own_reason}")
        if reasons:
            self.engine.unload(key)
            short = [rank for rank, (_, _, ran_out) in enumerate(gathered) if ran_out]
            if short:  # besides what was counted: other models may leave for it
                likely = {rank: planned.needs[rank].likely if planned else 0 for rank in short}
                raise InsufficientMemory(f"the model could not be loaded ({'; '.join(reasons)}).", likely)
        else:
            self.reports[key] = [report for _, report, _ in gathered]
        return reasons

    def _try_products(self, products: list[Product]) -> list[str]:
        """Have all ranks know the native products that any refuses; return why ranks could try none. No
        collective where there are no products."""
        if not products:
            return []
        refused, failures = native_trial.agree(products, self.mesh.device, self.control.all_gather_object)
        self.engine.refused |= refused
        return by_rank(failures)

    def _name_loras(self, key: str, message: Load) -> list[str]:
        """Name a loaded model with LoRAs as rank 0 does, on whose machine their files may have other times;
        return the reasons of the ranks whose machine has other files."""
        stack = lora_stack(message.loras)
        contents = [content_key(use.path) for use in stack] if max(self.machines) else []
        gathered = self.control.all_gather_object([stack_digest(stack), contents])
        digest, first = gathered[0]
        paths = [use.path for use in stack]
        reasons = by_rank([other_lora(paths, own, first) for _, own in gathered])
        if not reasons:
            self.engine.add_lora_stack(key, stack, digest)
        return reasons

    def arrange(self, config: ParallelConfig):
        """Change the process groups and what is loaded on them."""
        old = self.mesh
        self.called = set()
        self.engine.drop_for(config)  # before new groups take memory next to the old ones
        self.engine.memory.release()  # NCCL cannot use what torch's allocator caches
        try:
            self.mesh = meshes.build(config, self.device)
            self.engine.rearrange(config, self.mesh)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            what = f"rank {old.rank} {RAN_OUT} {ARRANGING} ({reason(error, 160)})"
            raise FatalOutOfMemory(f"{what}; use fewer ranks or a leaner plan") from error
        meshes.close(old)
        self.control = ControlChannel(self.mesh.control)
        self.admission = Admission(config, self.control, self.engine.memory)
        self.forget_unloaded()
        self.reports = {
            key: self.control.all_gather_object(self.engine.models[key].report.as_dict())
            for key in self.reports
        }
