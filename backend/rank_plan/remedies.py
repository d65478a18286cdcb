"""Settings with which a load or a request that does not fit would: each is planned, none is guessed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..config import ConfigError, ParallelConfig
from ..errors import UnsupportedError
from ..planner.config_changes import dividing_weights, settings
from ..sampling.validation import check_degrees
from .describe import describe
from .need import request_need, weight_need
from .request_size import RequestSize
from .workload import Workload

#: Bits of a value in quantized files, scales included: fp8 and Q8_0, then Q4_K.
QUANTIZED = {"an 8-bit file": 9, "a 4-bit file": 5}
#: Settings that are named at most.
MAX_REMEDIES = 3
NO_SETTING = (
    "No single setting (stale_kv, num_pipeline_patch, offload_modulation, shard_weights, "
    "tensor_parallel_degree, pipefusion_degree, a quantized file) makes it fit on these ranks: use more of "
    "them, a smaller latent, or free the memory that other programs hold."
)


@dataclass(frozen=True)
class Remedy:
    """What to change (for the sentence), and what then runs."""

    text: str
    config: ParallelConfig
    size: RequestSize
    bits: int = 0


def remedies(
    config: ParallelConfig,
    size: RequestSize,
    quantized: bool,
    parks: bool = True,
    own: ParallelConfig | None = None,
) -> Iterator[Remedy]:
    """Yield changes of the configuration, the file or the request that may need less memory, the cheapest
    for the user first. They need not suit the model. ``parks``: host memory is not the GPU's own. ``own``:
    as in settings."""
    fields = []
    if config.has_stale_kv:
        fields = [{"stale_kv": "reuse"}, {"num_pipeline_patch": 1, "stale_kv": "reuse"}]
    if parks:
        fields.append({"offload_modulation": True})
    fields += [{"shard_weights": True}, *dividing_weights(config.prompt_degree)]
    for other in dict.fromkeys(replace(config, **changed) for changed in fields):
        if other != config:
            yield Remedy(settings(config, other, own), other, size)
    if not quantized:
        for file, bits in QUANTIZED.items():
            yield Remedy(file, config, size, bits)
    if size.batch > config.data_parallel_degree:
        least = replace(size, batch=config.data_parallel_degree)
        yield Remedy(f"a batch of {least.batch}", config, least)


def fitting(work: Workload, capacity: list[int], is_host: Sequence[bool], own: ParallelConfig) -> list[str]:
    """Return the first MAX_REMEDIES remedies with which weights and request fit into the ``capacity`` of
    every rank, in bytes; each likely need counts, so that what is named does run. ``is_host``: of each rank,
    as in weight_need; ``own``: as in settings."""
    checkpoint = work.checkpoint
    quantized = checkpoint.is_quantized
    texts = []
    for remedy in remedies(work.config, work.request, quantized, parks=not any(is_host), own=own):
        try:
            check_degrees(checkpoint, remedy.config.validate())
            of_file = None if remedy.bits else work.choices  # another file multiplies otherwise
            plans = describe(remedy.config, checkpoint, remedy.size, work.dtype, of_file, remedy.bits)
        except (ConfigError, UnsupportedError):
            continue  # the model or the other settings forbid it
        weights = map(weight_need, plans, is_host)
        needs = (size + request_need(plan).likely for size, plan in zip(weights, plans))
        if all(need <= room for need, room in zip(needs, capacity)):
            texts.append(remedy.text)
        if len(texts) == MAX_REMEDIES:
            break
    return texts
