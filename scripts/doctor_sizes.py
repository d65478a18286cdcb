"""How large models are that scripts/doctor.py --full runs."""

from dataclasses import dataclass

#: Blocks of released models that are timed: as many as two stages need. In bf16 a block of Wan 14B has
#: 0.7 GB, one of MiniMax-H3 1.29.
BLOCKS = 2


def timed_blocks(ranks: int) -> int:
    """Return the blocks of released models that so many ranks are timed with: what an even number of stages
    needs, or three stages."""
    return 3 if ranks % 2 and ranks % 3 == 0 else BLOCKS


@dataclass(frozen=True)
class Size:
    """What runs on a kind of device. flux: the mid-size model's arguments after common.FLUX; side, text: its
    latent and prompt; steps: of two requests, whose difference is timed; width: of quantized files; slack:
    bytes that a rank may hold besides what is planned."""

    flux: dict
    side: int
    text: int
    steps: tuple[int, int]
    width: int
    slack: int


SIZES = {
    "cuda": Size(
        # Flux.1's width, 10 of its 57 blocks: 1.8 billion parameters, 3.6 GB in bf16, at 1024 x 1024
        flux=dict(
            num_layers=2,
            num_single_layers=8,
            attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=4096,
            axes_dims_rope=(16, 56, 56),
        ),
        side=128,
        text=512,
        steps=(3, 11),
        width=2048,
        slack=1_200_000_000,
    ),
    "cpu": Size(dict(num_layers=2, num_single_layers=4), 32, 64, (2, 5), 256, 400_000_000),
}
