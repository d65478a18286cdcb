"""What a sampler node can tell of the queued graph before it runs."""

from comfy_api.latest import io

from ...backend.config import ConfigError, ParallelConfig
from ..graph.queued_config import config_in
from ..graph.queued_graph import constants, loader_of, queued, source, validated
from .guidance import guidance_of, skips_negative
from .refusals import errors_on_node


class CheckedSampler(io.ComfyNode):
    """A sampler node whose cfg is checked before the graph runs."""

    @classmethod
    def validate_inputs(cls) -> bool:
        """Raise ConfigError where the validated node's guidance does not go with its Parallel Config."""
        graph = queued()
        sampler = validated()
        loader = loader_of(graph, sampler)
        guidance = guidance_of(constants(graph, sampler))
        if loader is None or guidance is None:
            return True
        try:
            config = config_in(graph, source(graph, loader, "config"))
        except ConfigError:  # which its own node says
            return True
        if isinstance(config, ParallelConfig):  # auto chooses degrees that go with it
            with errors_on_node():
                config.check_guidance(guidance[0], not skips_negative(*guidance))
        return True
