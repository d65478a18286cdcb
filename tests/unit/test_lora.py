"""Every kind of adapter on the tiny Flux: what it adds, that it goes again to the last bit, and what is
refused."""

import json

import pytest
import torch
from fused_loras import STRENGTH, change, equal, fuse, parameters, write
from loras import lora, randn
from safetensors.torch import load_file
from tiny import write_checkpoint
from tolerance import assert_ulps

from backend.config import ParallelConfig
from backend.engine import MAX_STACKS, Engine
from backend.errors import UnsupportedError
from backend.loading.lora.lora_keys import lora_stack
from backend.parallel import mesh


@pytest.fixture(scope="module")
def flux(folder):
    """An engine with the tiny Flux, without a LoRA wherever a test begins."""
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("m", str(write_checkpoint(folder / "flux-dev.safetensors")), "default")
    return engine


ATTENTION, HIDDEN = "double_blocks.0.img_attn.qkv", 256


def kron():
    return {
        "lokr_w1": randn(8, 4),
        "lokr_w2_a": randn(96, 2),
        "lokr_w2_b": randn(2, 64),
        "alpha": torch.tensor(4.0),
    }, lambda t: 2 * torch.kron(t["lokr_w1"], t["lokr_w2_a"] @ t["lokr_w2_b"])


def hadamard():
    tensors = {
        "hada_w1_a": randn(768, 2),
        "hada_w1_b": randn(2, 256),
        "hada_w2_a": randn(768, 2),
        "hada_w2_b": randn(2, 256),
        "alpha": torch.tensor(1.0),
    }
    return tensors, lambda t: 0.5 * (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])


KINDS = {
    "lokr": kron(),
    "loha": hadamard(),
    "whole difference": ({"diff": randn(768, 256)}, lambda t: t["diff"]),
    "lokr of two matrices": (
        {"lokr_w1": randn(8, 4), "lokr_w2": randn(96, 64), "alpha": torch.tensor(4.0)},
        lambda t: torch.kron(t["lokr_w1"], t["lokr_w2"]),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_adapters(flux, tmp_path, name):
    tensors, difference = KINDS[name]
    found = change(
        flux,
        tmp_path / "a.safetensors",
        {f"lycoris_{ATTENTION.replace('.', '_')}.{role}": value for role, value in tensors.items()},
    )
    got = torch.cat([found.pop(f"transformer_blocks.0.attn.to_{part}.weight") for part in "qkv"])
    assert not found and torch.allclose(got, STRENGTH * difference(tensors), atol=1e-5)


@pytest.mark.parametrize("by_row", [True, False])
def test_dora_over_a_stacked_tensor(flux, folder, tmp_path, by_row):
    """ComfyUI's weight_decompose: norms over rows of the weight, or over columns of the sum, which run
    through q, k and v. An earlier LoRA is below it.
    """
    plain = load_file(folder / "flux-dev.safetensors")[f"{ATTENTION}.weight"]
    below, below_adds = lora({"transformer_blocks.0.attn.to_k": (HIDDEN, HIDDEN)}, "peft", seed=7)
    tensors, added = lora({ATTENTION: plain.shape}, "comfyui")
    magnitude = 0.5 + randn(768, 1).abs() if by_row else 0.5 + randn(1, 256).abs()
    stack = [
        (write(tmp_path / "below.safetensors", below), 2.0),
        (
            write(
                tmp_path / "dora.safetensors",
                {**tensors, f"diffusion_model.{ATTENTION}.dora_scale": magnitude},
            ),
            STRENGTH,
        ),
    ]
    fuse(flux, *stack)
    found = parameters(flux)

    weight = plain + torch.cat(
        [
            torch.zeros(HIDDEN, HIDDEN),
            2.0 * below_adds["transformer_blocks.0.attn.to_k"],
            torch.zeros(HIDDEN, HIDDEN),
        ]
    )
    turned = weight + added[ATTENTION]
    norm = weight.norm(dim=1, keepdim=True) if by_row else turned.norm(dim=0, keepdim=True)
    want = weight + STRENGTH * (turned * magnitude / norm - weight)
    assert torch.allclose(
        torch.cat([found[f"transformer_blocks.0.attn.to_{part}.weight"] for part in "qkv"]), want, atol=1e-5
    )

    # without the LoRA below, the norms that q and v depend on change too
    fuse(flux, stack[1])
    turned = plain + added[ATTENTION]
    norm = plain.norm(dim=1, keepdim=True) if by_row else turned.norm(dim=0, keepdim=True)
    want = plain + STRENGTH * (turned * magnitude / norm - plain)
    assert torch.allclose(
        torch.cat([parameters(flux)[f"transformer_blocks.0.attn.to_{part}.weight"] for part in "qkv"]),
        want,
        atol=1e-5,
    )
    fuse(flux)


def test_biases_norms_and_tables(flux, tmp_path):
    tensors = {
        "diffusion_model.double_blocks.0.img_attn.qkv.diff_b": randn(768),
        "diffusion_model.img_in.diff": randn(256, 64),
        "diffusion_model.img_in.diff_b": randn(256),
        "diffusion_model.double_blocks.0.img_attn.norm.query_norm.scale.diff": randn(32),
        "diffusion_model.double_blocks.1.txt_attn.norm.key_norm.diff": randn(32),
        "transformer.norm_out.linear.lora_B.bias": randn(512),
    }
    found = change(flux, tmp_path / "a.safetensors", tensors, 1.0)
    assert torch.allclose(
        torch.cat([found.pop(f"transformer_blocks.0.attn.to_{part}.bias") for part in "qkv"]),
        tensors["diffusion_model.double_blocks.0.img_attn.qkv.diff_b"],
        atol=1e-6,
    )
    blocks = "diffusion_model.double_blocks"
    names = {
        "x_embedder.weight": "diffusion_model.img_in.diff",
        "x_embedder.bias": "diffusion_model.img_in.diff_b",
        "norm_out.linear.bias": "transformer.norm_out.linear.lora_B.bias",
        "transformer_blocks.1.attn.norm_added_k.weight": f"{blocks}.1.txt_attn.norm.key_norm.diff",
        "transformer_blocks.0.attn.norm_q.weight": f"{blocks}.0.img_attn.norm.query_norm.scale.diff",
    }
    assert found.keys() == names.keys() and all(
        torch.allclose(found[ours], tensors[key], atol=1e-6) for ours, key in names.items()
    )


def test_only_what_changes_is_read_again(flux, tmp_path):
    """Bytes of the checkpoint that are read: for the first LoRA its tensors, for another strength the same,
    for the same stack none.
    """
    files = flux.models["m"].weights.checkpoint.files
    one = write(tmp_path / "one.safetensors", lora({ATTENTION: (768, 256)}, "comfyui")[0])
    two = write(tmp_path / "two.safetensors", lora({"transformer_blocks.1.ff.net.2": (256, 1024)}, "peft")[0])

    def read_for(*loras):
        before = files.bytes_read
        fuse(flux, *loras)
        return files.bytes_read - before

    attention, mlp = 768 * 256 * 4, 256 * 1024 * 4
    assert [
        read_for((one, 1.0)),
        read_for((one, 1.0)),
        read_for((one, 0.5)),
        read_for((one, 0.5), (two, 1.0)),
        read_for((two, 1.0)),
        read_for((two, 0.0)),
        read_for(),
    ] == [attention, 0, attention, mlp, attention, mlp, 0]


def test_two_names_share_the_weights(flux, tmp_path):
    """Models with other LoRAs are the same weights under other names, fused for whoever is sampled; a file
    that changes is another LoRA.
    """
    path = tmp_path / "one.safetensors"
    names = []
    for seed in (0, 1):
        stack = lora_stack(
            [
                [
                    write(
                        path,
                        lora({ATTENTION: (768, 256)}, "comfyui", seed=seed)[0]
                        | ({"spare": torch.zeros(seed + 1)}),
                    ),
                    1.0,
                ]
            ]
        )
        names.append(flux.add_lora_stack("m", stack))
        first = flux.fused(names[-1]).transformer.transformer_blocks[0].attn.to_q.weight.clone()
        assert not flux.fused("m").transformer.transformer_blocks[0].attn.to_q.weight.equal(first)
        assert flux.fused(names[-1]).transformer.transformer_blocks[0].attn.to_q.weight.equal(first)
    assert names[0] != names[1] and all(flux.models[name] is flux.models["m"] for name in names)
    fuse(flux)


OTHERS = {
    "layers.0.attention.wq.lora_A.weight": torch.ones(2, 8),
    "layers.0.attention.wq.lora_B.weight": torch.ones(8, 2),
}
GOOD = lora({ATTENTION: (768, 256)}, "comfyui")[0]
REFUSED = {
    "nothing of it": (
        OTHERS,
        "was made for another model and has nothing for flux-dev.safetensors; choose a LoRA of this model. "
        "Its keys begin with 'layers.0.attention.wq.lora_A.weight', "
        ".* modules like double_blocks.0.img_attn.qkv, .* transformer_blocks.0.attn.to_q",
    ),
    "another size": (
        lora({ATTENTION: (9216, 3072)}, "kohya")[0],
        "double_blocks.0.img_attn.qkv.weight is 9216 x 3072, "
        "but in flux-dev.safetensors that tensor is 768 x 256",
    ),
    "another size of bias": (
        {**GOOD, f"diffusion_model.{ATTENTION}.diff_b": torch.ones(5)},
        "is 5 x 1, but .* is 768 x 1",
    ),
    "half of it": ({key: value for key, value in GOOD.items() if "down" not in key}, "is incomplete"),
    "a control lora": (
        {**GOOD, "diffusion_model.img_in.reshape_weight": torch.tensor([256, 128])},
        "reshape_weight.* control LoRA",
    ),
    "a wider input": (
        lora({"img_in": (256, 128)}, "comfyui")[0],
        "widens the input of img_in.weight from 64 to 128",
    ),
    "a control lora of bfl": (
        {**GOOD, "single_blocks.0.norm.key_norm.scale": torch.ones(128)},
        "control LoRA of Flux.1, which widens",
    ),
    "replaced weights": (
        {f"diffusion_model.{ATTENTION}.set_weight": torch.ones(768, 256)},
        "set_weight.* replaced",
    ),
    "oft of PEFT": (
        {f"lora_unet_{ATTENTION.replace('.', '_')}.oft_R.weight": torch.ones(2, 2)},
        "OFT.*; use a LoRA of another kind: KSampler does not read it",
    ),
    "oft": (
        {f"lora_unet_{ATTENTION.replace('.', '_')}.oft_blocks": torch.ones(2, 2)},
        "OFT.*; use KSampler for it",
    ),
    "glora": ({f"diffusion_model.{ATTENTION}.a1.weight": torch.ones(2, 2)}, "GLoRA"),
    "peft's dora": (
        {**GOOD, f"diffusion_model.{ATTENTION}.lora_magnitude_vector.default.weight": torch.ones(768)},
        "PEFT's DoRA.*; use a LoRA of another kind: KSampler does not read it either",
    ),
    "dora of another size": (
        {**GOOD, f"diffusion_model.{ATTENTION}.dora_scale": torch.ones(5, 1)},
        "neither a row nor a column",
    ),
}


@pytest.mark.parametrize("tensors, says", REFUSED.values(), ids=REFUSED)
def test_refused(flux, tmp_path, tensors, says):
    stack = lora_stack([[write(tmp_path / "bad.safetensors", tensors), 1.0]])
    with pytest.raises(UnsupportedError, match=says) as error:
        flux.check_loras("m", stack)
    assert "\n" not in str(error.value) and "bad.safetensors" in str(error.value)


@pytest.mark.parametrize(
    "loras, says",
    [
        ([["/nowhere/a.safetensors", 1.0]], "no LoRA at /nowhere"),
        ([["a", float("nan")]], "not a pair"),
        ([["a"]], "not a pair"),
        (["ab"], "not a pair"),
        ([["a", "1"]], "not a pair"),
    ],
)
def test_refused_lists(flux, loras, says):
    with pytest.raises(UnsupportedError, match=says):
        flux.check_loras("m", lora_stack(loras))


def test_what_fits_in_part_is_used_with_a_warning(flux, tmp_path):
    path = write(
        tmp_path / "part.safetensors", {**GOOD, **OTHERS, "lora_te_text_model.alpha": torch.tensor(1.0)}
    )
    (warning,) = flux.check_loras("m", lora_stack([[path, 1.0]]))
    text = "1 keys of the LoRA part.safetensors were not loaded, because they are for the text encoder"
    assert warning.startswith("2 keys of the LoRA part.safetensors were not loaded") and text in warning
    assert all(key in warning for key in (*OTHERS, "lora_te_text_model.alpha"))
    assert len(change(flux, path, load_file(path), 1.0)) == 3


def test_half_precision_of_a_float8_file_and_a_folder(flux, folder, tmp_path):
    """With float8 the LoRA is a product of its own; in a diffusers folder, which takes the single file's
    names too, the sum is rounded once, from the file's values. Both go back to the last bit."""
    file, added = lora({ATTENTION: (768, 256)}, "kohya")
    path, state = write(tmp_path / "lora.safetensors", file), load_file(folder / "flux-dev.safetensors")
    float8 = write(
        tmp_path / "float8.safetensors",
        {key: value.to(torch.float8_e4m3fn) if value.ndim == 2 else value for key, value in state.items()},
    )
    inside = tmp_path / "transformer"
    inside.mkdir()
    write(
        inside / "diffusion_pytorch_model.safetensors",
        {name: value.contiguous() for name, value in parameters(flux).items()},
    )
    checkpoint = flux.models["m"].weights.checkpoint
    (inside / "config.json").write_text(
        json.dumps({"_class_name": checkpoint.family.transformer, **checkpoint.config})
    )
    stored = load_file(float8)[f"{ATTENTION}.weight"].float()
    summed = state[f"{ATTENTION}.weight"] + STRENGTH * added[ATTENTION]
    for source, weight_dtype, want in (
        (float8, "fp32", stored + STRENGTH * added[ATTENTION]),
        (str(inside), "fp32", summed),
        (str(inside), "bf16", summed.to(torch.bfloat16)),
        (str(inside), "fp16", summed.to(torch.float16)),
    ):
        engine = Engine(ParallelConfig(), mesh.single())
        engine.load("m", source, weight_dtype)
        plain = parameters(engine)
        fuse(engine, (path, STRENGTH))
        got = torch.cat([parameters(engine)[f"transformer_blocks.0.attn.to_{part}.weight"] for part in "qkv"])
        assert_ulps(got, want, 1)
        # rounded once: other bits are only where float32 sums in another order are on both sides of a half
        assert want.dtype == torch.float32 or (got != want).float().mean() < 1e-3
        fuse(engine)
        assert equal(parameters(engine), plain)


def test_names_of_models_with_loras_are_bounded(flux, tmp_path):
    """Those that were asked for last stay, and the model's own."""
    path = str(write(tmp_path / "a.safetensors", {f"{ATTENTION}.diff": randn(768, 256)}))
    names = [flux.add_lora_stack("m", lora_stack([[path, 0.001 * i]])) for i in range(1, MAX_STACKS + 3)]
    again = flux.add_lora_stack("m", lora_stack([[path, 0.003]]))
    assert again == names[2] and list(flux.lora_stacks) == [*names[3:], again]
    assert flux.models.keys() == {"m", *flux.lora_stacks}
