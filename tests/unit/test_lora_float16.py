"""LoRAs next to quantized weights whose products are in float16, which has few bits for values below 6e-5."""

from pathlib import Path

import pytest
import torch
from loras import randn
from quantized import plain_float8
from safetensors.torch import load_file, save_file
from tiny import relative, shallow_flux, write_shallow_flux

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.loading.lora.lora_keys import lora_stack
from backend.parallel import mesh
from backend.quantization.added_products import Kronecker, LowRank
from backend.quantization.packed_weight import PackedWeight

NAME = "double_blocks.0.img_mlp.0"
PARAMETER = "transformer_blocks.0.ff.net.0.proj.weight"
RANK = 128
#: Kind -> strength of what is held: at strength 0.5, with the alpha that the file has.
STRENGTHS = {"lora": 0.5 / RANK, "dora": 0.5 / RANK, "dora of columns": 0.5 / RANK, "lokr": 0.5 * 0.01 / 4}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """A float8 file of the shallow Flux, and LoRAs of one of its matrices whose alpha makes them small."""
    folder = tmp_path_factory.mktemp("float16")
    state = load_file(write_shallow_flux(folder / "plain.safetensors"))
    save_file(plain_float8(state), folder / "model.safetensors")
    rows, columns = shallow_flux()[f"{NAME}.weight"]
    up, down = randn(rows, RANK) * 1e-4, randn(RANK, columns, seed=1) / columns**0.5
    lora = {"lora_up.weight": up, "lora_down.weight": down, "alpha": torch.tensor(1.0)}
    lokr = {"lokr_w1": randn(4, 8) * 1e-4, "alpha": torch.tensor(0.01)}
    lokr |= {"lokr_w2_a": randn(rows // 4, 4), "lokr_w2_b": randn(4, columns // 8)}
    stored = state[f"{NAME}.weight"]
    kinds = {
        "lora": lora,
        "dora": lora | {"dora_scale": 2 * stored.norm(dim=1, keepdim=True)},
        "dora of columns": lora | {"dora_scale": 2 * stored.norm(dim=0, keepdim=True)},
        "lokr": lokr,
    }
    module = "lora_unet_" + NAME.replace(".", "_")
    for kind, roles in kinds.items():
        tensors = {f"{module}.{role}": value.clone() for role, value in roles.items()}
        save_file(tensors, folder / f"{kind}.safetensors")
    return {kind: folder / f"{kind}.safetensors" for kind in ("model", *kinds)}


@pytest.fixture(scope="module")
def engines(written) -> list[Engine]:
    """Engines that have computed in float32 and in float16."""
    found = []
    for dtype in ("fp32", "fp16"):
        found.append(Engine(ParallelConfig(), mesh.single()))
        found[-1].load("tiny", str(written["model"]), dtype, "weight only")
    return found


def weights_with(engines: list[Engine], written: dict[str, Path], *kinds: str) -> list[PackedWeight]:
    """Return the matrix in float32 and in float16 with LoRAs at strength 0.5."""
    stack = lora_stack([[str(written[kind]), 0.5] for kind in kinds])
    for engine in engines:
        engine.models["tiny"].weights.fuse(stack)
    found = [engine.models["tiny"].weights.packed[PARAMETER] for engine in engines]
    assert [weight.dtype for weight in found] == [torch.float32, torch.float16]
    return found


def added(weight: PackedWeight, x: torch.Tensor) -> torch.Tensor:
    """Return what the adapters of a weight add to its product with ``x``: next to what it is added to, too
    little to be seen."""
    out = torch.zeros(len(x), weight.shape[0], dtype=weight.dtype)
    scales, weight.scales = weight.scales, weight.scales._replace(rows=None)
    weight._adapt(out, x.to(weight.dtype))
    weight.scales = scales
    return out.float()


@pytest.mark.parametrize("kind", STRENGTHS)
@torch.inference_mode()
def test_alpha_takes_no_bits_of_a_factor(kind, engines, written):
    """It multiplies the product, as in ComfyUI."""
    single, half = weights_with(engines, written, kind)
    wanted, found = (next(iter(weight.adapters.values())) for weight in (single, half))
    assert isinstance(found, Kronecker if kind == "lokr" else LowRank)
    assert found.strength == wanted.strength == pytest.approx(STRENGTHS[kind])
    assert relative(found.difference(), wanted.difference()) <= 1e-3
    if kind == "lora":
        tensors = load_file(written[kind])
        up, down = (next(v for k, v in tensors.items() if role in k) for role in ("lora_up", "lora_down"))
        assert relative(wanted.difference(), 0.5 / RANK * up @ down) <= 1e-6


@pytest.mark.parametrize(
    "kinds",
    [
        ("lora",),
        ("dora",),
        ("lokr",),
        ("lora", "lora"),
        ("lora", "dora", "dora"),
        ("dora of columns", "lora"),
    ],
    ids="+".join,
)
@torch.inference_mode()
def test_products_are_those_of_float32(kinds, engines, written):
    """Of one, of the same one twice, and of several that are joined."""
    single, half = weights_with(engines, written, *kinds)
    x = 1000 * randn(5, shallow_flux()[f"{NAME}.weight"][1])
    difference = sum(adapter.difference() for adapter in single.adapters.values())
    assert isinstance(difference, torch.Tensor)
    assert relative(added(single, x), x @ difference.T) <= 1e-5
    assert relative(added(half, x), x @ difference.T) <= 1e-3


@torch.inference_mode()
def test_a_sum_that_float16_does_not_hold_is_one_before_its_strength():
    """An ``up`` that alpha makes 128 times smaller gives sums that are 128 times larger."""
    lora = LowRank(torch.full((4, 128), 100.0).half(), torch.ones(128, 8).half(), strength=1 / 128)
    out = torch.zeros(2, 4).half()
    lora.add_to(out, torch.full((2, 8), 50.0).half())
    assert torch.equal(out, torch.full((2, 4), 40000.0).half())  # of 128 x 40000


@torch.inference_mode()
def test_sums_of_blocks_have_the_strength_in_them():
    """What the first matrix of a Kronecker product makes is stored in float16."""
    lokr = Kronecker(torch.ones(1, 8).half(), (torch.full((4, 4), 0.25).half(),), strength=1 / 16)
    out = torch.zeros(2, 4).half()
    lokr.add_to(out, torch.full((2, 32), 10000.0).half())
    assert torch.equal(out, torch.full((2, 4), 5000.0).half())  # of 80000 / 16
