"""Parked models that no graph needs make room in host memory for others, on one rank."""

from types import SimpleNamespace

import pytest
from fake_memory import GB

from backend.hardware import host_memory
from backend.loading import parking
from backend.protocol import Unload
from backend.rank.worker import Worker


class Yielding(Worker):
    """One rank of a host with ``free`` GB, on which models of 1 GB are parked."""

    def __init__(self, monkeypatch, free: int, *parked: str):
        self.mesh = SimpleNamespace(rank=0, world_size=1)
        self.machines = [0]
        self.control = SimpleNamespace(all_gather_object=lambda value: [value])
        self.control.all_gather_numbers = lambda numbers: [numbers]
        models = {name: self.model(name in parked) for name in ("m", *parked)}
        self.engine = SimpleNamespace(models=models, park=self.park, unload=models.pop, parks=True)
        self.forget_unloaded = lambda: None
        taken = len(parked)
        monkeypatch.setattr(
            parking, "host_free", lambda swap: (free + taken - sum(map(self.is_parked, models.values()))) * GB
        )

    def model(self, parked: bool):
        ranks = frozenset({0} if parked else ())
        report = SimpleNamespace(weight_bytes=GB)
        return SimpleNamespace(can_park=True, parked_on=ranks, report=report, held_lora_bytes=0)

    def is_parked(self, model) -> bool:
        return bool(model.parked_on)

    def park(self, model, ranks):
        model.parked_on |= ranks

    def parked(self) -> list[str]:
        return [name for name, model in self.engine.models.items() if self.is_parked(model)]


@pytest.mark.parametrize(
    "free, yields, stay",
    [
        (2, [], ["m", "old", "new"]),
        (1, [], ["old", "new"]),  # "m" is freed: nothing yields
        (1, ["old", "new"], ["m", "new"]),  # needed by a graph: it takes no more than it has to
        (4, ["old", "new", "m"], ["m", "old", "new"]),  # all three are at most half of 6
        (3, ["old", "new", "m"], ["m", "new"]),
        (1, ["old", "m", "new"], ["m"]),
        (0, ["old", "new", "m", "elsewhere"], ["m"]),
    ],
)
def test_models_that_no_graph_needs_yield_host_memory_the_oldest_first(monkeypatch, free, yields, stay):
    """One of them parks where all of them together leave as much free."""
    rank = Yielding(monkeypatch, free, "old", "new")
    assert rank.unload(Unload("m", True, yields=yields)) == [0]
    assert rank.parked() == stay


def test_none_yields_where_all_of_them_do_not_make_room(monkeypatch):
    """They were freed in vain, and read again by the next graph."""
    rank = Yielding(monkeypatch, 0, "old", "new")
    rank.engine.models["m"].report.weight_bytes = 2 * GB
    assert rank.unload(Unload("m", True, yields=["old", "new"])) == [0]
    assert list(rank.engine.models) == rank.parked() == ["old", "new"]


@pytest.mark.parametrize("page_locked, parks", [(GB, False), (2 * GB, True)])
def test_what_is_page_locked_comes_back_with_those_that_yield(monkeypatch, page_locked, parks):
    """More than the model that parks could use itself."""
    rank = Yielding(monkeypatch, 0, "old", "new")
    rank.engine.models["m"].report.weight_bytes = 2 * GB
    locked = host_memory.PageLocked(reusable=page_locked)
    monkeypatch.setattr(parking, "PAGE_LOCKED", locked)
    free = parking.host_free

    def unload(name):
        rank.engine.models.pop(name)
        monkeypatch.setattr(parking, "host_free", lambda swap: free(swap) + page_locked)
        locked.reusable = 0

    rank.engine.unload = unload
    rank.unload(Unload("m", True, yields=["old", "new"]))
    assert ("m" in rank.engine.models) == parks and ("new" in rank.engine.models) != parks


def test_a_model_on_some_devices_does_not_yield(monkeypatch):
    """ComfyUI counts what it has there."""
    rank = Yielding(monkeypatch, 0, "old", "new")
    rank.mesh.world_size = 2
    rank.machines = [0, 0]
    rank.control.all_gather_object = lambda value: [value] * 2
    rank.control.all_gather_numbers = lambda numbers: [numbers] * 2
    models = rank.engine.models
    models["new"].parked_on |= {1}
    monkeypatch.setattr(parking, "host_free", lambda swap: (2 if "new" in models else 4) * GB)
    assert rank.unload(Unload("m", True, yields=["old", "new"])) == [0, 1]
    assert rank.parked() == ["m", "old"]


def test_weights_do_not_wait_in_the_memory_of_the_gpu_itself(monkeypatch):
    """As on a DGX Spark: a copy there frees nothing. They leave, and are read again."""
    rank = Yielding(monkeypatch, 1000, "old")
    rank.engine.parks = False
    assert rank.unload(Unload("m", True, keeps=True, yields=["old"])) == []  # another client's request runs
    assert rank.parked() == ["old"] and "m" in rank.engine.models
    assert rank.unload(Unload("m", True, yields=["old"])) == [0] and rank.engine.models.keys() == {"old"}
