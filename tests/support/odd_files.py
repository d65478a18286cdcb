"""Model files that claim more than they hold, that are no files, or whose names mislead: makers of each."""

import json
import os
import pickle
import socket
import struct
from functools import cache

import torch
from safetensors.torch import load_file, save_file
from tiny import as_folder

HUGE = 10**9


def header(path, entries: dict, size: int = 0, claimed: int | None = None):
    """A safetensors file of a header and ``size`` bytes that take no room on the disk."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text) if claimed is None else claimed) + text)
        file.truncate(8 + len(text) + size)
    return path


@cache
def as_it_is(plain):
    """The tiny model as a diffusers folder next to its file, whose weights nobody writes into."""
    return as_folder(plain)


def transformer(folder, plain, **entries):
    """The tiny model as a diffusers folder, whose configuration has other ``entries``."""
    made = folder / "transformer"
    made.mkdir()
    source = as_it_is(plain)
    for part in source.glob("*.safetensors"):
        os.link(part, made / part.name)
    config = json.loads((source / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | entries))
    return made


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf(path, fields: bytes, count: int = 1, tensors: int = 0, rest: bytes = b""):
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + fields + rest)
    return path


def array(kind: int, count: int) -> bytes:
    return gguf_string(b"a") + struct.pack("<IIQ", 9, kind, count)


def many_tensors(folder, plain):
    count = 1_200_000
    names = ",".join(
        f'"b.{i % 4000}.{i}x":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(count)
    )
    text = f"{{{names}}}".encode()
    assert 70e6 < len(text) < 100e6
    (folder / "many.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder / "many.safetensors"


def high_number(folder, plain, name=f"double_blocks.{HUGE}.img_attn.proj.weight"):
    state = load_file(plain)
    return save(folder, {**state, name: torch.zeros(1)})


def high_number_of_diffusers(folder, plain):
    part = next(transformer(folder, plain).glob("*.safetensors"))
    state = load_file(part)
    return save(folder, {**state, f"transformer_blocks.{HUGE}.attn.to_q.weight": torch.zeros(1)})


def save(folder, state):
    save_file(state, folder / "odd.safetensors")
    return folder / "odd.safetensors"


def pipe(name):
    def make(folder, plain):
        os.mkfifo(folder / name)
        return folder / name

    return make


def pipe_inside(name):
    def make(folder, plain):
        odd = transformer(folder, plain)
        (odd / name).unlink(missing_ok=True)
        os.mkfifo(odd / name)
        return odd

    return make


def unix_socket(folder, plain):
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(folder)  # its path may be too long for a socket
        server.bind("odd.gguf")
    return folder / "odd.gguf"


def large_json(name):
    def make(folder, plain):
        odd = transformer(folder, plain)
        with open(odd / name, "wb") as file:
            file.truncate(4 << 30)
        return odd

    return make


def text_inside(name, text):
    def make(folder, plain):
        odd = transformer(folder, plain)
        (odd / name).write_text(text)
        return odd

    return make


def of_bytes(name, content):
    def make(folder, plain):
        (folder / name).write_bytes(content)
        return folder / name

    return make


def config(**entries):
    return lambda folder, plain: transformer(folder, plain, **entries)


def described(folder, plain):
    """A quantized layer whose description has a GB."""
    state = load_file(plain)
    entry = {"dtype": "U8", "shape": [1 << 30], "data_offsets": [0, 1 << 30]}
    entries, at = {"img_in.comfy_quant": entry}, 1 << 30
    for key, value in state.items():
        end = at + value.nbytes
        entries[key] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, end]}
        at = end
    return header(folder / "odd.safetensors", entries, at)


INDEX = "diffusion_pytorch_model.safetensors.index.json"
ZIP = b"PK\x03\x04" + bytes(200)
#: What it is -> (folder, checkpoint -> path of it, what the refusal says).
ODD = {
    "1e9 layers": (config(num_layers=HUGE), "'num_layers' is 1000000000, but its file has tensors of"),
    "1e9 single layers": (config(num_single_layers=HUGE), "'num_single_layers' is 1000000000"),
    "100 layers too many": (config(num_layers=120), "more than .* parameters"),
    "1e9 heads": (config(num_attention_heads=HUGE), "no tensor of its file has more than"),
    "wide heads": (config(num_attention_heads=10000, attention_head_dim=10000), "'num_attention_heads'"),
    "1e9 channels": (config(in_channels=HUGE), "'in_channels' is 1000000000"),
    "1e9 features": (config(joint_attention_dim=HUGE), "'joint_attention_dim'"),
    "long list": (config(axes_dims_rope=[1] * 10**5), "list of 100,000 entries under 'axes_dims_rope'"),
    "deep list": (config(axes_dims_rope=[[[[[[1]]]]]]), "lists in lists"),
    "word for a number": (config(num_layers="many"), "makes no FluxTransformer2DModel \\(TypeError"),
    "infinite": (config(in_channels=float("inf")), "'in_channels' is inf"),
    "list for a class": (config(_class_name=["Flux"]), "without a class name"),
    "block 1e9": (high_number, "'double_blocks.1000000000.*of block '1000000000'"),
    "block 1e9 of diffusers": (high_number_of_diffusers, "of block '1000000000'"),
    "block of 5,000 digits": (
        lambda folder, plain: high_number(folder, plain, f"double_blocks.{'9' * 5000}.weight"),
        "of block '99999999999999999999'... \\(5,000 characters\\)",
    ),
    "1.2 M tensors": (many_tensors, "a header of .* bytes; all of a model's headers have 16,777,216"),
    "40,000 tensors": (
        lambda folder, plain: header(
            folder / "odd.safetensors",
            {f"x{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(40_000)},
        ),
        "has 40,000 tensors, and a transformer 32,768 at most",
    ),
    "name of 33 parts": (
        lambda folder, plain: high_number(folder, plain, ".".join("1" * 33)),
        "of more than 32 parts",
    ),
    "zip": (of_bytes("odd.safetensors", ZIP), "'odd.safetensors' is a pickle of PyTorch .* convert it"),
    "pickle": (of_bytes("odd.safetensors", pickle.dumps({"a": [1.0] * 99})), "is a pickle of PyTorch"),
    "old pickle": (of_bytes("odd.sft", pickle.dumps({"a": [1.0] * 99}, 2)), "is a pickle of PyTorch"),
    "web page": (
        of_bytes("odd.safetensors", b"\n <!DOCTYPE html><html>401</html>" + bytes(99)),
        "'odd.safetensors' is a web page and no safetensors file; download the file itself",
    ),
    "Git LFS pointer": (
        of_bytes("odd.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "is a Git LFS pointer, .* run git lfs pull",
    ),
    "gguf under another name": (of_bytes("odd.safetensors", b"GGUF" + bytes(200)), "a GGUF file .*name it"),
    "no tensors": (lambda folder, plain: save(folder, {}), "'odd.safetensors' holds no tensors"),
    "lora": (
        lambda folder, plain: save(
            folder,
            {
                f"lora_unet_double_blocks_{i}_img_attn_qkv.{role}": torch.zeros(2, 2)
                for i in range(3)
                for role in ("lora_down.weight", "lora_up.weight", "alpha")
            },
        ),
        "is a LoRA, .* Parallel LoRA",
    ),
    "truncated configuration": (
        text_inside("config.json", '{"_class_name": "Flux'),
        "/transformer/config.json' is no JSON",
    ),
    "class that is no model": (
        config(_class_name="Transformer2DModelOutput"),
        "holds a Transformer2DModelOutput, which is no transformer of diffusers",
    ),
    "header of nothing": (of_bytes("odd.safetensors", b""), "truncated or no safetensors"),
    "nested header": (
        of_bytes("odd.safetensors", struct.pack("<Q", 1 << 20) + b"[" * (1 << 20)),
        "truncated or no safetensors",
    ),
    "described in a GB": (described, "describes a layer in 4,096 bytes at most"),
    "gguf array of 2**40": (
        lambda folder, plain: gguf(folder / "odd.gguf", array(4, 1 << 40)),
        "1,099,511,627,776 entries in arrays",
    ),
    "gguf array of arrays": (
        lambda folder, plain: gguf(folder / "odd.gguf", array(9, 1) * 1000),
        "a value of type 9 in an array",
    ),
    "gguf string of 2**40": (
        lambda folder, plain: gguf(folder / "odd.gguf", struct.pack("<Q", 1 << 40)),
        "truncated or no GGUF",
    ),
    "gguf of 2**40 fields": (
        lambda folder, plain: gguf(folder / "odd.gguf", b"", 1 << 40),
        "1,099,511,627,776 metadata entries",
    ),
    "gguf of 2**40 tensors": (
        lambda folder, plain: gguf(folder / "odd.gguf", b"", 0, 1 << 40),
        "1,099,511,627,776 tensors",
    ),
    "gguf tensor of 2**63": (
        lambda folder, plain: gguf(
            folder / "odd.gguf", b"", 0, 1, gguf_string(b"x") + struct.pack("<IQIQ", 1, 1 << 63, 0, 0)
        ),
        "its tensors end at byte",
    ),
    "gguf tensor of 10**6 dimensions": (
        lambda folder, plain: gguf(
            folder / "odd.gguf", b"", 0, 1, gguf_string(b"x") + struct.pack("<I", 10**6)
        ),
        "'x' has 1000000 dimensions",
    ),
    "gguf alignment of 0": (
        lambda folder, plain: gguf(
            folder / "odd.gguf", gguf_string(b"general.alignment") + struct.pack("<II", 4, 0)
        ),
        "its alignment is 0",
    ),
    "pipe": (pipe("odd.safetensors"), "is not a regular file but"),
    "gguf pipe": (pipe("odd.gguf"), "'odd.gguf' is not a regular file but a folder, pipe"),
    "pipe for the weights": (pipe_inside("diffusion_pytorch_model.safetensors"), "not a regular file"),
    "pipe for the configuration": (pipe_inside("config.json"), "has no config.json"),
    "pipe for the index": (pipe_inside(INDEX), "is not a regular file but a folder, pipe"),
    "socket": (unix_socket, "cannot be opened|is not a regular file but"),
    "device": (
        lambda folder, plain: (folder / "odd.gguf").symlink_to("/dev/zero") or folder / "odd.gguf",
        "is not a regular file but a folder, pipe, socket or device",
    ),
    "configuration of 4 GB": (large_json("config.json"), "more than 1,048,576 bytes"),
    "index of 4 GB": (large_json(INDEX), "more than 16,777,216 bytes"),
    "nested index": (text_inside(INDEX, "[" * 10**6), "is no JSON"),
    "index of nothing": (text_inside(INDEX, "{}"), "has no weight_map"),
    "index of numbers": (text_inside(INDEX, '{"weight_map": {"a": 1}}'), "has no weight_map"),
    "configuration that is a list": (text_inside("config.json", "[1]"), "holds \\[1\\] and no names"),
}


def index(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": name}}))
    return folder / INDEX
