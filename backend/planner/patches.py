"""How many patches a plan set by hand has where their number is left open (``num_pipeline_patch`` 0): as many
as stages, or one more, with which no stage waits while outputs go back to the first one."""

from dataclasses import replace

from ..config import ParallelConfig
from .candidates import takes_patches
from .question import Question

#: One more patch has to save so much of a request's time, with what a plan has to gain to be worth its drift
#: (Option.score): less is within the error of the estimate.
LEAST_SAVED = 0.02


def are_open(config: ParallelConfig) -> bool:
    """Return whether ``config`` leaves the number of patches open."""
    return config.pipefusion_degree > 1 and config.num_pipeline_patch == 0


def filling(question: Question, config: ParallelConfig) -> tuple[int, float]:
    """Return how many patches fill a pipeline best, and the part of the seconds that this saves, or 0.0."""
    stages = config.pipefusion_degree
    plans = [replace(config, num_pipeline_patch=patches) for patches in (stages, stages + 1)]
    # the cost model divides blocks evenly: where the user has set them it projects other stages
    if config.stage_counts or not takes_patches(plans[1], question.shape, question.request):
        return stages, 0.0
    as_stages, one_more = map(question.option, plans)
    if one_more.score > (1 - LEAST_SAVED) * as_stages.score:
        return stages, 0.0
    return stages + 1, 1 - one_more.seconds / as_stages.seconds
