"""Messages that no node sends, from a client that is let in: each is refused in a sentence, the ranks stay
the same processes, and a sample after all of them is exact."""

import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from live_backend import CONFIG, backend, checkpoint, free_at_the_end, request_for  # noqa: F401  # fixtures
from tiny import error_in_std, to_vae_units

from backend.protocol import (
    Arrange,
    Describe,
    Load,
    ModelCall,
    Ping,
    RefusedError,
    Release,
    Sample,
    Unload,
    Welcome,
    framing,
)

DEEP = 100_000
#: A model that may be loaded.
DEMO = str(Path(__file__).parents[2] / "demo" / "shapes-flux")
#: What is odd -> (message, what the refusal says).
MESSAGES = {
    "a path with NUL": (Load("/a\0b.safetensors"), "is no path .embedded null"),
    "a path of 5,000 characters": (Load("/" + "a" * 5000), "not below a folder"),
    "a path of a lone surrogate": (Load("/a\ud800.safetensors"), "is no path .*surrogates not allowed"),
    "a path that is empty": (Load(""), "the path '' is not absolute"),
    "a path that is a device": (Load("/dev/zero"), "is not below a folder"),
    "a matmul that is none": (Load(DEMO, matmul="fast"), "matmul is 'fast'; choose auto"),
    "a weight_dtype of a surrogate": (Load(DEMO, "\ud800"), "weight_dtype is"),
    "a lora path of 5,000 characters": (Load(DEMO, loras=[["/" + "a" * 5000, 1.0]]), "not below a folder"),
    "a lora that is a number": (Load(DEMO, loras=[7]), "not a pair"),
    "a lora that is deep": (Load(DEMO, loras=[json.loads("[" * 500 + "]" * 500)]), "not a pair"),
    "a degree of 10^20": (Arrange({"ulysses_degree": 10**20}), "is 1000+; use at most"),
    "degrees of a huge product": (Arrange(dict.fromkeys(["ring_degree", "ulysses_degree"], 4000)), "lower"),
    "a degree below zero": (Arrange({"ring_degree": -(10**19)}), "at least 1"),
    "a degree that is a word": (Arrange({"ring_degree": "two"}), "write it as int"),
    "a degree that is true": (Arrange({"ring_degree": True}), "write it as int"),
    "patches of 10^20": (Arrange({"num_pipeline_patch": 10**20, "pipefusion_degree": 2}), "at most 4096"),
    "a configuration of lists": (Arrange({"gpus": [[]] * 9}), "write it as str"),
    "a name that is no field": (Arrange({"\ud800": 1}), "not one of this version"),
    "a list of stages without end": (Arrange({"attn_layer_num_for_pp": "1," * 99_999}), "not a list"),
    "a model that is not there": (Describe("\ud800", [16, 8, 8], 4, 1), "not loaded"),
    "a reference that is no key": (ModelCall("m", cached={"x": {}}), "as a key of its cache; use a string"),
    "forgetting what is no key": (ModelCall("m", forget=[[]]), "as a key of its cache; use a string"),
    "an answer": (Welcome(2, "cpu", {}, []), "a client does not send Welcome"),
}
#: Changes of a good request's fields -> what the refusal says.
SAMPLES = {
    "cfg of 10^20": ({"cfg": 10**20}, "cfg is 1000+; use a number"),
    "cfg of 10^300": ({"cfg": 1e300}, "cfg is 1e.300; use a number"),
    "cfg of 10^400": ({"cfg": 10**400}, "is no number of this protocol"),
    "a seed below zero": ({"seed": -1}, "seed is -1"),
    "a seed of 65 bits": ({"seed": 1 << 64}, "seed is"),
    "a seed of words": ({"seed": "one"}, "Sample.seed is not of type int"),
    "patches below zero": ({"num_pipeline_patch": -(10**19)}, "num_pipeline_patch is"),
    "patches of 10^20": ({"num_pipeline_patch": 10**20}, "at most 4096"),
    "warmup of 10^20": ({"warmup_steps": 10**20}, "at most 10000"),
    "a sampler of 100,000 characters": ({"sampler": "e" * 100_000}, "not supported"),
    "prompts of lists": ({"prompts": {"positive": {"strength": []}}}, "give the numbers"),
    "latents of words": ({"latent_shapes": ["a"]}, "wants 16 channels"),
    "latents without end": ({"latent_shapes": [[10**20] * 3] * 5000}, "wants 16 channels"),
}
#: Changes of its tensors -> what the refusal says.
TENSORS = {
    "no noise": ({"noise": None}, "no tensor 'noise'"),
    "a million steps": ({"sigmas": torch.linspace(1, 0, 1_000_001)}, "has 1000000 steps"),
    "noise of one dimension": ({"noise": torch.ones(16)}, "wants 16 channels"),
    "a tensor of a strange name": ({"positive.\ud800": torch.ones(1)}, "does not support"),
}


def framed(header: bytes, table: dict | None = None, data: bytes = b"") -> bytes:
    text = b"" if table is None else json.dumps(table).encode()
    body = b"" if table is None else len(text).to_bytes(8, "little") + text + data
    return framing.PREFIX.pack(framing.MAGIC, len(header), len(body)) + header + body


def tensor(shape, offsets, dtype="F32") -> dict:
    return {"noise": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


SAMPLE = b'{"type": "Sample", "model": "m", "sampler": "euler", "cfg": 1.0, "seed": 0}'
#: Frames that no client of ours writes -> what the refusal says.
FRAMES = {
    "NaN": (framed(SAMPLE.replace(b"1.0", b"NaN")), "NaN is no number"),
    "a float beyond all": (framed(SAMPLE.replace(b"1.0", b"1e999")), "is no number"),
    "an integer of 5,000 digits": (framed(SAMPLE.replace(b"1.0", b"1" * 5000)), "is no number"),
    "a header of 10^5 levels": (framed(b"[" * DEEP + b"]" * DEEP), "RecursionError"),
    "a field of 10^5 levels": (
        framed(b'{"type": "Arrange", "config": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}"),
        "RecursionError",
    ),
    "a shape whose product overflows": (framed(SAMPLE, tensor([2**40, 2**40, 0], [0, 0])), "no valid shape"),
    "a shape of 64 bits": (framed(SAMPLE, tensor([2**62, 4], [0, 0])), "no valid shape"),
    "a header that is no UTF-8": (framed(b'{"type": "\xff\xfe"}'), "UnicodeDecodeError"),
    "a header that is a list": (framed(b'["Sample"]'), "not a message"),
    "a type that is a list": (framed(b'{"type": []}'), "not a message"),
    "fields that are missing": (framed(b'{"type": "Sample"}'), "not a message"),
    "a body over all limits": (framing.PREFIX.pack(framing.MAGIC, 9, 1 << 63), "over the limit"),
}


def same_ranks(backend, pids):
    """They answer, and none has started again."""
    backend.client.request(Unload("nothing"))
    assert all(Path(f"/proc/{pid}").exists() for pid in pids) and backend.client.request(Ping()).models
    assert backend.welcome.pids == pids


@pytest.fixture
def stranger(backend):
    """Another connection, let in."""
    client = backend.process.wait_ready()
    yield client
    client.close()


def refused(client, message) -> str:
    with pytest.raises(RefusedError) as error:
        client.request(message)
    assert len(str(error.value)) < 1500 and "\n" not in str(error.value)
    return str(error.value)


KINDS = {"message": MESSAGES, "request": SAMPLES, "tensor": TENSORS, "frame": FRAMES}


def answer(client, good: Sample, kind: str, odd) -> str:
    """What the backend says to an odd thing."""
    if kind == "frame":
        client._socket.sendall(odd)
        while (reply := client._next()) is None:
            pass
        return reply.message
    if kind == "request":
        return refused(client, Sample(**{**vars(good), **odd}))
    if kind == "tensor":
        tensors = {name: x for name, x in {**good.tensors, **odd}.items() if x is not None}
        return refused(client, replace(good, tensors=tensors))
    return refused(client, odd)


@pytest.fixture
def says(backend, checkpoint, stranger):
    """(kind, odd thing) -> what the backend says to it; afterwards its ranks are the same."""
    pids, (good, _) = backend.welcome.pids, request_for(backend, checkpoint)
    yield partial(answer, stranger, good)
    same_ranks(backend, pids)


@pytest.mark.parametrize(
    "kind, name", [(kind, name) for kind, known in KINDS.items() for name in known], ids=str
)
def test_it_is_refused_and_the_ranks_stay(says, kind, name):
    odd, words = KINDS[kind][name]
    assert re.search(words, says(kind, odd))


def test_a_sample_after_all_of_them_is_exact(backend, checkpoint):
    pids, (good, expected) = backend.welcome.pids, request_for(backend, checkpoint)
    for kind, known in KINDS.items():
        for odd, _ in known.values():
            client = backend.process.wait_ready()
            answer(client, good, kind, odd)
            client.close()
    assert error_in_std(to_vae_units(backend.sample(good).tensors["samples"]), expected) <= 1e-4
    same_ranks(backend, pids)


def test_a_loop_of_links_is_refused(says, checkpoint, tmp_path):
    os.symlink(tmp_path / "b.safetensors", tmp_path / "a.safetensors")
    os.symlink(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    loop = str(tmp_path / "a.safetensors")
    assert "could not be checked" in says("message", Load(loop))
    assert "no LoRA at" in says("message", Load(checkpoint, loras=[[loop, 1.0]]))


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"latent": [16, 10**20, 8]}, "sides of at most"),
        ({"latent": [16.0, 8, 8]}, "is to describe|to describe has shape"),
        ({"text_tokens": 10**20}, "at most 65536 tokens"),
        ({"prompts": 10**20}, "give one or two"),
        ({"num_pipeline_patch": 10**9}, "more than the 16 tokens"),
        ({"num_pipeline_patch": 10**9, "latent": [16, 65536, 65536]}, "use at most 4096"),
        ({"stale_kv": "\ud800"}, "stale_kv is"),
        ({"batch": 0}, "cannot describe 0 samples"),
        ({"batch": 10**20}, "give 1 to 65536"),
        ({"references": [[1, 8]]}, r"references to describe are \[\[1, 8\]\]"),
        ({"references": [[1, 8, 10**20]]}, "references to describe are"),
        ({"references": [[1, 8, 8]] * 65}, "at most 64 lists"),
    ],
    ids=str,
)
def test_what_cannot_be_described(says, backend, checkpoint, fields, words):
    good = Describe(backend.load(checkpoint).model, [16, 8, 8], 16, 1)
    assert re.search(words, says("message", replace(good, **fields)))


def test_freeing_what_is_not_there(backend, checkpoint, stranger):
    pids = backend.welcome.pids
    backend.load(checkpoint)
    for name in ("", "\ud800", "a" * 100_000, "\0"):
        stranger.request(Unload(name))
        stranger.request(Release([0, "x", []], [name, [], {}, 7]))
    same_ranks(backend, pids)
