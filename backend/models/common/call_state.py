"""What the hooks of a transformer keep of one call."""

from types import SimpleNamespace
from typing import Any

from torch import nn


def call_state(transformer: nn.Module, **between: Any) -> SimpleNamespace:
    """Return a place for what hooks of ``transformer`` keep of the call under way. After each call, finished
    or not, it holds ``between`` again: no prompt or control video stays on the device."""
    call = SimpleNamespace(**between)

    def release(module, args, output):
        vars(call).update(between)

    transformer.register_forward_hook(release, always_call=True)
    return call
