"""Which clients of a backend have loaded which models: one of them does not free what another one uses."""

from dataclasses import replace
from weakref import WeakKeyDictionary

from ..protocol import Unload
from .server import Connection


class NamedModels(WeakKeyDictionary[Connection, set[str]]):
    """Client -> the models that it has loaded. What clients had that have gone counts for nobody."""

    def of_connected(self) -> set[str]:
        """Return the models of all clients that are still connected."""
        return set().union(*(keys for client, keys in self.items() if not client.gone))

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

    def forget_all_but(self, models: set[str]):
        """Forget models that are no longer loaded."""
        for keys in self.values():
            keys &= models
