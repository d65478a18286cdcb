"""What rank 0 gives to the round before a load or a request, and what it notes of clients. No peers."""

import pytest
import torch
from fake_memory import FakeMemory
from fuzzing import Rank0
from tiny import golden_request, write_shallow_flux

from backend import engine
from backend.config import ParallelConfig
from backend.loading.model_key import model_key
from backend.models.family import Latent
from backend.protocol import Failure, Load, Loaded, ModelCall
from backend.rank.admission import Admission
from backend.serving.job_queue import Job
from backend.serving.server import Connection

OTHER = "another model"


class Alone(Rank0):
    """Rank 0 whose device is full: every round refuses what needs anything."""

    def __init__(self, folder):
        super().__init__(str(write_shallow_flux(folder / "model.safetensors")))
        self.new_file = str(write_shallow_flux(folder / "new.safetensors"))
        self.engine.load(OTHER, self.path, "default")
        self.files[OTHER], self.reports[OTHER] = self.files[self.model], []
        self.tried = {}
        self.admission = Admission(ParallelConfig(), self, FakeMemory(0))

    def broadcast(self, message):
        """Nobody receives it."""

    def all_gather_numbers(self, numbers):
        return [numbers]

    def answers(self, message, client: Connection) -> list:
        self.run(Job(message, client))
        return [client.outbox.get() for _ in range(client.outbox.qsize())]

    def message(self, kind: str):
        """A good request of the loaded model, or the load of a file that is not loaded."""
        if kind == "load":
            return Load(self.new_file)
        sample, _ = golden_request("euler_simple", self.model)
        if kind == "sample":
            return sample
        x = sample.tensors["noise"]
        names = ("c_crossattn", "y", "guidance")
        conditioning = {f"cond.{name}": sample.tensors[f"positive.{name}"] for name in names}
        return ModelCall(self.model, tensors={"x": x, "time": torch.full(x.shape[:1], 0.5), **conditioning})


@pytest.fixture(scope="module")
def rank0(folder):
    return Alone(folder)


@pytest.fixture
def client(rank0):
    """A client that has loaded nothing yet, next to one that uses both models."""
    user = Connection(None, rank0.server)
    rank0.named[user] = {rank0.model, OTHER}
    yield Connection(None, rank0.server)
    del user  # who has gone names nothing


@pytest.mark.parametrize("kind", ["load", "sample", "call"])
def test_the_round_has_what_was_planned(rank0, client, kind):
    """Without it nothing would be needed, and everything would run."""
    [refused] = rank0.answers(rank0.message(kind), client)
    assert isinstance(refused, Failure) and refused.message.startswith("rank 0 needs about ")
    [[rank, lacking]] = refused.lacking
    assert rank == 0 and lacking > 0 and "Other models" not in refused.message


@pytest.mark.parametrize("kind", ["load", "sample", "call"])
def test_the_round_knows_of_other_models_of_the_client(rank0, client, kind):
    """Which may unload them; what would fit without that is not planned."""
    rank0.named[client] = {OTHER}
    [refused] = rank0.answers(rank0.message(kind), client)
    assert "Other models are on the ranks; unload them." in refused.message


@pytest.mark.parametrize("kind, others", [("load", True), ("sample", False), ("call", False)])
def test_the_model_of_a_request_is_no_other(rank0, client, kind, others):
    rank0.named[client] = {rank0.model}
    [refused] = rank0.answers(rank0.message(kind), client)
    assert ("Other models are on the ranks" in refused.message) == others


@pytest.mark.parametrize("kind", ["sample", "call"])
def test_a_request_is_taken_apart_once(rank0, client, kind, monkeypatch):
    """The check, the plan and the request's tensors on rank 0 have one grid."""
    grid, grids = Latent.grid, []

    def counted(*given):
        grids.append(grid(*given))
        return grids[-1]

    monkeypatch.setattr(Latent, "grid", counted)
    rank0.answers(rank0.message(kind), client)
    assert len(grids) == 1


def test_the_matrices_of_a_load_are_looked_for_once(rank0, client, monkeypatch):
    """By the check: what ranks try and what is loaded are chosen from what it found."""
    looked, find = [], engine.matrices

    def counted(*given):
        looked.append(given)
        return find(*given)

    def loaded(message, key, on_progress, planned, checked):
        rank0.engine.load(key, message.path, "default", "auto", {}, on_progress, checked)
        return ["enough"]

    monkeypatch.setattr(engine, "matrices", counted)
    monkeypatch.setattr(rank0, "load", loaded)
    rank0.answers(rank0.message("load"), client)
    key = model_key(Load(rank0.new_file))
    assert len(looked) == 1 and rank0.engine.models[key].weights.checkpoint is not looked[0][0]
    rank0.engine.unload(key)


def test_a_client_is_noted_by_the_models_that_it_has_loaded(rank0, client):
    """Also one that was there already: it stays while the client does."""
    rank0.reports[rank0.model] = [{"weight_bytes": 1}]
    [loaded] = rank0.answers(Load(rank0.path), client)
    assert isinstance(loaded, Loaded) and rank0.named[client] == {rank0.model}
