"""Which clients of a backend have loaded which models: one of them does not free what another one uses."""

from weakref import WeakKeyDictionary

from .server import Client


class NamedModels(WeakKeyDictionary[Client, set[str]]):
    """Client -> the models that it has loaded. What clients had that have gone counts for nobody."""

    def of_connected(self) -> set[str]:
        """Return the models of all clients that are still connected."""
        return set().union(*(keys for client, keys in self.items() if not client.gone))

    def leave(self, client: Client, model: str) -> bool:
        """Have a client no longer use a model; return whether another one does."""
        self.get(client, set()).discard(model)
        return model in self.of_connected()

    def forget_all_but(self, models: set[str]):
        """Forget models that are no longer loaded."""
        for keys in self.values():
            keys &= models
