"""ComfyUI's own model of every family, by what the ranks state of it: the unet_config, arguments and latent
scaling of the golden files."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules
from families import LATENT_FORMATS, golden, load, to_vae_units
from tiny import facts, write_checkpoint
from versions import skip_without_class

from backend.config import ParallelConfig
from backend.loading.checkpoint import Checkpoint
from backend.loading.recognition import open_checkpoint
from backend.models import FAMILIES
from backend.protocol import Describe, Loaded
from backend.sampling.describe_validation import check_workload

with comfy_modules():
    import comfy.model_detection
    import comfy.samplers
    import comfy.supported_models
    from parallel_dit.backend.client.auto.model_choice import ModelChoice
    from parallel_dit.backend.config import ParallelConfig as ClientConfig
    from parallel_dit.backend.protocol import RefusedError
    from parallel_dit.nodes.comfy_models.registry import FAMILIES as NODE_FAMILIES
    from parallel_dit.nodes.comfy_models.registry import OURS, weightless_patcher
    from parallel_dit.nodes.host.conditioning import (
        as_tensors,
        check_conditioning,
        fill_zeros,
        latent_shapes,
        model_arguments,
    )
    from parallel_dit.nodes.host.graph_requests import requests_of_graph
    from parallel_dit.nodes.host.handle import ParallelDiT
    from parallel_dit.nodes.host.plan_report import described_latent, pixels_of, request_text
    from parallel_dit.nodes.host.sampling_checks import check_latent

ROOT = Path(__file__).resolve().parents[2]


#: Family -> keys of inpainting that it refuses; family's golden file and key -> what it changes.
REFUSED = {"hidream": ("concat_latent_image",), "ltx2": ("concat_mask",)}
#: Golden file -> arguments that ComfyUI makes of zeros without an image, which golden requests leave out.
ZEROS = {"hunyuan-video15": {"c_concat"}}
READ = {
    ("kandinsky5", "concat_mask"): {"c_concat"},
    ("hunyuan-video15", "concat_latent_image"): {"c_concat"},
    ("hunyuan-video15", "concat_mask"): {"c_concat"},
    ("ltxv", "concat_mask"): {"denoise_mask"},
}


def test_every_family_of_the_backend_has_a_node_side():
    assert set(NODE_FAMILIES) == set(FAMILIES)


def described(name: str, folder) -> Loaded:
    """What the backend tells of a loaded golden family; the test is skipped where ComfyUI lacks it."""
    skip_without_class(facts(name)["comfy_class"])
    checkpoint = open_checkpoint(str(write_checkpoint(folder / f"{name}.safetensors", name)))
    info = {
        "config": json.loads(json.dumps(checkpoint.config)),
        "conditioning": list(checkpoint.family.conditioning.accepted),
        "latent_format": None,
        "dtype": "float32",
        "weights": checkpoint.comfy_shapes,
    }
    return Loaded("m", checkpoint.family.name, info)


@pytest.fixture(scope="module", params=LATENT_FORMATS)
def loaded(request, tmp_path_factory):
    """(golden family, what the backend tells of the loaded model)."""
    return request.param, described(request.param, tmp_path_factory.mktemp("models"))


def conditioning(stored, branch):
    values = {key.split(".")[1]: value for key, value in stored.items() if key.startswith(branch + ".")}
    values = {key: value.item() if value.ndim == 0 else value for key, value in values.items()}
    return [[values.pop("cross_attn"), {"pooled_output": None, **values}]]


def test_class_is_comfyuis(loaded):
    name, loaded = loaded
    assert NODE_FAMILIES[loaded.family].class_name(loaded.info["config"]) == facts(name)["comfy_class"]


def test_unet_config_is_what_comfyui_detects_of_its_file(loaded):
    """Of the names and shapes that the ranks state, as of the whole file."""
    name, loaded = loaded
    kind, shapes = facts(name)["comfy_class"], facts(name)["shapes"].items()
    if kind in OURS:
        pytest.skip(f"ComfyUI has no {kind}")
    state_dict = {key: torch.empty(shape, device="meta") for key, shape in shapes}
    want = getattr(comfy.supported_models, kind)(comfy.model_detection.detect_unet_config(state_dict, ""))
    have = weightless_patcher(loaded).model.model_config.unet_config
    # of PixArt's embeddings of the empty prompt, which training alone reads
    assert want.unet_config.items() <= {"model_max_length": 300, **have}.items()


def test_arguments_are_those_of_the_golden_requests(loaded):
    name, loaded = loaded
    (stored, shapes), (sample, _) = load(f"{name}__euler_simple"), golden(f"{name}__euler_simple")
    patcher, family = weightless_patcher(loaded), NODE_FAMILIES[loaded.family]
    for branch in ("positive", "negative"):
        prompt = conditioning(stored, branch)
        check_conditioning(branch, prompt, loaded.family, family)
        conds = comfy.samplers.process_conds(
            patcher.model,
            sample.tensors["noise"],
            {branch: comfy.sampler_helpers.convert_cond(prompt)},
            torch.device("cpu"),
            latent_shapes=[[1, *shape] for shape in shapes],
        )
        assert latent_shapes(conds[branch][0]) == shapes
        found = model_arguments(branch, conds[branch][0], 1, loaded.info["conditioning"], family)
        found = fill_zeros(found, 1, family, loaded.info["config"])
        want = {
            key.removeprefix(f"{branch}."): value
            for key, value in sample.tensors.items()
            if key.startswith(f"{branch}.")
        }
        assert found.keys() - want.keys() == ZEROS.get(name, set())
        assert not any(found[key].any() for key in ZEROS.get(name, ()))
        for key, value in want.items():
            assert torch.equal(found[key], value), key  # of shapes too


def video_alone(loaded, patcher, family):
    check_latent({"samples": torch.ones(1, 128, 2, 4, 4)}, patcher.model.latent_format, family.latents)


def reference_audio(loaded, patcher, family):
    """As LTXV Reference Audio (ID-LoRA) sets it."""
    stored, shapes = load("ltx2__euler_simple")
    prompt = [
        [text, {**rest, "ref_audio": {"tokens": text}}] for text, rest in conditioning(stored, "positive")
    ]
    conds = comfy.samplers.process_conds(
        patcher.model,
        stored["noise"],
        {"positive": comfy.sampler_helpers.convert_cond(prompt)},
        torch.device("cpu"),
        latent_shapes=[[1, *shape] for shape in shapes],
    )
    model_arguments("positive", conds["positive"][0], 1, loaded.info["conditioning"], family)


def edited_image(loaded, patcher, family):
    """As Parallel Model is given HiDream E1's image; the sampler's inputs are in the next test."""
    given = family.translate({"c_crossattn": torch.ones(1, 4, 8), "image_cond": torch.ones(1, 16, 8, 8)})
    as_tensors("the graph", given, loaded.info["conditioning"])


@pytest.mark.parametrize(
    "name, give, words, said",
    [
        ("ltx2", video_alone, r"takes 2 \(video and audio\); join both", "LTX-2 without its audio latent"),
        (
            "ltx2",
            reference_audio,
            "gives the model 'ref_audio', which",
            "reference audio for LTX-2 (ID-LoRA)",
        ),
        ("hidream", edited_image, "gives the model 'image_cond', which", "HiDream E1"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_the_readme_refuses_is_refused_by_name(name, give, words, said, tmp_path):
    loaded = described(name, tmp_path)
    with pytest.raises(RefusedError, match=words):
        give(loaded, weightless_patcher(loaded), NODE_FAMILIES[loaded.family])
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert said in readme.partition("All of this is refused by name")[2].partition("And nothing here has")[0]


@pytest.mark.parametrize("key", ["concat_latent_image", "concat_mask"])
def test_keys_of_inpainting_reach_what_reads_them(loaded, key):
    """InpaintModelConditioning sets them for every model, and most of ComfyUI's do not look at them."""
    name, loaded = loaded
    (stored, shapes), (sample, _) = load(f"{name}__euler_simple"), golden(f"{name}__euler_simple")
    patcher, family = weightless_patcher(loaded), NODE_FAMILIES[loaded.family]
    noise = sample.tensors["noise"]
    values = {"concat_latent_image": noise.clone(), "concat_mask": torch.zeros_like(noise[:, :1])}
    found = {}
    for given in ({}, {key: values[key]}):
        prompt = [[text, {**rest, **given}] for text, rest in conditioning(stored, "positive")]
        if given and key in REFUSED.get(loaded.family, ()):
            with pytest.raises(RefusedError, match=f"for inpainting.*'{key}'.*ordinary MODEL"):
                check_conditioning("positive", prompt, loaded.family, family)
            return
        check_conditioning("positive", prompt, loaded.family, family)
        conds = comfy.samplers.process_conds(
            patcher.model,
            noise,
            {"positive": comfy.sampler_helpers.convert_cond(prompt)},
            torch.device("cpu"),
            latent_shapes=[[1, *shape] for shape in shapes],
        )["positive"]
        found[bool(given)] = model_arguments("positive", conds[0], 1, loaded.info["conditioning"], family)
    changed = {
        each
        for each, value in found[True].items()
        if each not in found[False] or not torch.equal(value, found[False][each])
    }
    assert changed == READ.get((name, key), set())


def test_the_latent_that_is_assumed_is_one_of_the_model(loaded):
    name, loaded = loaded
    dit = ParallelDiT(ClientConfig(), ModelChoice(""), loaded, weightless_patcher(loaded))
    (request,) = requests_of_graph({}, "1", pixels_of(dit))
    what, latent = request_text(request, dit), described_latent(dit, request)
    family, golden_latent = FAMILIES[loaded.family], load(f"{name}__euler_simple")[0]["noise"]
    checkpoint = Checkpoint(loaded.family, family, loaded.info["config"], SimpleNamespace())
    assert check_workload(Describe("m", latent, 512, 2), ParallelConfig(), checkpoint) > 500
    assert ("frames" in what) == (
        family.latent.nested is not None or (golden_latent.ndim == 5 and golden_latent.shape[2] > 1)
    ), what


def test_the_pixels_of_a_latent_pixel_are_comfyuis(loaded):
    """Older versions of ComfyUI do not tell them."""
    _, loaded = loaded
    format = weightless_patcher(loaded).model.latent_format
    time, *sides = FAMILIES[loaded.family].latent.pixels(loaded.info["config"])
    assert sides == [getattr(format, "spacial_downscale_ratio", sides[0])] * 2
    assert time in (1, getattr(format, "temporal_downscale_ratio", time))


def test_latents_are_scaled_as_in_the_golden_files(loaded):
    name, loaded = loaded
    stored, shapes = load(f"{name}__euler_simple")
    model = weightless_patcher(loaded).model
    model.latent_shapes = [[1, *shape] for shape in shapes]
    assert torch.allclose(
        model.process_latent_out(stored["x0_step5"]),
        to_vae_units(name, stored["x0_step5"], shapes),
        atol=1e-6,
    )


@pytest.fixture(params=["flux3", "qwen-image21"])
def edits(request, tmp_path):
    """(golden family, reference latents, values next to them in a CONDITIONING -> the model's arguments) of
    models whose class is ours."""
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path / "model.safetensors", request.param)))
    loaded = Loaded(
        "m",
        checkpoint.family.name,
        {
            "config": checkpoint.config,
            "conditioning": list(checkpoint.family.conditioning.accepted),
            "latent_format": None,
            "dtype": "float32",
            "weights": checkpoint.comfy_shapes,
        },
    )
    patcher, family, channels = (
        weightless_patcher(loaded),
        NODE_FAMILIES[loaded.family],
        checkpoint.config["in_channels"],
    )
    images = [torch.randn(1, channels, 4, 6), torch.randn(1, channels, 4, 4)]

    def arguments(**values):
        prompt = [[torch.randn(1, 12, 64), {"pooled_output": None, "reference_latents": images, **values}]]
        check_conditioning("positive", prompt, loaded.family, family)
        conds = comfy.samplers.process_conds(
            patcher.model,
            torch.zeros(2, channels, 8, 9),
            {"positive": comfy.sampler_helpers.convert_cond(prompt)},
            torch.device("cpu"),
        )
        return model_arguments("positive", conds["positive"][0], 2, loaded.info["conditioning"], family)

    return request.param, images, arguments


def test_references_reach_models_that_comfyui_does_not_have(edits):
    """As ComfyUI's edit models are given theirs; a way to place them that a model does not have is refused by
    name."""
    name, images, arguments = edits
    found = arguments(**({"image_slots": [3, 5]} if name == "qwen-image21" else {}))
    shift, scale = LATENT_FORMATS[name]
    for i, image in enumerate(images):
        torch.testing.assert_close(found[f"ref_latents.{i}"], ((image - shift) * scale).expand(2, -1, -1, -1))
    if name == "qwen-image21":
        assert found["image_slots"].tolist() == [[3, 5]]
    else:
        with pytest.raises(RefusedError, match="'ref_latents_method'"):
            arguments(reference_latents_method="offset")


def test_what_qwen_image21_does_not_read_is_left_out():
    """As its transformer in ComfyUI leaves it: places of images that are not there, and which rows of the
    prompt are padding."""
    translate, prompt, images = (
        NODE_FAMILIES["qwen-image-2.1"].translate,
        torch.zeros(1, 3, 64),
        [torch.zeros(1, 64, 2, 2)],
    )
    assert translate(
        {"c_crossattn": prompt, "image_slots": [1, 2], "attention_mask": torch.tensor([[1, 1, 0]])}
    ).keys() == {"c_crossattn"}
    assert translate({"c_crossattn": prompt, "image_slots": [1, 2], "ref_latents": images})[
        "image_slots"
    ].tolist() == [[1]]


def test_what_minimaxs_encoder_tells_of_a_prompt():
    """Its tags, which come with every prompt, are sent where a row is an image's; what the payload holds
    besides what is known is refused."""
    translate, prompt = NODE_FAMILIES["minimax-h3"].translate, torch.zeros(1, 3, 64)

    def sent(**payload):
        return translate({"c_crossattn": prompt, "minimax_payload": payload})

    assert sent(text_token_tags=torch.ones(3, dtype=torch.long), seed=1).keys() == {"c_crossattn"}
    assert sent(text_token_tags=torch.tensor([1, 0, 1]))["text_tags"].tolist() == [[1, 0, 1]]
    with pytest.raises(RefusedError, match="the prompt carries more, which the ranks do not know"):
        sent(more=1)
