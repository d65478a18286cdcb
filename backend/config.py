"""ParallelConfig: the degrees of every parallel method, their product, and what is refused. Shared by the
nodes and the backend; standard library only."""

import math
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from . import shares
from .errors import ConfigError as ConfigError
from .hardware.gpu_sharing import shares_gpu

#: Mesh axes, slowest first (the order of ranks), and the field of ParallelConfig that sizes each of them.
AXES = {
    "dp": "data_parallel_degree",
    "cfg": "cfg_degree",
    "pp": "pipefusion_degree",
    "ring": "ring_degree",
    "ulysses": "ulysses_degree",
    "tp": "tensor_parallel_degree",
}
#: Field -> the values that it can have.
CHOICES = {
    "attention": ("auto", "sdpa", "flash-attn", "sage", "flash-attn-3", "flash-attn-4", "sage-3", "cudnn"),
    "device": ("auto", "cuda", "cpu"),
    "stale_kv": ("reuse", "extrapolate"),
    "split_scheme": ("megatron", "row", "column", "2d"),
    "compile": ("auto", "off", "blocks"),
    "wire": ("full", "fp8"),
}
#: Fields that travel with each request, so that a running backend takes other values.
PER_REQUEST = ("num_pipeline_patch", "warmup_steps", "stale_kv", "attention", "compile", "wire")
#: Fields besides the degrees by which ranks hold and share their weights.
OF_RANKS = ("attn_layer_num_for_pp", "split_scheme", "shard_weights", "offload_modulation", "shares")
#: On the CPU a rank is a process of a few GB and seconds of imports: more than this is a slip of the mouse.
MAX_CPU_RANKS = 16
#: More ranks than anybody has: lists of them stay small.
MAX_RANKS = 4096
#: Field -> its largest value, far beyond what is of use.
MAX_VALUES = {**dict.fromkeys(AXES.values(), MAX_RANKS), "num_pipeline_patch": 4096, "warmup_steps": 10_000}


@dataclass(frozen=True)
class ParallelConfig:
    """How many ranks each parallel method gets, and how PipeFusion cuts its patches.

    ``stale_kv`` says how PipeFusion reads tokens not refreshed in this step
    (parallel/attention/attention_hook.py); ``attn_layer_num_for_pp`` lists the blocks of each stage
    ("12,15,15,15"; empty: balanced); ``split_scheme`` is how tensor parallelism cuts matrices
    (parallel/matrix_cuts.py); ``shard_weights`` shards the weights over the ranks that would hold the same
    ones (FSDP2); ``offload_modulation`` keeps the adaLN weights in host memory, since modulation is computed
    for many steps at once (parallel/modulation/modulation_cache.py). ``num_pipeline_patch`` and
    ``warmup_steps`` concern PipeFusion (arXiv 2405.14430) alone. ``gpus`` lists device indices ("0,2,3");
    empty means the first ones. ``shares`` lists each rank's share of the work ("60,40"); empty means equal.
    ``address`` names a backend that already runs (unix:PATH or tcp:HOST:PORT); empty launches one here.
    ``compile``: are blocks compiled (parallel/compiled_blocks.py)? "auto" is the planner's choice, "off"
    where degrees are set by hand. ``wire``: in what type Ulysses and rings send (parallel/wire.py)."""

    cfg_degree: int = 1
    pipefusion_degree: int = 1
    ulysses_degree: int = 1
    ring_degree: int = 1
    data_parallel_degree: int = 1
    tensor_parallel_degree: int = 1
    num_pipeline_patch: int = 0
    warmup_steps: int = 1
    stale_kv: str = "reuse"
    attn_layer_num_for_pp: str = ""
    split_scheme: str = "megatron"
    shard_weights: bool = False
    offload_modulation: bool = False
    attention: str = "auto"
    device: str = "auto"
    gpus: str = ""
    shares: str = ""
    address: str = ""
    compile: str = "auto"
    wire: str = "full"

    @property
    def degrees(self) -> dict[str, int]:
        """Size of every mesh axis, slowest first."""
        return {axis: getattr(self, field) for axis, field in AXES.items()}

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def sp_degree(self) -> int:
        """Sequence parallel degree: ring x ulysses."""
        return self.ring_degree * self.ulysses_degree

    @property
    def prompt_degree(self) -> int:
        """Ranks that divide blocks, tokens and matrices of one prompt: pp x ring x ulysses x tp."""
        return self.pipefusion_degree * self.sp_degree * self.tensor_parallel_degree

    @property
    def sharding_degree(self) -> int:
        """Ranks that divide the weights under shard_weights: dp x ring x ulysses."""
        return self.data_parallel_degree * self.sp_degree

    @property
    def patches(self) -> int:
        """Pipeline patches per step (M): ``num_pipeline_patch``, or the pipeline degree where that is 0 and
        nothing has chosen another number (client/auto/open_patches.py)."""
        return self.num_pipeline_patch or self.pipefusion_degree

    @property
    def has_stale_kv(self) -> bool:
        """Return whether attention reads keys and values of the step before, since stages compute a patch at
        a time."""
        return self.pipefusion_degree > 1 and self.patches > 1

    @property
    def product(self) -> str:
        """The equation of the world size with its values, for messages."""
        return f"{in_words(self.degrees)} = {self.world_size} rank{'s' * (self.world_size > 1)}"

    @property
    def stage_counts(self) -> list[int]:
        """Blocks of each stage, empty where the split is ours. ConfigError for what is no such list."""
        text = self.attn_layer_num_for_pp.strip()
        if not text:
            return []
        try:
            counts = [int(entry) for entry in text.split(",")]
        except ValueError:
            raise ConfigError(
                f"attn_layer_num_for_pp is {text!r:.200}, which is not a list of block counts. Write it like "
                f'"12,15,15,15" or leave it empty.'
            ) from None
        if len(counts) != self.pipefusion_degree or min(counts) < 1:
            raise ConfigError(
                f"attn_layer_num_for_pp is {text!r:.200} but pipefusion_degree is {self.pipefusion_degree}: "
                f"name that many stages, each with at least one block."
            )
        return counts

    @property
    def gpu_indices(self) -> list[int]:
        """The devices of ranks 0..N-1. ConfigError for a list that does not name each rank's once."""
        if shares_gpu():
            return [0] * self.world_size
        if not self.gpus.strip():
            return list(range(self.world_size))
        try:
            indices = [int(entry) for entry in self.gpus.split(",")]
        except ValueError:
            raise ConfigError(
                f"gpus is {self.gpus!r:.200}, which is not a list of device numbers. Write it like "
                f'"0,2,3" or leave it empty.'
            ) from None
        if len(set(indices)) != len(indices) or min(indices) < 0:
            raise ConfigError(
                f"gpus is {self.gpus!r:.200}: every device must be named once, with a number from 0. Name "
                f"{self.world_size} different devices."
            )
        if len(indices) != self.world_size:
            raise ConfigError(
                f"gpus names {len(indices)} device{'s' * (len(indices) > 1)} but {self.product}. Name as "
                f"many devices as there are ranks."
            )
        return indices

    @property
    def rank_shares(self) -> tuple[float, ...]:
        """Each rank's share of the work; () where all are equal. ConfigError for what is no such list."""
        own = shares.parsed(self.shares)
        if own and len(own) != self.world_size:
            raise ConfigError(
                f"shares is {self.shares!r:.200}, {len(own)} number{'s' * (len(own) > 1)}, but "
                f"{self.product}. Write one for each rank, in the order of gpus, or leave it empty."
            )
        return own

    def shares_of(self, *axes: str) -> tuple[float, ...]:
        """Return each index's share on mesh ``axes``: the sum over its ranks; () where they are equal."""
        return shares.axis_shares(self.rank_shares, tuple(self.degrees.items()), axes) if self.shares else ()

    def topology(self) -> tuple:
        """Return what a running backend cannot change: all but the settings that travel with each request."""
        return tuple(value for key, value in asdict(self).items() if key not in PER_REQUEST)

    @property
    def per_request(self) -> dict[str, Any]:
        """The settings that travel with each request (protocol.Sample)."""
        return {name: getattr(self, name) for name in PER_REQUEST}

    @property
    def of_ranks(self) -> dict[str, Any]:
        """The settings that ranks run with (protocol.Welcome)."""
        return {name: getattr(self, name) for name in OF_RANKS}

    def same_ranks(self, other: "ParallelConfig") -> bool:
        """Return whether these ranks can run the other configuration: as many, on the same devices."""
        same_devices = self.device == other.device and self.gpu_indices == other.gpu_indices
        return same_devices and self.address == other.address

    def same_weights(self, other: "ParallelConfig") -> bool:
        """Return whether every rank holds of any model what it would hold in ``other``."""
        return self.placement == other.placement

    @property
    def placement(self) -> tuple:
        """What decides the weights of each rank: stage and shard of matrices; process groups if sharded."""
        if self.shard_weights:
            return self.topology()
        stages = self.pipefusion_degree
        sp = self.sp_degree
        tp = self.tensor_parallel_degree
        uneven = (self.shares_of("pp"), self.shares_of("tp"))
        scheme = self.split_scheme if tp > 1 else ""
        kind = (stages, tuple(self.stage_counts), tp, scheme, self.offload_modulation, uneven)
        return tuple((rank // (sp * tp) % stages, rank % tp, *kind) for rank in range(self.world_size))

    def check_guidance(self, cfg: float, negative: bool):
        """Refuse a cfg_degree of 2 where no ``negative`` prompt is computed. Raises ConfigError."""
        if self.cfg_degree == 2 and not negative:
            raise ConfigError(
                f"cfg {cfg:g} skips the negative prompt: set cfg_degree to 1 (and ulysses_degree to 2, say) "
                f"or raise cfg; cfg_degree 2 would leave half of the ranks without work."
            )

    def check_batch(self, batch: int):
        """Refuse a batch that leaves a data-parallel replica without work. Raises ConfigError."""
        if batch < self.data_parallel_degree:
            raise ConfigError(
                f"data_parallel_degree is {self.data_parallel_degree} but the latent's batch is {batch}; "
                f"every replica needs a sample, so raise the batch or lower the degree."
            )

    def resolve_device(self, gpus_here: int) -> str:
        """Return "cuda" or "cpu" for a machine with ``gpus_here`` GPUs. Raises ConfigError where the ranks do
        not fit."""
        if sys.platform == "win32":
            raise ConfigError(
                "ranks do not run under Windows, where torch has no NCCL to join GPUs; run ComfyUI under "
                "Linux or WSL2."
            )
        device = self.device
        if device == "auto":
            device = "cuda" if gpus_here else "cpu"
        if device == "cuda" and not gpus_here:
            raise ConfigError("device is cuda but this machine has no CUDA GPU; set device to cpu or auto.")
        if device == "cuda" and max(self.gpu_indices) >= gpus_here:
            asked = f"gpus is {self.gpus!r:.200}" if self.gpus.strip() else self.product
            raise ConfigError(
                f"{asked}, but this machine has {gpus_here} GPU{'s' * (gpus_here > 1)} (numbered from 0); "
                f"lower a degree, change gpus, or set device to cpu for a small model."
            )
        if device == "cpu" and self.world_size > MAX_CPU_RANKS:
            raise ConfigError(
                f"{self.product}, but on the CPU this machine runs at most {MAX_CPU_RANKS}; lower a degree."
            )
        return device

    def validate(self) -> "ParallelConfig":
        """Return self, or raise ConfigError for the first field that cannot be."""
        for field in fields(self):
            value = getattr(self, field.name)
            kind = type(field.default)
            if type(value) is not kind:
                raise ConfigError(f"{field.name} is {value!r:.100}; write it as {kind.__name__}.")
        self._validate_sizes()
        self._validate_pipeline()
        self._validate_weights()
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"{name} is {value!r:.100}; choose one of {', '.join(allowed)}.")
        if self.wire != "full" and self.sp_degree == 1:
            raise ConfigError(
                f"wire is {self.wire} but ulysses_degree and ring_degree are 1, whose traffic it is for; "
                f"raise one of them or set wire to full."
            )
        if self.gpus.strip() and self.device == "cpu":
            raise ConfigError(
                f"gpus is {self.gpus!r:.200} while device is cpu; clear gpus or set device to cuda."
            )
        _ = self.gpu_indices  # refuses what is not a list of numbers
        _ = self.rank_shares
        return self

    def _validate_sizes(self):
        for name, most in MAX_VALUES.items():
            if getattr(self, name) > most:
                raise ConfigError(f"{name} is {_short(getattr(self, name))}; use at most {most}.")
        for name in AXES.values():
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {_short(getattr(self, name))}; a degree is at least 1 (1 switches the "
                    f"method off)."
                )
        if self.world_size > MAX_RANKS:
            raise ConfigError(f"{self.product}, more than {MAX_RANKS}; lower a degree.")
        if self.cfg_degree > 2:
            raise ConfigError(
                f"cfg_degree is {self.cfg_degree}, but guidance has two branches (positive and negative); "
                f"set it to 1 or 2."
            )

    def _validate_weights(self):
        for name in ("pipefusion_degree", "tensor_parallel_degree"):
            if self.shard_weights and getattr(self, name) > 1:
                raise ConfigError(
                    f"shard_weights is on and {name} is {getattr(self, name)}, which divides the weights "
                    f"already; switch shard_weights off or set {name} to 1."
                )
        if self.shard_weights and self.sharding_degree == 1:
            raise ConfigError(
                "shard_weights shards over ulysses, ring and data-parallel ranks, but those degrees are 1; "
                "raise one of them or switch shard_weights off."
            )
        if self.shard_weights and self.offload_modulation:
            raise ConfigError(
                "offload_modulation and shard_weights are both on, but sharded weights stay on the device; "
                "switch one of them off."
            )
        _ = self.stage_counts  # refuses what is not a list of numbers

    def _validate_pipeline(self):
        if self.num_pipeline_patch < 0:
            shown = _short(self.num_pipeline_patch)
            raise ConfigError(f"num_pipeline_patch is {shown}; use 0 to leave it open, or a positive number.")
        if self.num_pipeline_patch > 1 and self.pipefusion_degree == 1:
            raise ConfigError(
                f"num_pipeline_patch is {self.num_pipeline_patch} but pipefusion_degree is 1, so nothing "
                f"would be cut; set pipefusion_degree to 2 or more, or num_pipeline_patch to 0."
            )
        if self.has_stale_kv and self.warmup_steps < 1:
            raise ConfigError(
                f"warmup_steps is {_short(self.warmup_steps)}; PipeFusion with {self.patches} patches needs "
                f"at least one synchronous step to fill its key/value buffers."
            )
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps is {_short(self.warmup_steps)}; use 0 or a positive number.")


def in_words(degrees: dict) -> str:
    """Name the degrees above 1 of ``degrees`` (mesh axis -> size) as the inputs of Parallel Config do."""
    terms = [f"{AXES.get(axis, axis)} {size}" for axis, size in degrees.items() if size != 1]
    return " x ".join(terms) or "every degree 1"


def _short(number: int) -> str:
    """Return a number for a message; Python writes none of thousands of digits."""
    return str(number) if abs(number) < 10**21 else "a number of more than 21 digits"
