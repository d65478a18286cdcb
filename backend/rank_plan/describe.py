"""What each rank of a configuration would hold, compute and send, from a checkpoint's headers alone: nothing
is loaded, no rank is started."""

from dataclasses import asdict, dataclass

import torch

from ..config import ParallelConfig
from ..loading.checkpoint import Checkpoint, open_checkpoint
from ..loading.load_report import blocks_text
from ..parallel.block_cost import IMAGE_TOKENS, TEXT_TOKENS
from ..parallel.mesh import layout
from .traffic import sent
from .workload import Workload

#: Calls of the model in a request that gives no number of them.
CALLS = 28


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds and sends. Bytes are per rank.

    patches: (text tokens, tokens of the image stream) of this rank in each patch. host_bytes: weights that
    wait in host memory (offload_modulation). modulation_bytes: the most modulation that is cached at once.
    bytes_per_step: in the steady state, by mechanism.

    Samples are taken to have one prompt, whose modulation they share. Where it depends on the time alone,
    positive and negative prompts share theirs too, which halves both.
    """

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
    image_tokens: int = IMAGE_TOKENS,
    text_tokens: int = TEXT_TOKENS,
    batch: int = 1,
    branches: int = 2,
    dtype: torch.dtype | None = None,
    calls: int = CALLS,
) -> list[RankPlan]:
    """Describe every rank of ``config`` with the transformer at ``model``.

    image_tokens, text_tokens: of a request (4096 + 512: Flux at 1024 x 1024). branches: 2 with a negative
    prompt. dtype: of the weights (the file's by default). calls: of the model with each prompt, one a step
    for most solvers. Raises ConfigError and UnsupportedError as loading does.
    """
    checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model)
    work = Workload(
        config.validate(),
        checkpoint,
        image_tokens,
        text_tokens,
        max(1, batch // config.data_parallel_degree),
        branches // config.cfg_degree,
        dtype or checkpoint.dtype,
        calls,
    )
    ranks = layout(config)
    places = [
        dict(zip(config.degrees, (ranks == rank).nonzero()[0].tolist())) for rank in range(config.world_size)
    ]
    return [_plan(work, rank, place) for rank, place in enumerate(places)]


def _plan(work: Workload, rank: int, place: dict[str, int]) -> RankPlan:
    stages = work.checkpoint.stages(work.config)
    blocks = stages.blocks[place["pp"]]
    patches = work.patches(place)
    traffic = sent(work, place, stages, patches)
    weights, host = work.weight_bytes(place, stages)
    return RankPlan(
        rank,
        place,
        place["pp"],
        (blocks.start, blocks.stop),
        work.heads(place),
        [(len(patch.local.text), patch.local.stream) for patch in patches],
        weights,
        host,
        work.kv_bytes(place, len(blocks), patches),
        work.modulation_bytes(place, stages),
        {name: size for name, size in traffic.items() if size},
    )
