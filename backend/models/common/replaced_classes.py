"""Modules of diffusers' that get a forward of ours, with the weights that they have."""

from collections.abc import Mapping

from torch import nn


def replace_classes(transformer: nn.Module, ours: Mapping[type[nn.Module], type[nn.Module]]):
    """Make every module that is of a class of diffusers' itself one of ``ours``, a subclass of it."""
    for module in transformer.modules():
        if type(module) in ours:
            module.__class__ = ours[type(module)]
