"""What the ranks keep of a sampling's conditioning, so that it is sent once and not at every step.

Imports neither ComfyUI nor torch.distributed.
"""

import secrets
from dataclasses import replace

import torch

from ..backend.protocol import ModelCall

#: Smaller tensors are sent each time: that costs less than looking.
LEAST_BYTES = 1 << 16
#: Values of one argument that are kept: a step may call the model several times, with other prompts.
MOST_VALUES = 8


class KeptArguments:
    """This client's view of it. Values are compared, not identities: a node may change a prompt in place, or between two steps."""

    def __init__(self):
        self.reset()

    def reset(self):
        """Refer to nothing that was sent before."""
        self.client, self.count = secrets.token_hex(8), 0
        self.known: dict[str, dict[str, torch.Tensor]] = {}

    def shortened(self, call: ModelCall) -> ModelCall:
        """``call`` without the arguments that the ranks keep, if it reaches them: where it does not, ``reset``."""
        keep, kept, forget = {}, {}, []
        for name, value in call.tensors.items():
            if not name.startswith("cond.") or value.numel() * value.element_size() < LEAST_BYTES:
                continue
            known = self.known.setdefault(name, {})
            key = next((key for key, copy in known.items() if copy.shape == value.shape and copy.dtype == value.dtype and torch.equal(copy, value)), None)
            if key is not None:
                kept[name] = key
                continue
            keep[name], self.count = f"{name} {self.count}", self.count + 1
            known[keep[name]] = value.clone()
            if len(known) > MOST_VALUES:
                forget.append(next(iter(known)))
                del known[forget[-1]]
        tensors = {name: value for name, value in call.tensors.items() if name not in kept}
        return replace(call, client=self.client, keep=keep, kept=kept, forget=forget, tensors=tensors)
