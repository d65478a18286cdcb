"""The number of patches of a request where Parallel Config leaves it open. It is chosen before anything is
sent, so that ranks, checks and reports all read one number."""

from dataclasses import replace

from ...config import ParallelConfig
from ...planner import patches
from .model_choice import ModelChoice
from .planning import EstimateOf, known_question


def with_patches(
    config: ParallelConfig, model: ModelChoice, request: EstimateOf
) -> tuple[ParallelConfig, tuple[str, ...]]:
    """Return ``config`` with the number of patches (ParallelConfig.patches) that fills its pipeline best, and
    a line that says it: as many as stages, which 0 is to ranks, where model or machine were not measured
    before. A number that is set, and one stage, stay without a line. Equal requests get equal numbers while
    the measurements are cached: what is free at the moment, and what this process saw, do not count."""
    if not patches.are_open(config):
        return config, ()
    question = known_question(config, model, request)
    count, saved = config.patches, 0.0
    if question is not None:
        # ranks that ran out of memory keep no weights dequantized: whether any did is of this process
        of_request = replace(question, caches_dequantized=False)
        count, saved = patches.filling(of_request, config)
    line = f"num_pipeline_patch 0: {count} patches"
    if count == config.patches:
        return config, (line,)
    line += f", about {saved:.0%} less time than with {config.patches} (projected)"
    return replace(config, num_pipeline_patch=count), (line,)
