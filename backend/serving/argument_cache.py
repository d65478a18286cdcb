"""Cache of model arguments, such as prompts, that clients refer to in later calls instead of sending them. A
client says what to cache, under which key, and what to forget. Every rank gets the same calls in the same
order, so all cache the same."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..protocol import ModelCall

#: Clients whose arguments are cached: those that called last.
MAX_CACHED_CLIENTS = 4


class ArgumentCache:
    """Tensors that clients have sent before: client -> key -> tensor on ``device``."""

    def __init__(self, device: torch.device):
        self.device = device
        self.clients: dict[str, dict[str, Tensor]] = {}

    @staticmethod
    def check(call: ModelCall):
        """Refuse references that no rank could follow. Raises UnsupportedError."""
        for name in call.cache:
            if name not in call.tensors:
                raise UnsupportedError(
                    f"the call caches {name!r:.200}, which is not among its tensors; send it too."
                )
        for key in (*call.cache.values(), *call.cached.values(), *call.forget):
            if not isinstance(key, str):
                raise UnsupportedError(f"the call has {key!r:.200} as a key of its cache; use a string.")

    def missing(self, call: ModelCall) -> list[str]:
        """Return the names of arguments that ``call`` refers to and that are not here."""
        return [name for name, key in call.cached.items() if key not in self.clients.get(call.client, {})]

    def filled(self, call: ModelCall) -> ModelCall:
        """Return ``call`` with the tensors that it refers to."""
        cached = self.clients.get(call.client, {})
        return replace(call, tensors=call.tensors | {name: cached[key] for name, key in call.cached.items()})

    def update(self, call: ModelCall):
        """Forget and cache what ``call`` says."""
        cached = self.clients.pop(call.client, {})
        for key in call.forget:
            cached.pop(key, None)
        for name, key in call.cache.items():
            # a copy: what came over the socket is a view of the whole message
            cached[key] = call.tensors[name].to(self.device, copy=True)
        if cached:
            self.clients[call.client] = cached
        while len(self.clients) > MAX_CACHED_CLIENTS:
            self.clients.pop(next(iter(self.clients)))

    def forget(self, clients: Sequence):
        """Free what is cached for some clients, if anything is."""
        self.clients = {key: cached for key, cached in self.clients.items() if key not in clients}

    def clear(self):
        """Free what is cached for all clients."""
        self.clients.clear()
