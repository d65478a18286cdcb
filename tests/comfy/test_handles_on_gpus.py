"""Which models leave ranks on GPUs, some of which ComfyUI uses, for a request; without ranks or GPUs."""

import gc

import pytest
import torch
from comfy_modules import comfy_modules
from ranks_in_numbers import CONFIG, Ranks, backend, run  # noqa: F401  # fixtures
from safetensors.torch import save_file

with comfy_modules():
    import comfy.model_management as management
    from parallel_dit.backend.client.auto import planning
    from parallel_dit.backend.client.auto.plan_history import LastPlan, PlanHistory
    from parallel_dit.backend.client.room import Room
    from parallel_dit.backend.planner.auto_config import AutoConfig
    from parallel_dit.backend.protocol import RefusedError, Result, Sample, Unload, Welcome
    from parallel_dit.backend.quantization.lora_bytes import LoraBytes
    from parallel_dit.nodes.host import handle, model_files, models_on_ranks, rank_weights

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class OnGpus(Ranks):
    """Two ranks on GPUs of this ComfyUI, which have less memory than they would like. ``sharded``: weights
    that are not parked; ``unloads``: what they were told."""

    def __init__(self):
        super().__init__()
        self.welcome = Welcome(2, "cuda", {}, [], ["GPU-0", "GPU-1"])
        self.room = 12
        self.sharded = False
        self.unloads: list[Unload] = []
        self.lacks = [0]

    def request(self, message, *callbacks):
        self.refuse_a_margin(message)
        answer = super().request(message, *callbacks)
        if not isinstance(message, Unload):
            return answer
        self.unloads.append(message)
        left = Result({"left": message.ranks, "freed": False})
        return left if message.ranks and not self.sharded else answer

    def sample(self, message, *callbacks, **named):
        self.refuse_a_margin(message)
        return super().sample(message, *callbacks, **named)

    def refuse_a_margin(self, message):
        lacking = {rank: 20 for rank in self.lacks if rank in getattr(message, "can_make_room", [])}
        if lacking:
            error = RefusedError("a rank likely lacks memory.")
            error.lacking = lacking
            raise error


@pytest.fixture
def gpus(backend, monkeypatch):
    """The backend on OnGpus, whose GPUs have 4 bytes free whatever leaves them."""
    backend.client = OnGpus()
    room = Room(management, {"GPU-0": FIRST, "GPU-1": SECOND})
    for module in (handle, models_on_ranks, rank_weights):
        monkeypatch.setattr(module, "host_room", lambda: room)
    monkeypatch.setattr(management, "get_torch_device", lambda: FIRST)
    monkeypatch.setattr(management, "get_all_torch_devices", lambda: [FIRST, SECOND], raising=False)
    monkeypatch.setattr(
        management, "get_free_memory", lambda device, torch_free_too=False: (4, 0) if torch_free_too else 4
    )
    return backend


def held(path: str) -> dict[int, int]:
    """Rank -> bytes of a model that ComfyUI counts on its GPU."""
    entries = [
        entry
        for (_, (name, *_)), (_, found) in models_on_ranks._weights.items()
        for entry in found
        if name == path
    ]
    return {rank: entry.loaded_size() for entry in entries for rank in entry.ranks}


@pytest.mark.parametrize("sharded", [False, True])
def test_room_on_a_gpu_takes_the_weights_of_its_ranks(gpus, sharded):
    """Sharded ones leave all ranks, and are counted nowhere then."""
    gpus.client.sharded = sharded
    run("/a")
    first = handle.load(CONFIG, handle.ModelChoice("/a"))
    management.free_memory(20, SECOND)
    assert gpus.client.unloads == [Unload("/a", True, [1])]
    assert held("/a") == ({0: 0, 1: 0} if sharded else {0: 6, 1: 0})
    handle.ensure_loaded(first)
    assert held("/a") == {0: 6, 1: 6}


def sample(backend, choice) -> Result:
    """As a sampler's node does, where there is less memory than is likely needed."""
    request = Sample(choice[0], "euler", 1.0, 7, tensors={"noise": torch.zeros(1, 4)})
    return models_on_ranks.run_evicting_models(
        backend,
        choice,
        lambda room, all_ranks: backend.sample(request, room=room, all_ranks=all_ranks),
        lambda: None,
    )


def test_a_margin_leaves_the_other_expert_of_the_graph(gpus):
    """It takes what can be spared, such as a model of another graph."""
    run("/a", "/b")
    handles = [handle.load(CONFIG, handle.ModelChoice(name)) for name in ("/a", "/b")]
    assert [sample(gpus, each.choice) for each in handles] == [Result()] * 2
    assert not gpus.client.unloads and gpus.client.held == ["/a", "/b"]
    run("/b")
    sample(gpus, handles[1].choice)
    assert gpus.client.unloads == [Unload("/a", True, [0], yields=["/a"])]


def test_a_model_of_another_graph_leaves_a_gpu_that_comfyui_does_not_use(gpus, monkeypatch):
    """It had no room for what is likely in addition, ran out of memory, and all ranks ended."""
    monkeypatch.setattr(management, "current_loaded_models", [])
    gpus.client.lacks, gpus.client.room = [1], 12
    room = Room(management, {"GPU-0": FIRST})
    for module in (handle, models_on_ranks, rank_weights):
        monkeypatch.setattr(module, "host_room", lambda: room)
    run("/a")
    first = handle.load(CONFIG, handle.ModelChoice("/a"))
    run("/a", "/b")
    second = handle.load(CONFIG, handle.ModelChoice("/b"))
    sample(gpus, second.choice)
    assert not gpus.client.unloads and gpus.client.held == ["/a", "/b"]
    run("/b")
    assert sample(gpus, second.choice) == Result()
    assert gpus.client.unloads == [Unload("/a", True, waits=True, yields=["/a"])]
    assert (gpus.client.held, gpus.client.parked) == (["/b"], [first.choice.path])


def test_experts_take_turns_for_what_is_likely_once_ranks_ran_out_of_memory(gpus, monkeypatch):
    """By what is needed at least they would run out again, in every run."""
    gpus.client.lacks = [1]
    run("/a", "/b")
    first, _ = (handle.load(CONFIG, handle.ModelChoice(name)) for name in ("/a", "/b"))
    sample(gpus, first.choice)
    assert not gpus.client.unloads
    monkeypatch.setattr(models_on_ranks, "have_ranks_run_out", lambda: True)
    assert sample(gpus, first.choice) == Result()
    assert gpus.client.unloads == [Unload("/b", True, waits=True)] and gpus.client.parked == ["/b"]


@pytest.mark.parametrize("lacks, unload", [(1, Unload("/b", True, waits=True)), (0, Unload("/b", True, [0]))])
def test_experts_take_turns_from_the_first_run_where_auto_has_planned_so(gpus, monkeypatch, lacks, unload):
    """Not once ranks have run out of memory in it. On ComfyUI's own GPU its manager takes the other one."""
    gpus.client.lacks = []
    run("/a", "/b")
    first, second = (handle.load(CONFIG, handle.ModelChoice(name)) for name in ("/a", "/b"))
    gpus.client.lacks = [lacks]
    history = PlanHistory(last=LastPlan(AutoConfig(), CONFIG, {}))
    monkeypatch.setattr(planning, "_history", history)
    sample(gpus, first.choice)
    assert not gpus.client.unloads
    history.last = LastPlan(AutoConfig(), CONFIG, {}, (first.choice, second.choice))
    assert sample(gpus, first.choice) == Result()
    assert gpus.client.unloads == [unload]


def test_what_is_needed_to_run_at_all_takes_the_other_expert(gpus):
    run("/a", "/b")
    handles = [handle.load(CONFIG, handle.ModelChoice(name)) for name in ("/a", "/b")]
    gpus.client.room = 6
    assert sample(gpus, handles[0].choice) == Result()
    assert gpus.client.unloads == [Unload("/b", True, waits=True)]
    assert (held("/a"), held("/b")) == ({0: 6, 1: 6}, {0: 0, 1: 0})


def test_free_model_and_node_cache_leaves_nothing_in_host_memory(gpus):
    """ComfyUI unloads all models, and forgets what its nodes have made."""
    run("/a")
    first = handle.load(CONFIG, handle.ModelChoice("/a"))
    management.unload_all_models()
    assert gpus.client.unloads == [Unload("/a", True)] and gpus.client.parked == ["/a"]
    del first
    gc.collect()
    assert gpus.client.unloads[1:] == [Unload("/a")] and not gpus.client.parked


def test_unload_models_parks_what_a_node_still_names(gpus):
    run("/a")
    first, second = (handle.load(CONFIG, handle.ModelChoice("/a")) for _ in range(2))
    management.unload_all_models()
    del second
    gc.collect()
    assert gpus.client.parked == [first.choice.path] and len(gpus.client.unloads) == 1


def test_room_for_others_leaves_weights_in_host_memory(gpus):
    """The next load may want them under another plan, of which the handle is another one."""
    run("/a")
    first = handle.load(CONFIG, handle.ModelChoice("/a"))
    for device in (FIRST, SECOND):
        management.free_memory(20, device)
    del first
    gc.collect()
    assert gpus.client.unloads == [Unload("/a", True, [0]), Unload("/a", True, [1])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_lora_file_is_planned_as_ranks_hold_it(monkeypatch, tmp_path, dtype):
    """Two bytes for a number; a file that cannot be read counts whole, and is refused by who loads it."""
    path = tmp_path / "lora.safetensors"
    tensors = {"m.lora_up.weight": torch.zeros(512, 64), "m.lora_down.weight": torch.zeros(64, 512)}
    save_file({name: value.to(dtype) for name, value in tensors.items()}, path)
    monkeypatch.setattr(model_files.folder_paths, "get_full_path", lambda kind, name: str(path))
    assert model_files.lora_size("lora.safetensors") == LoraBytes(2 * 2 * 512 * 64)
    path.write_bytes(b"no safetensors at all")
    assert model_files.lora_size("lora.safetensors") == LoraBytes(21)
