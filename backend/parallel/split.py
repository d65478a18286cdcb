"""Which blocks of a transformer each pipeline stage holds."""


def stage_blocks(blocks: int, stages: int) -> list[range]:
    """Nearly equal consecutive ranges, none empty; ``blocks`` >= ``stages``."""
    cuts = [blocks * i // stages for i in range(stages + 1)]
    return [range(lo, hi) for lo, hi in zip(cuts, cuts[1:])]
