"""What the planner is asked, and the estimates of every plan that could be the answer."""

from dataclasses import dataclass, field, replace

from ..config import ParallelConfig
from ..shares import written
from .candidates import candidates
from .cost import Cost
from .drift import penalty as drift_penalty
from .machine import DIFFERENT, Machine, RequestEstimate
from .memory import held, held_by_rank, spare_bytes
from .model_shape import ModelShape
from .option import Option
from .weight_swaps import WeightSwaps

#: Shares that are tried until unlike GPUs are as full as each other.
FILLINGS = 8
#: Plans of which the fullest rank, times all, needs more than so many times all rooms are not filled.
FILLED = 1.5


@dataclass(frozen=True)
class Question:
    """What is to run, and where: a model and a request on at most ``gpus`` ranks of a machine. base: what the
    plan keeps besides degrees, patches and sharding. others: models whose weights stay on the same ranks.
    shapes: of the model and the others as the first GPU computes them, as the first two do, and so on, where
    GPUs have other types and kernels; empty where all compute alike, and ``shape`` and ``others`` are as all
    do. shares: of each GPU, where the user has set them. swaps: where models wait for others.
    caches_dequantized: quantized weights may stay dequantized in what is spare."""

    shape: ModelShape
    request: RequestEstimate
    machine: Machine
    gpus: int
    base: ParallelConfig = field(default_factory=ParallelConfig)
    others: tuple[ModelShape, ...] = ()
    shares: tuple[float, ...] = ()
    swaps: WeightSwaps = WeightSwaps()
    caches_dequantized: bool = True
    shapes: tuple[tuple[ModelShape, ...], ...] = ()

    def of_first(self, ranks: int) -> "Question":
        """Return what is asked where the first ``ranks`` run alone."""
        swaps = self.swaps.ordered(self.machine.gpus_of_ranks(ranks))
        asked = replace(self, machine=self.machine.in_rank_order(ranks), swaps=swaps)
        if not self.shapes:
            return asked
        shape, *others = self.shapes[ranks - 1]
        others = tuple(others) if self.others else ()  # unless they wait
        return replace(asked, shape=shape, others=others, machine=asked.machine.of_first(ranks), shapes=())

    def option(self, plan: ParallelConfig) -> Option:
        """Estimate seconds and bytes of ``plan``, which may leave the last ranks out."""
        return self.of_first(plan.world_size)._option(plan)

    def _option(self, plan: ParallelConfig) -> Option:
        rooms = self.machine.rooms(plan.world_size)
        models = self._models(plan)
        are_alike = not plan.shares and len(set(rooms)) == 1
        ranks = [held(*models)] if are_alike else held_by_rank(*models)
        tightest, room = max(zip(ranks, rooms), key=lambda pair: pair[0].bytes - pair[1])
        beyond = max(each.likely - own for each, own in zip(ranks, rooms))
        spare = 0
        if self.caches_dequantized:
            spare = spare_bytes(-beyond, max(each.likely - each.weights for each in ranks))
        seconds = Cost(self.shape, plan, self.machine, request=self.request, spare=spare).total
        aside, reads = self.swaps.yield_time(
            self.shape, plan, self.request, self.others, self.machine.host_link
        )
        return Option(
            plan,
            seconds=seconds + aside,
            bytes=tightest.bytes,
            room=room,
            likely=room + beyond,
            unit="rank" if self.machine.on_host else "GPU",
            rereads=reads,
            yield_seconds=aside,
            drift=drift_penalty(self.request.steps, plan.patches) if plan.has_stale_kv else 1.0,
            compiles=self.shape.compiles and not self.machine.on_host,
        )

    def _models(self, plan: ParallelConfig) -> tuple:
        """Return what ``held`` counts of a plan: where memory is the host's, too, no weights leave it."""
        if self.machine.on_host or not self.swaps.parks(plan):
            plan = replace(plan, offload_modulation=False)
        return self.shape, plan, self.request, self.others

    def _shares(self, ranks: int) -> list[str]:
        """Return the shares to try for so many ranks: the user's, else by speed, by memory and equal ones
        where their GPUs differ."""
        if ranks == 1:
            return [""]
        if self.shares:
            return [written(self.shares[:ranks])]
        machine = self.of_first(ranks).machine
        speeds = machine.speeds_of(ranks)
        rooms = machine.rooms(ranks)
        uneven = [values for values in (speeds, rooms) if max(values) > DIFFERENT * min(values) > 0]
        return [*dict.fromkeys(map(written, uneven)), ""]

    def options(self, exact: bool = False) -> list[Option]:
        """Estimate every plan of one to ``gpus`` ranks; ``exact``: of those whose result is one GPU's."""
        options = []
        for ranks in range(1, self.gpus + 1):
            shares = self._shares(ranks)
            asked = self.of_first(ranks)
            # alike GPUs have other rooms, too: one has ComfyUI and a desktop
            rooms = asked.machine.rooms(ranks)
            uneven = ranks > 1 and len(set(rooms)) > 1 and not self.shares
            for plan in candidates(asked.shape, self.request, ranks=ranks, base=self.base, exact=exact):
                tried = [self.option(replace(plan, shares=each)) for each in shares]
                # each holds about as much as the fullest: what is more than all rooms fits by no shares
                may = uneven and min(each.bytes for each in tried) * ranks <= FILLED * sum(rooms)
                if may and not any(each.fits for each in tried):
                    tried.append(self.option(self._filling_alike(plan)))
                options += tried
        return options

    def _filling_alike(self, plan: ParallelConfig) -> ParallelConfig:
        """Return the plan with shares by which all GPUs are alike full: what each holds whatever its share
        fills a small one most."""
        asked = self.of_first(plan.world_size)
        shares = rooms = [max(1, room) for room in asked.machine.rooms(plan.world_size)]
        for _ in range(FILLINGS):
            # in per cents of an even share: a few tokens more leave the weights where they are
            whole = 100 * len(shares) / sum(shares)
            plan = replace(plan, shares=written([round(whole * each) or 1 for each in shares]))
            sizes = [each.bytes for each in held_by_rank(*asked._models(plan))]
            if all(size <= room for size, room in zip(sizes, rooms)):
                break
            shares = [share * room / size for share, room, size in zip(shares, rooms, sizes)]
        return plan

    def in_turns(self, exact: bool = False) -> list[Option]:
        """Estimate every plan with one model at a time on the ranks, and the seconds in which they change:
        one that has left for ComfyUI's models does not leave once more for the next of the ranks'."""
        options = []
        for each in replace(self, others=(), swaps=replace(self.swaps, left_by_comfyui=())).options(exact):
            asked = self.of_first(each.plan.world_size)
            models = (asked.shape, each.plan, self.request, asked.others)
            swap, reads = self.swaps.swap(*models, self.machine.host_link)
            options.append(replace(each, seconds=each.seconds + swap, swap_seconds=swap, rereads=reads))
        return options
