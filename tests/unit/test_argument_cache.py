"""A sampling's conditioning is sent once: what the client leaves out is what the ranks have."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from backend.client import argument_cache
from backend.client.argument_cache import MAX_VALUES, MIN_BYTES, ArgumentCache
from backend.protocol import ModelCall, Release
from backend.rank.leader import Leader
from backend.serving.argument_cache import MAX_CACHED_CLIENTS
from backend.serving.argument_cache import ArgumentCache as Ranks

SIZE = MIN_BYTES // 4


def call(**tensors) -> ModelCall:
    return ModelCall("m", tensors=tensors)


def arrives(client, ranks, sent: ModelCall) -> tuple[ModelCall, ModelCall]:
    """(what went over the wire, what the model is called with)."""
    wire = client.shortened(sent)
    assert not ranks.missing(wire)
    filled = ranks.filled(wire)
    ranks.update(wire)
    assert filled.tensors.keys() == sent.tensors.keys() and all(
        filled.tensors[name].equal(value) for name, value in sent.tensors.items()
    )
    return wire, filled


def test_equal_values_are_sent_once_and_changed_ones_again():
    client, ranks, prompt = ArgumentCache(), Ranks(torch.device("cpu")), torch.randn(SIZE)
    sent = {"x": torch.randn(SIZE), "cond.c_crossattn": prompt, "cond.y": torch.ones(3)}
    wires = [
        arrives(client, ranks, call(**sent))[0],
        arrives(client, ranks, call(**{**sent, "cond.c_crossattn": prompt.clone()}))[0],
    ]
    prompt[:] += 1.0  # in place, as a node may do it
    wires.append(arrives(client, ranks, call(**sent))[0])
    assert [set(wire.tensors) for wire in wires] == [
        {"x", "cond.c_crossattn", "cond.y"},
        {"x", "cond.y"},
        {"x", "cond.c_crossattn", "cond.y"},
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_any_byte_that_changes_is_noticed(dtype):
    """In every place of a tensor whose size in bytes is no multiple of 8, transposed or not."""
    value = torch.ones(MIN_BYTES // 5, 7, dtype=dtype)
    client = ArgumentCache()
    for place in (None, 0, -1, -3, value.numel() // 2):
        if place is not None:
            value.view(-1)[place] = 0
        for sent in (value, value.t()):
            if "cond.a" in client.shortened(call(**{"cond.a": sent})).cached:
                assert not client.holds()
                client.reset()
                assert "cond.a" in client.shortened(call(**{"cond.a": sent})).tensors
            assert "cond.a" in client.shortened(call(**{"cond.a": sent.clone()})).cached and client.holds()


def test_several_prompts_take_turns_and_the_oldest_are_forgotten():
    client, ranks = ArgumentCache(), Ranks(torch.device("cpu"))
    prompts = [call(**{"cond.c_crossattn": torch.full((SIZE,), float(i))}) for i in range(MAX_VALUES + 2)]
    for prompt in prompts + prompts[-2:]:
        wire, _ = arrives(client, ranks, prompt)
    assert not wire.tensors
    assert sum(map(len, ranks.clients.values())) == MAX_VALUES


@pytest.mark.parametrize("fit, cached", [(2, 2), (0, 1)])
def test_large_arguments_do_not_pile_up(monkeypatch, fit, cached):
    """Control images of a video, one for each part of it; the newest stays, for the next step."""
    monkeypatch.setattr(argument_cache, "MAX_BYTES", fit * 4 * SIZE + 1)
    client, ranks = ArgumentCache(), Ranks(torch.device("cpu"))
    images = [call(**{"cond.face_pixel_values": torch.full((SIZE,), float(i))}) for i in range(5)]
    for image in [*images, images[-1]]:
        wire, _ = arrives(client, ranks, image)
    assert not wire.tensors
    assert sum(map(len, ranks.clients.values())) == cached


def test_ranks_keep_copies_and_a_few_clients_only():
    ranks, value = Ranks(torch.device("cpu")), torch.zeros(SIZE)
    clients = [ArgumentCache() for _ in range(MAX_CACHED_CLIENTS + 1)]
    for client in clients:
        arrives(client, ranks, call(**{"cond.c_crossattn": value}))
    assert ranks.missing(clients[0].shortened(call(**{"cond.c_crossattn": value}))) == ["cond.c_crossattn"]
    clients[0].reset()
    arrives(clients[0], ranks, call(**{"cond.c_crossattn": value}))
    value[0] = 1.0
    assert not any(value.any() for client in ranks.clients.values() for value in client.values())


@pytest.mark.parametrize("is_leader", [True, False])
def test_ranks_free_a_clients_arguments_before_they_give_memory_back(is_leader):
    """They lie on the GPU that ComfyUI's VAE needs next; those of others stay, and what is sent again is
    cached again."""
    rank = Leader.__new__(Leader)
    rank.mesh = cast(Any, SimpleNamespace(rank=1))
    ranks = Ranks(torch.device("cpu"))
    freed = []
    memory = SimpleNamespace(release=lambda: freed.append(list(ranks.clients)))
    rank.engine = cast(Any, SimpleNamespace(argument_cache=ranks, memory=memory))
    rank.control = cast(Any, SimpleNamespace(broadcast=lambda message: None))
    ours, other = ArgumentCache(), ArgumentCache()
    sent = call(**{"cond.c_crossattn": torch.randn(SIZE)})
    for client in (ours, other):
        arrives(client, ranks, sent)
    ours.reset()  # after Cancel or an error
    arrives(ours, ranks, sent)
    assert len(ranks.clients) == 3
    message = Release([0, 1], ours.ids)
    if is_leader:
        rank.on_release(cast(Any, SimpleNamespace(reply=lambda reply: None)), message)()
    else:
        rank.obey(message)
    assert freed == [[other.client]]
    ours.forgotten()
    assert not ours.ids
    wires = [arrives(ours, ranks, sent)[0] for _ in range(2)]
    assert [sorted(wire.tensors) for wire in wires] == [["cond.c_crossattn"], []]


def test_no_more_ids_wait_than_ranks_cache_for():
    """Where ranks share no GPU with ComfyUI, nothing is ever released."""
    assert argument_cache.MAX_EARLIER == MAX_CACHED_CLIENTS
    client = ArgumentCache()
    for _ in range(2 * MAX_CACHED_CLIENTS):
        client.shortened(call(**{"cond.c_crossattn": torch.zeros(SIZE)}))
        client.reset()
    client.reset()  # under this id nothing was sent
    assert len(client.ids) == MAX_CACHED_CLIENTS


def test_a_refused_call_leaves_the_ranks_as_they_are():
    ranks, wire = (
        Ranks(torch.device("cpu")),
        ArgumentCache().shortened(call(**{"cond.c_crossattn": torch.zeros(SIZE)})),
    )
    ranks.filled(wire)
    assert not ranks.clients
