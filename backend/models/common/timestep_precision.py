"""Timesteps in full precision: some of diffusers' transformers round them before they make sines of them (of
1000 steps bf16 tells one in four from the next), ComfyUI's afterwards."""

import torch
from torch import nn


def keep_timestep(transformer: nn.Module, embed: nn.Module, reader: nn.Linear, factor: float = 1.0):
    """Give ``embed``, whose first argument is a rounded timestep, the transformer's own times ``factor``, and
    zeros for reference tokens; ``reader``: the first layer after the sines."""
    seen = {}

    def exact(module, args):
        time = seen["timestep"].float() * factor
        return torch.cat([time, time.new_zeros(len(args[0]) - len(time))]), *args[1:]

    transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(timestep=kwargs["timestep"]), with_kwargs=True
    )
    embed.register_forward_pre_hook(exact)
    round_input(reader)


def round_input(layer: nn.Linear):
    """Give a layer its input in the type of its weights."""
    layer.register_forward_pre_hook(lambda layer, args: args[0].to(layer.weight.dtype))
