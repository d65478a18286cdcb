"""What Parallel LoRA shows of its file under the node, on stand-ins for ComfyUI's modules."""

import sys
from types import SimpleNamespace

import pytest
import torch
from fused_loras import write
from loras import randn
from tiny import shallow_flux, write_shallow_flux
from without_comfy import HOST, StandIn, on_stand_ins

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.lora.lora_keys import lora_stack
from backend.parallel import mesh


@pytest.fixture
def node(monkeypatch):
    """The module nodes/parallel_lora.py; ``sent``: the texts under its node."""
    api = StandIn("comfy_api")
    latest = StandIn("comfy_api.latest")
    monkeypatch.setitem(sys.modules, "comfy_api", api)
    monkeypatch.setitem(sys.modules, "comfy_api.latest", latest)
    latest.io = StandIn("io")
    latest.io.NodeOutput = lambda *values, ui=None: SimpleNamespace(values=values, ui=ui)
    latest.io.Custom = lambda name: name
    handle = f"{HOST}.host.handle"  # which needs more of ComfyUI
    monkeypatch.setitem(sys.modules, handle, StandIn(handle))
    with on_stand_ins("parallel_lora") as module:
        folders = sys.modules["folder_paths"]
        monkeypatch.setattr(folders, "get_full_path", lambda kind, name: f"/loras/{name}", raising=False)
        sent = []
        monkeypatch.setattr(module, "node_text", lambda: sent.append)
        yield SimpleNamespace(module=module, sent=sent, config=ParallelConfig())


def notes(folder, tensors: dict[str, torch.Tensor]) -> list[str]:
    """What ranks say of a LoRA of the shallow Flux."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(write_shallow_flux(folder / "plain.safetensors")), "fp32", "auto")
    stack = lora_stack([[write(folder / "lora.safetensors", tensors), 1.0]])
    return [lora.note for lora in engine.models["tiny"].weights.open(stack)]


def shown(node, note: str, strength: float, monkeypatch, size: int = 0) -> str:
    """The line under the node that adds such a LoRA, of so many bytes next to quantized weights."""
    info = {"lora_bytes": [0, size, 0], "device": "cuda", "ranks": [{"stage": 0, "weight_bytes": 1}]}
    loaded = SimpleNamespace(info={"notes": ["of another one", note], "warnings": ["", ""], **info})
    found = SimpleNamespace(loaded=loaded, config=node.config)
    dit = SimpleNamespace(loaded=SimpleNamespace(info={"lora_bytes": [0, 0, 0]}))
    monkeypatch.setattr(node.module, "with_lora", lambda dit, path, strength: found)
    output = node.module.ParallelLoRA.execute(dit, "lora.safetensors", strength)
    (line,) = node.sent
    assert output.ui == {"parallel_dit": [line]}
    assert output.values == (found if strength else dit,)
    return line


def test_keys_without_counterpart_stand_under_the_node(node, tmp_path, monkeypatch):
    """Their count, and few of their names, however many there are."""
    rows, columns = shallow_flux()["double_blocks.0.img_mlp.0.weight"]
    module = "lora_unet_double_blocks_0_img_mlp_0"
    good = {f"{module}.lora_up.weight": randn(rows, 2), f"{module}.lora_down.weight": randn(2, columns)}
    others = {f"lora_unet_no_such_{i}.alpha": torch.tensor(1.0) for i in range(12)}
    (note,) = notes(tmp_path, good | others)
    line = shown(node, note, 1.0, monkeypatch)
    assert line.startswith("LoRA on 1 layer · 12 of 14 keys left out, for which this model has nothing (")
    assert line.count("lora_unet_no_such_") == 3 and line.endswith(", ...)") and len(line) < 200


@pytest.mark.parametrize(
    "prefix", ["lora_te1_", "lora_te_", "lora_prior_te_", "text_encoder.", "text_encoders.a."]
)
def test_keys_of_the_text_encoder_are_counted_apart(node, prefix, tmp_path, monkeypatch):
    """They are no sign of another model, except where a file has nothing else."""
    rows, columns = shallow_flux()["double_blocks.0.img_mlp.0.weight"]
    good = {"diffusion_model.double_blocks.0.img_mlp.0.diff": randn(rows, columns)}
    text = {
        f"{prefix}layers_{i}.lora_{role}.weight": randn(2, 2) for i in range(3) for role in ("up", "down")
    }
    (note,) = notes(tmp_path, good | text)
    line = shown(node, note, 1.0, monkeypatch)
    assert line == "LoRA on 1 layer · 6 of 7 keys are for the text encoder, which this node does not use"
    with pytest.raises(UnsupportedError, match=r"for the text encoder alone.*Load LoRA at strength_model 0"):
        notes(tmp_path, text)
    with pytest.raises(UnsupportedError, match=r"another model.*with 'of.another.lora_up.weight', while"):
        notes(tmp_path, text | {"of.another.lora_up.weight": randn(2, 2)})


def test_a_file_of_which_all_is_added_says_so(node, tmp_path, monkeypatch):
    """A line in any case: the page keeps what the node has shown before."""
    rows, columns = shallow_flux()["double_blocks.0.img_mlp.0.weight"]
    (note,) = notes(tmp_path, {"diffusion_model.double_blocks.0.img_mlp.0.diff": randn(rows, columns)})
    assert shown(node, note, 1.0, monkeypatch) == "LoRA on 1 layer"


def test_what_it_takes_on_each_gpu_stands_under_the_node(node, monkeypatch):
    """Load Parallel DiT's line has that of the weights; a LoRA of a quantized model can be a large part."""
    line = shown(node, "LoRA on 304 layers", 1.0, monkeypatch, size=1_200_000_000)
    assert line == "LoRA on 304 layers · +1.2 GB on each GPU"


def test_a_strength_of_nothing_says_so(node, monkeypatch):
    assert shown(node, "", 0.0, monkeypatch) == "strength 0: nothing is added"
