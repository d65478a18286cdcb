"""A plan with its estimate, and what it has to gain to be worth its drawbacks."""

from dataclasses import dataclass, replace

from ..config import ParallelConfig, in_words
from .candidates import DEGREES

#: A plan has to be so much faster for every further mechanism and every further rank, and for those with more
#: traffic: what is within the error of the estimate goes to the simpler plan.
MECHANISM, RANK = 1.01, 1.002
TRAFFIC = {"ring_degree": 1.005, "tensor_parallel_degree": 1.02, "shard_weights": 1.02}
#: A plan has to be so much faster if it may run out of memory: it fits, but not with the upper end of the
#: estimate.
TIGHT = 1.1
#: What compiled blocks are taken to save of a request: the least that was measured on a GPU, of Wan 14B
#: (Flux 0.13, Qwen-Image 0.15, docs/performance.md). And the seconds that compiling them costs there, which
#: were not measured: a request has to be so long that it pays without a cache.
COMPILED, COMPILE_SECONDS = 0.08, 60.0


@dataclass(frozen=True)
class Option:
    """A plan with its estimate.

    seconds: of the request. bytes, room: what the rank with least to spare holds, and may hold. likely: room
    plus the most by which any rank likely exceeds its own. unit: what a rank has to itself, for messages.
    swap_seconds: those of the seconds in which this model and another one take turns; rereads: this one is
    read for that. yield_seconds: those in which weights leave for ComfyUI's own models. drift: how many times
    as fast as an exact plan it has to be. compiles: whether blocks can be compiled there.
    """

    plan: ParallelConfig
    seconds: float
    bytes: int
    room: int
    likely: int
    unit: str = "GPU"
    swap_seconds: float = 0.0
    rereads: bool = False
    yield_seconds: float = 0.0
    drift: float = 1.0
    compiles: bool = True

    @property
    def fits(self) -> bool:
        return self.bytes <= self.room

    @property
    def sampling_seconds(self) -> float:
        """Return the seconds without those in which weights leave and come back, which notes name."""
        return self.seconds - self.swap_seconds - self.yield_seconds

    @property
    def _doubt(self) -> float:
        """Return which part of the way from the estimate to its upper end lies beyond the room, 0 to 1;
        continuous, so that small changes flip no choice."""
        return min(1.0, max(0, self.likely - self.room) / max(1, self.likely - self.bytes))

    @property
    def mechanisms(self) -> frozenset[str]:
        """The methods that share the work."""
        sharded = {"shard_weights"} if self.plan.shard_weights else set()
        return frozenset({name for name in DEGREES if getattr(self.plan, name) > 1} | sharded)

    @property
    def score(self) -> float:
        """Seconds, with what a plan has to gain to be worth its drawbacks."""
        penalty = MECHANISM ** len(self.mechanisms) * RANK**self.plan.world_size
        penalty *= self.drift * (1.0 + (TIGHT - 1.0) * self._doubt)
        # in one order: the hash of a name, and with it a set's order, is another in every process
        for mechanism in sorted(self.mechanisms & TRAFFIC.keys()):
            penalty *= TRAFFIC[mechanism]
        return self.seconds * penalty

    def spares_turns_of(self, other: "Option") -> bool:
        """Return whether no models take turns here, where they do in ``other``, at about its speed, with
        no more drift and no more doubt."""
        if self.swap_seconds or not other.swap_seconds:
            return False
        about_as_fast = self.seconds <= MECHANISM * other.seconds
        return about_as_fast and self.drift <= other.drift and self._doubt <= other._doubt

    def why_not(self, chosen: "Option", looks_alike: bool = False) -> str:
        """Return why ``chosen`` is taken instead; empty where this one is not faster. ``looks_alike``: no
        difference of their speeds is shown."""
        if self.seconds >= chosen.seconds:
            return ""
        if self._doubt > chosen._doubt:
            return "faster, but it may run out of memory"
        if self.drift > chosen.drift:
            return "faster, but its result drifts further from one GPU's"
        if looks_alike:
            return "about as fast, and the simpler plan is taken"
        return "faster by less than the error of the estimate"

    @property
    def name(self) -> str:
        """The inputs of Parallel Config that make it."""
        words = [in_words(self.plan.degrees)] if self.plan.world_size > 1 else [f"one {self.unit}"]
        if self.plan.pipefusion_degree > 1:
            words.append("1 patch" if self.plan.patches == 1 else f"{self.plan.patches} patches")
        if self.plan.shard_weights:
            words.append("shard_weights")
        if self.plan.compile == "blocks":
            words.append("compiled blocks")
        if self.plan.shares:
            words.append(f"shares {self.plan.shares}")
        return ", ".join(words)

    @property
    def with_compile(self) -> "Option":
        """The option with compiled blocks, if that is left open and its steps are long or many enough."""
        if self.plan.compile != "auto":
            return self
        pays = self.compiles and COMPILED * self.seconds > COMPILE_SECONDS
        return replace(self, plan=replace(self.plan, compile="blocks" if pays else "off"))
