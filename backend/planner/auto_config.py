"""What Parallel Config says where the degrees are left to the planner."""

from dataclasses import dataclass, replace

from ..config import AXES, MAX_CPU_RANKS, ConfigError, ParallelConfig
from ..hardware.gpu_sharing import shares_gpu
from ..shares import parsed
from .choose import AUTO, MANUAL, METHODS

#: Fields that the planner sets, and ``wire``, which it never changes: it is not exact. A graph that sets one
#: of them has chosen by hand.
PLANNED = (*AXES.values(), "num_pipeline_patch", "attn_layer_num_for_pp", "shard_weights", "wire")


def set_by_hand(config: ParallelConfig) -> list[str]:
    """Name the fields by which a configuration says itself how the work is shared."""
    return [name for name in PLANNED if getattr(config, name) != getattr(ParallelConfig, name)]


def unused_method(method: str, config: ParallelConfig) -> str:
    """Say that ``method`` chooses nothing where ``config`` does by hand; nothing where it does as it says."""
    chosen = set_by_hand(config)
    if method == MANUAL or not chosen:
        return ""
    listed = ", ".join(f"{name} {getattr(config, name)}" for name in chosen)
    rest = f"is set; choose manual, or set it back to its default for {method}."
    if len(chosen) > 1:
        rest = f"are set; choose manual, or set them back to their defaults for {method}."
    return f"method {method} is not used: {listed} {rest}"


@dataclass(frozen=True)
class AutoConfig:
    """A configuration whose degrees the planner chooses. gpus: how many ("2"), their numbers ("0,2"), or
    empty for all. base: everything that is no degree. shares: of the work of each of the GPUs, in their
    order; empty: measured where they differ."""

    method: str = AUTO
    gpus: str = ""
    base: ParallelConfig = ParallelConfig()
    shares: str = ""

    @property
    def rank_shares(self) -> tuple[float, ...]:
        """The shares as numbers; () where there are none. ConfigError for what is no such list."""
        return parsed(self.shares)

    def devices(self, gpus_here: int) -> list[int]:
        """Return the GPUs that may be used on a machine with so many, or the ranks of the CPU. ConfigError
        for what is no such list, for more than there are, and for shares of others."""
        devices = self._devices(gpus_here)
        shares = self.rank_shares
        if shares and len(shares) != len(devices):
            ranks = "is one rank" if len(devices) == 1 else f"are {len(devices)} ranks"
            raise ConfigError(
                f"shares is {self.shares!r:.200}, {len(shares)} numbers, but there {ranks} to use (gpus is "
                f"{self.gpus!r:.200}). Write one number for each, or leave shares empty."
            )
        return devices

    def _devices(self, gpus_here: int) -> list[int]:
        on_gpus = self.base.resolve_device(gpus_here) == "cuda"
        text = self.gpus.strip()
        if not text:  # a process on the CPU uses all its cores: more of them gain little
            return list(range(gpus_here)) if on_gpus else [0]
        remedy = "lower it"
        if "," in text:
            remedy = "name others"
            indices = replace(self.base, gpus=text, data_parallel_degree=text.count(",") + 1).gpu_indices
            if not on_gpus:
                raise ConfigError(
                    f"gpus is {text!r:.200}, numbers of GPUs, but the ranks run on the CPU; say how many."
                )
        else:
            indices = list(range(_count(text)))
        if on_gpus and not shares_gpu() and max(indices) >= gpus_here:
            raise ConfigError(
                f"gpus is {text!r:.200}, but this machine has {gpus_here} GPU{'s' * (gpus_here > 1)} "
                f"(numbered from 0); {remedy}, or leave it empty for all."
            )
        if not on_gpus and len(indices) > MAX_CPU_RANKS:
            raise ConfigError(
                f"gpus is {text!r:.200}, but on the CPU this machine runs at most {MAX_CPU_RANKS} processes; "
                f"lower gpus."
            )
        return indices

    def placed(self, plan: ParallelConfig, devices: list[int]) -> ParallelConfig:
        """Return ``plan`` on the first of ``devices``; those of the CPU are numbered from 0."""
        used = devices[: plan.world_size]
        are_first = used == list(range(plan.world_size))
        listed = "" if are_first else ",".join(map(str, used))
        return replace(plan, gpus=listed, device=self.base.device).validate()


def _count(text: str) -> int:
    """Read how many GPUs. ConfigError for anything but a number from 1."""
    if not text.isdecimal() or not 0 < len(text) < 6 or int(text) < 1:
        raise ConfigError(
            f"gpus is {text!r:.200}; say how many GPUs, like 2, or list their numbers, like 0,2, or leave it "
            f"empty for all."
        )
    return int(text)


def config_of(
    gpus_here: int, method: str = AUTO, gpus: str = "", shares: str = "", **fields
) -> ParallelConfig | AutoConfig:
    """Return the configuration that Parallel Config's inputs give on a machine with so many GPUs; an
    AutoConfig where the degrees are left open. ``fields``: others of ParallelConfig. Raises ConfigError for
    what cannot run there."""
    if method not in METHODS:
        raise ConfigError(f"method is {method!r:.100}; choose one of {', '.join(METHODS)}.")
    config = ParallelConfig(**fields).validate()
    if method != MANUAL and not config.address and not set_by_hand(config):
        auto = AutoConfig(method=method, gpus=gpus, base=config, shares=shares)
        auto.devices(gpus_here)
        return auto
    many = gpus.strip()
    if config.world_size > 1 and many.isdecimal():  # how many, which the degrees say too
        if many != str(config.world_size):
            raise ConfigError(
                f"gpus is {many!r:.200}, but {config.product}. Set the degrees to 1 and method to auto, "
                f"which chooses degrees for as many GPUs, or leave gpus empty."
            )
        gpus = ""
    config = replace(config, gpus=gpus, shares=shares).validate()
    if not config.address:
        if method == MANUAL:
            _check_one_gpu(config, gpus_here)
        config.resolve_device(gpus_here)
    return config


def _check_one_gpu(config: ParallelConfig, gpus_here: int):
    """Refuse the number of the one GPU of ``config``, which may be meant as how many. Raises ConfigError."""
    is_one = config.world_size == 1 and gpus_here and config.device != "cpu"
    if not is_one or max(config.gpu_indices) < gpus_here:
        return
    below = "0" if gpus_here == 1 else f"a number below {gpus_here}"
    raise ConfigError(
        f"method is manual and every degree is 1, so gpus {config.gpus!r:.100} is the number of one GPU: set "
        f"method to auto, where it says how many, or gpus to {below} (this machine has {gpus_here} "
        f"GPU{'s' * (gpus_here > 1)}, numbered from 0)."
    )
