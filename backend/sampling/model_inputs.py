"""What a request, or a call, gives the model: looked up once on each rank, by rank 0 as it checks it."""

from dataclasses import dataclass, replace

from torch import Tensor

from ..config import PER_REQUEST, ParallelConfig
from ..loading.checkpoint import Checkpoint
from ..models.family import Arguments, Grid
from ..protocol import ModelCall, Sample
from .guidance import CFG_BRANCHES, names


@dataclass(frozen=True)
class ModelInputs:
    """latent: noise or x (B, C, [T,] H, W), without channels that a client joined to it; grid: its tokens.
    prompts: name -> model arguments as they came, the positive ones first; of a call there is one."""

    latent: Tensor
    grid: Grid
    prompts: dict[str, Arguments]

    @property
    def batch(self) -> int:
        return self.latent.shape[0]


def run_config(message: Sample | ModelCall, config: ParallelConfig) -> ParallelConfig:
    """Return the backend's configuration with the settings of a request; nothing is stale in a call."""
    if isinstance(message, Sample):
        return replace(config, **{name: getattr(message, name) for name in PER_REQUEST})
    asked = {"attention": message.attention, "compile": message.compile, "wire": message.wire}
    return replace(config, num_pipeline_patch=1, **asked)


def inputs_of(message: Sample | ModelCall, checkpoint: Checkpoint) -> ModelInputs:
    """Return what a message whose latent is checked gives the model."""
    family = checkpoint.family
    tensors = message.tensors
    if isinstance(message, Sample):
        latent = tensors["noise"]
        prompts = {name: arguments_of(name, tensors) for name in names(message)}
    else:
        x = tensors["x"]
        channels = x.shape[1] if family.latent.nested else family.latent.channels(checkpoint.config)
        latent = x[:, :channels]
        arguments = arguments_of("cond", tensors)
        if x.shape[1] > channels:  # as ComfyUI joins them to the latent
            arguments["c_concat"] = x[:, channels:]
        prompts = {CFG_BRANCHES[0]: arguments}
    grid = family.latent.grid(checkpoint.config, latent.shape[1:], message.latent_shapes, prompts.values())
    return ModelInputs(latent, grid, prompts)


def arguments_of(prefix: str, tensors: dict[str, Tensor]) -> Arguments:
    """Return the model arguments that a message has as PREFIX.NAME, by NAME."""
    prefix += "."
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
