"""What FSDP2 does to the arguments of a transformer on GPUs alone: it brings their tensors to the device, and
makes new lists, tuples and dicts for that."""

import torch
from torch import nn
from torch.distributed.utils import _to_kwargs


def call_as_sharded(transformer: nn.Module):
    """Have ``transformer`` called with what FSDP2 would make of its arguments on a GPU."""

    def rebuilt(module, args, kwargs):
        ((args,), (kwargs,)) = _to_kwargs(args, kwargs, torch.device("cpu"), False)
        return args, kwargs

    transformer.register_forward_pre_hook(rebuilt, prepend=True, with_kwargs=True)
