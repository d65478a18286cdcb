"""Room for ranks on GPUs that ComfyUI uses too, by numbers: a fake manager, fake memory, no ranks."""

import pytest
import torch
from fake_management import FakeDevice, FakeManagement, FakeModel
from fake_memory import GB

from backend.client.pool import Backend
from backend.client.room import CONTEXT_BYTES, Room
from backend.config import ParallelConfig
from backend.protocol import Load, Loaded, ModelCall, RefusedError, Release, Result, Sample, Welcome

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
GPUS = {"GPU-0": FIRST, "GPU-1": SECOND}
WELCOME = Welcome(2, "cuda", {}, [], ["GPU-0", "GPU-1"])


class Ranks:
    """In the client's place: two ranks, of which one needs ``need`` bytes for a request and has its weights
    on a device that ComfyUI uses too. Refuses as the backend does."""

    def __init__(self, memory: FakeDevice, least: int, likely: int):
        self.memory = memory
        self.least = least
        self.likely = likely
        self.welcome = WELCOME
        self.closed = False
        self.left = None
        self.received: list = []

    def sample(self, message, *_, **__):
        self.received.append(message)
        need = self.likely if 0 in getattr(message, "can_make_room", []) else self.least
        if need > self.memory.free:
            error = RefusedError("rank 0 needs more")
            error.lacking = {0: self.likely}
            raise error
        return Loaded("m", "flux") if isinstance(message, Load) else Result()

    request = sample

    def is_open(self):
        return True


@pytest.fixture
def management() -> FakeManagement:
    return FakeManagement({FIRST: FakeDevice(24 * GB), SECOND: FakeDevice(24 * GB)})


def backend(management, least, likely) -> Backend:
    client = Ranks(management.devices[FIRST], least * GB, likely * GB)
    return Backend(ParallelConfig(address="tcp:host:1"), client)


REQUESTS = {
    "sample": Sample("m", "euler", 1.0, 7, tensors={"noise": torch.zeros(1, 4)}),
    "call": ModelCall("m", tensors={"x": torch.zeros(1, 4)}),
}


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_text_encoder_loaded_afterwards_goes_when_rank_0_samples(management, kind):
    """The first thing to go wrong on a GPU: without room being asked for, the sample is refused."""
    ranks = backend(management, 8, 12)
    management.load(20 * GB, FIRST)
    with pytest.raises(RefusedError):
        ranks.sample(REQUESTS[kind])
    assert ranks.sample(REQUESTS[kind], room=Room(management, GPUS)) == Result()
    assert not management.current_loaded_models
    assert management.asked == [(12 * GB + management.reserved, FIRST)]
    assert [message.can_make_room for message in ranks.client.received] == [[], [0], []]


def test_no_room_is_made_where_another_rank_lacks_memory_too(management):
    """Where ComfyUI has nothing: a model has to leave the ranks, and then it is asked again."""
    ranks = backend(management, 8, 12)
    management.load(20 * GB, FIRST)
    refuse = ranks.client.sample

    def sample(*args, **named):
        try:
            return refuse(*args, **named)
        except RefusedError as error:
            error.lacking[1] = 12 * GB
            raise

    ranks.client.sample = sample
    here = Room(management, {"GPU-0": FIRST})
    with pytest.raises(RefusedError):
        ranks.sample(REQUESTS["sample"], room=here)
    assert not management.asked


def test_a_load_asks_too(management):
    ranks = backend(management, 20, 20)
    management.load(10 * GB, FIRST)
    assert ranks.load("/m.safetensors", room=Room(management, GPUS)).model == "m"
    assert [type(message) for message in ranks.client.received] == [Load, Load]
    assert not management.current_loaded_models


def test_with_room_nothing_is_asked_and_a_run_is_one_message(management):
    ranks = backend(management, 8, 12)
    encoder = management.load(5 * GB, FIRST)
    ranks.sample(REQUESTS["sample"], room=Room(management, GPUS))
    assert len(ranks.client.received) == 1 and not management.asked
    assert management.current_loaded_models == [encoder]
    assert ranks.client.received[0].shared_ranks == [0]


def test_between_least_and_likely_it_runs_though_nothing_can_go(management):
    """The estimate's upper side asks for room; it refuses nothing."""
    ranks = backend(management, 8, 40)
    assert ranks.sample(REQUESTS["sample"], room=Room(management, GPUS)) == Result()
    assert len(ranks.client.received) == 2


def test_too_little_even_so_is_the_backends_sentence(management):
    ranks = backend(management, 30, 40)
    with pytest.raises(RefusedError, match="rank 0 needs more"):
        ranks.sample(REQUESTS["sample"], room=Room(management, GPUS))
    assert len(ranks.client.received) == 2


def test_what_comfyui_caches_is_no_room_for_a_rank(management):
    """ComfyUI counts it as free and would unload nothing."""
    management.load(10 * GB, FIRST).unload()
    management.current_loaded_models.clear()
    wanted = management.load(4 * GB, FIRST)
    management.devices[FIRST].free, management.devices[FIRST].cached = 6 * GB, 14 * GB
    ranks = backend(management, 8, 12)
    assert ranks.sample(REQUESTS["sample"], room=Room(management, GPUS)) == Result()
    assert management.devices[FIRST].free == 20 * GB and management.current_loaded_models == [wanted]


def test_entries_to_keep_stay(management):
    ranks = backend(management, 8, 12)
    wanted, other = management.load(4 * GB, FIRST), management.load(14 * GB, FIRST)
    ranks.sample(REQUESTS["call"], room=Room(management, GPUS).keeping([wanted]))
    assert management.current_loaded_models == [wanted] and not other.loaded


def test_ranks_are_shared_where_comfyui_computes_or_keeps_models(management):
    room = Room(management, GPUS)
    assert room.shared_ranks(WELCOME) == [0]
    # weights of the ranks themselves are no use of ComfyUI's
    on_ranks = FakeModel(SECOND, GB, management.devices[SECOND], is_on_ranks=True)
    management.current_loaded_models.append(on_ranks)
    assert room.shared_ranks(WELCOME) == [0]
    management.load(GB, SECOND)
    assert room.shared_ranks(WELCOME) == [0, 1]
    management.current_loaded_models.clear()  # as ComfyUI does once a model has left, until the next prompt
    assert room.shared_ranks(WELCOME) == room.keeping([]).shared_ranks(WELCOME) == [0, 1]
    elsewhere = Welcome(2, "cuda", {}, [], ["GPU-of-another-machine", "memory of host"])
    assert room.shared_ranks(elsewhere) == []


def test_ranks_elsewhere_are_sent_one_plain_message(management):
    ranks = backend(management, 8, 12)
    ranks.client.welcome = Welcome(1, "cuda", {}, [], ["GPU-of-another-machine"])
    management.load(20 * GB, FIRST)
    with pytest.raises(RefusedError):
        ranks.sample(REQUESTS["sample"], room=Room(management, GPUS))
    assert len(ranks.client.received) == 1 and not management.asked


def test_shared_ranks_release_after_a_sampling_of_calls(management):
    ranks = backend(management, 0, 0)
    assert ranks.release(Room(management, GPUS), forget=["a client"])
    assert ranks.client.received == [Release([0], ["a client"])]
    assert not ranks.release(Room(management, {}), forget=["a client"])
    assert len(ranks.client.received) == 1


def test_a_start_asks_for_the_contexts_alone(management):
    """On ComfyUI's own GPUs: on others it would make a context to ask for them."""
    encoder = management.load(10 * GB, FIRST)
    Room(management, GPUS).make_for_start([0, 1, 2])
    size = CONTEXT_BYTES + management.reserved
    assert management.asked == [(size, FIRST)] and management.current_loaded_models == [encoder]
    management.load(GB, SECOND)
    Room(management, GPUS).make_for_start([0, 1])
    assert management.asked[1:] == [(size, FIRST), (size, SECOND)]


def test_the_fake_counts_as_comfyui_does(management):
    """Cached bytes are free to it, so nothing is unloaded for them."""
    model = management.load(20 * GB, FIRST)
    management.free_memory(10 * GB, FIRST)
    assert not model.loaded and management.devices[FIRST].cached == 20 * GB
