"""The models of a backend that serves several clients, and which of them leave once nobody uses them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..loading.checkpoint import Checkpoint
from ..protocol import LORAS, Unload
from ..sampling.model_runner import LoadedModel
from ..serving.server import Connection
from . import start
from .worker import Worker


class ServedFile(NamedTuple):
    """Where a model was loaded from, and its checkpoint (opened, not loaded): requests are planned by it."""

    path: str
    checkpoint: Checkpoint


class NamedModels(WeakKeyDictionary[Connection, set[str]]):
    """Client -> the models that it has loaded. What clients had that have gone counts for nobody."""

    def take_off(self, message: Unload, by: Connection) -> Unload:
        """Take a model that a client frees off its list; return the Unload for the ranks: it parks at most
        where another connected client has loaded the model, and yields none that such a client has."""
        if not message.park:
            self.get(by, set()).discard(message.model)
        of_others = (keys for client, keys in self.items() if client is not by and not client.gone)
        needed = set[str]().union(*of_others)
        yields = [key for key in message.yields if isinstance(key, str) and key not in needed]
        message = replace(message, yields=yields)
        return replace(message, park=True, keeps=True) if message.model in needed else message


class ServedModels(Worker):
    """Rank 0 as far as it knows who has loaded what."""

    def __init__(self, begun: start.Start):
        super().__init__(begun)
        #: Of every loaded model.
        self.files: dict[str, ServedFile] = {}
        #: Client -> the models that it has loaded.
        self.named = NamedModels()

    def forget_unloaded(self):
        """Forget unloaded models as every rank does, and their files and users."""
        super().forget_unloaded()
        self.files = {key: it for key, it in self.files.items() if key in self.engine.models}
        for keys in self.named.values():
            keys.intersection_update(self.engine.models)

    def free_parked(self):
        """Unload what no connected client has loaded and no device holds: it would stay in host memory for as
        long as the backend runs. The other ranks wait for a message."""
        self._unload_all(self._abandoned(on_devices=False), "no connected client has loaded it")

    def free_abandoned(self, message, every: bool) -> bool:
        """Unload the oldest model that no connected client has loaded, or ``every`` such one; return whether
        there was one besides that of ``message``. Parked ones are in nobody's way."""
        base = getattr(message, "model", "").partition(LORAS)[0]
        idle = [key for key in self._abandoned(on_devices=True) if key != base]
        leaving = idle if every else idle[:1]
        self._unload_all(leaving, "no connected client has loaded it, and one lacks memory")
        return bool(idle)

    def is_on_devices(self, model: LoadedModel) -> bool:
        """Return whether any rank's share is on its device."""
        return not set(range(self.mesh.world_size)) <= model.parked_on

    def _abandoned(self, on_devices: bool) -> list[str]:
        named = set().union(*(keys for client, keys in self.named.items() if not client.gone))
        found = [key for key in self.files if key not in named]
        return [key for key in found if self.is_on_devices(self.engine.models[key]) is on_devices]

    def _unload_all(self, keys: Sequence[str], why: str):
        for key in keys:
            print(f"{self.files[key].path} leaves: {why}.")
            unload = Unload(key)
            self.control.broadcast(unload)
            self.unload(unload)
