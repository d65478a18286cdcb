"""Whether ranks can run on what ComfyUI computes on."""

import comfy.model_management
import torch

from ...backend.config import ConfigError, ParallelConfig
from ...backend.planner.auto_config import AutoConfig


def check_device(config: ParallelConfig | AutoConfig):
    """Raise ConfigError where ranks do not run on this machine, or would run on the CPU next to a GPU of
    another kind that ComfyUI uses."""
    base = config.base if isinstance(config, AutoConfig) else config
    if base.address:
        return
    device = base.resolve_device(torch.cuda.device_count())
    kind = comfy.model_management.get_torch_device().type
    if device == "cpu" and base.device == "auto" and kind not in ("cpu", "cuda"):
        raise ConfigError(
            f"ComfyUI computes on {kind}, but ranks run on GPUs of NVIDIA and AMD (CUDA, ROCm) or on the "
            f"CPU; use KSampler, or set device of Parallel Config to cpu, which is slow."
        )
