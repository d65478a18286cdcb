"""CLIP and VAE out of diffusers folders: what the pipelines themselves would give the transformer and paint,
and what is refused."""

import ast
import inspect
import json
import shutil
import textwrap

import diffusers
import numpy as np
import pipeline_folders
import pytest
import torch
from comfy_modules import comfy_modules
from graphs import Graph
from PIL import Image
from safetensors.torch import save_file

with comfy_modules():
    import comfy.sd
    from parallel_dit.backend.protocol import RefusedError
    from parallel_dit.nodes.diffusers_folder import pipelines
    from parallel_dit.nodes.diffusers_folder.text_encoder import diffusers_clips
    from parallel_dit.nodes.diffusers_folder.vae import DiffusersVAE
from whole_pipelines import GRAPHS, LATENTS, NEGATIVE, PROMPT, SIGMAS, SMALL, seen_by_the_transformer, whole

NAMES = [*pipeline_folders.PIPELINES, "Flux3ModularPipeline"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(name): a tiny pipeline's folder, made once."""
    root = tmp_path_factory.mktemp("pipelines")
    return lambda name: root / name if (root / name).exists() else pipeline_folders.write(root / name, name)


@pytest.fixture(autouse=True)
def quiet_cleaning(monkeypatch):
    """SkyReels-V2's pipeline cleans prompts with a package that need not be here."""
    from diffusers.pipelines.skyreels_v2 import pipeline_skyreels_v2 as module

    monkeypatch.setattr(
        module, "ftfy", type("ftfy", (), {"fix_text": staticmethod(lambda text: text)}), raising=False
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "QwenImage21Pipeline"])
def test_prompts_are_encoded_as_the_pipeline_encodes_them(folder, name):
    seen = seen_by_the_transformer(whole(folder(name), name), **SMALL.get(name, {}))
    clips = diffusers_clips(pipelines.open_text(folder(name)), "cpu")
    assert len(seen) == 4
    for clip, text in zip(clips, (PROMPT, NEGATIVE)):
        ((states, values),) = clip.encode_from_tokens_scheduled(clip.tokenize(text))
        mask = values.get("attention_mask")
        assert any(
            torch.equal(states[0], theirs)
            and (their_mask is None) == (mask is None)
            and (mask is None or torch.equal(mask[0], their_mask))
            for theirs, their_mask in seen
        ), text
    assert values.keys() <= {"attention_mask"} and clip.encode(text).shape == states.shape


def test_sana_instructs_the_prompt_alone(folder):
    """Its instruction stands before the prompt, and not before the negative one."""
    clip, negative = diffusers_clips(pipelines.open_text(folder("SanaPipeline")), "cpu")
    assert clip.encode(PROMPT).shape == negative.encode(PROMPT).shape == (1, 300, pipeline_folders.WIDTH)
    assert not torch.allclose(clip.encode(PROMPT), negative.encode(PROMPT), atol=1e-3)


def test_qwen_image21_leaves_out_the_system_prompt(folder):
    encoder = whole(folder("QwenImage21Pipeline"), "QwenImage21Pipeline")
    with torch.inference_mode():
        want, _, _ = encoder.encode_prompt(PROMPT)
    for clip in diffusers_clips(pipelines.open_text(folder("QwenImage21Pipeline")), "cpu"):
        ((states, values),) = clip.encode_from_tokens_scheduled(clip.tokenize(PROMPT))
        assert torch.equal(states, want) and not values


@pytest.mark.parametrize("name", LATENTS)
def test_vae(folder, name):
    """ComfyUI's VAE around diffusers': images as diffusers decodes them, sizes as ComfyUI's nodes ask for
    them, tiles that meet."""
    channels, scale, time, colours = LATENTS[name]
    model = pipelines.open_vae(folder(name), torch.float32)
    vae, is_video = DiffusersVAE(model), time is not None
    assert (
        vae.latent_channels,
        vae.spacial_compression_decode(),
        vae.spacial_compression_encode(),
        vae.temporal_compression_decode(),
    ) == (channels, scale, scale, time)
    latent = torch.randn(
        2 - is_video, channels, *[2] * is_video, 4, 6, generator=torch.Generator().manual_seed(1)
    )
    with torch.inference_mode():
        found = vae.decode(latent)
        assert (
            found.shape == (len(latent), *[(time or 0) + 1] * is_video, 4 * scale, 6 * scale, colours)
            and 0.0 <= found.min() < found.max() <= 1.0
        )
        theirs = latent
        if name == "Flux3ModularPipeline":
            deviation = torch.sqrt(model.bn.running_var + 1e-4).view(1, -1, 1, 1)
            mean = model.bn.running_mean.view(1, -1, 1, 1)
            theirs = torch.nn.functional.pixel_shuffle(latent * deviation + mean, 2)
        elif name == "QwenImage21Pipeline":
            theirs = latent[:, :, None]
        want = model.decode(theirs).sample
        want = want[:, :, 0] if name == "QwenImage21Pipeline" else want
        torch.testing.assert_close(found, (want / 2 + 0.5).clamp(0, 1).movedim(1, -1), atol=1e-5, rtol=0)
        tiled = vae.decode_tiled(latent, tile_x=4, tile_y=4, overlap=1)
        assert tiled.shape == found.shape and (tiled - found).abs().mean() < 0.2
        pixels = found[0] if is_video else found[..., :3]
        encoded, pieces = (
            vae.encode(pixels),
            vae.encode_tiled(pixels, tile_x=4 * scale, tile_y=4 * scale, overlap=scale),
        )
        assert encoded.shape == pieces.shape == latent.shape
        given = (pixels[None] if is_video else pixels).movedim(-1, 1) * 2 - 1
        if name == "QwenImage21Pipeline":  # a video of one opaque frame
            given = torch.cat([given, torch.ones_like(given[:, :1])], dim=1)[:, :, None]
        want = model.encode(given)
        want = want.latent_dist.mode() if hasattr(want, "latent_dist") else want.latent
        if name == "Flux3ModularPipeline":
            want = (torch.nn.functional.pixel_unshuffle(want, 2) - mean) / deviation
        want = want[:, :, 0] if name == "QwenImage21Pipeline" else want
        torch.testing.assert_close(encoded, want, atol=1e-5, rtol=1e-5)
        cropped = vae.encode(pixels[:, :-3, :-1])  # not a multiple of the scale
        assert cropped.shape == (*latent.shape[:-2], 3, 5)


@pytest.mark.parametrize("name", [name for name, (*_, time, _) in LATENTS.items() if time is None])
def test_tiles_are_comfyuis(folder, name):
    """The mean of its three passes. ComfyUI's own has three channels alone: two more are cut off."""
    channels, *_, colours = LATENTS[name]
    vae = DiffusersVAE(pipelines.open_vae(folder(name), torch.float32))
    latent = torch.randn(2, channels, 9, 13, generator=torch.Generator().manual_seed(3))
    sides = {"tile_x": 4, "tile_y": 4, "overlap": 1}
    with torch.inference_mode():
        found = vae.decode_tiled_(latent, **sides)
        decode = vae.first_stage_model.decode
        vae.first_stage_model.decode = lambda tile: decode(tile)[:, :3]
        want = comfy.sd.VAE.decode_tiled_(vae, latent, **sides)
    assert found.shape[1] == colours and torch.equal(found[:, :3], want)


def test_flux3_latents_are_the_models(folder):
    """FLUX.3's references are encoded by its own block as by this VAE."""
    from diffusers.modular_pipelines.flux3.encoders import Flux3VaeEncoderStep

    block = Flux3VaeEncoderStep().init_pipeline()
    block.update_components(vae=pipelines.open_vae(folder("Flux3ModularPipeline"), torch.float32))
    pixels = torch.rand(1, 64, 96, 3, generator=torch.Generator().manual_seed(2))
    (want,) = block(condition_images=[pixels.movedim(-1, 1) * 2 - 1], output="image_cond_latents")
    with torch.inference_mode():
        torch.testing.assert_close(DiffusersVAE(block.vae).encode(pixels), want, atol=1e-5, rtol=1e-5)


def returned(name: str) -> list[str]:
    """What the source of a pipeline's encode_prompt says that it returns."""
    function = ast.parse(textwrap.dedent(inspect.getsource(getattr(diffusers, name).encode_prompt)))
    value = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)][-1]
    return [ast.unparse(each) for each in value.elts]


@pytest.mark.parametrize("name", pipelines.RETURNS)
def test_returns_are_told_in_diffusers_order(name):
    assert all(
        ours in (None, theirs) for ours, theirs in zip(pipelines.RETURNS[name], returned(name), strict=True)
    )


@pytest.mark.parametrize(
    "change, words",
    [
        (
            lambda path: shutil.rmtree(path / "text_encoder"),
            "has no text_encoder, with which prompts are encoded; download the whole folder",
        ),
        (lambda path: shutil.rmtree(path / "tokenizer"), "has no tokenizer, with which prompts are encoded"),
        (lambda path: shutil.rmtree(path / "vae"), "has no vae, with which latents are decoded"),
        (
            lambda path: (path / "model_index.json").unlink(),
            "has no model_index.json, so it is no pipeline with text encoders",
        ),
        (
            lambda path: change_index(path, _class_name="WanPipeline"),
            "is of 'WanPipeline', and nothing here says how that encodes prompts; known are SanaPipeline, "
            ".*CLIPLoader",
        ),
        (
            lambda path: change_index(path, text_encoder=None, tokenizer=None),
            "names no text encoder in its model_index.json",
        ),
        (
            lambda path: change_index(path, text_encoder=["my_encoder", "Encoder"]),
            r"brings code of its own for its 'text_encoder \(my_encoder\)', which is not run",
        ),
        (
            lambda path: (path / "text_encoder/model.safetensors").unlink(),
            "the text encoders of the folder SanaPipeline cannot be read .*model.safetensors",
        ),
        (
            lambda path: (path / "text_encoder/model.safetensors").rename(
                path / "text_encoder/pytorch_model.bin"
            ),
            "the text encoders of the folder SanaPipeline cannot be read .*model.safetensors",
        ),
        (
            lambda path: (path / "model_index.json").write_text("{"),
            "the model_index.json of the folder SanaPipeline cannot be read",
        ),
        (
            lambda path: (path / "tokenizer/tokenizer.json").unlink(),
            "the text encoders of the folder SanaPipeline cannot be read",
        ),
        (
            lambda path: (path / "vae/config.json").write_text("{}"),
            "the vae of the folder SanaPipeline cannot be read",
        ),
    ],
    ids=lambda value: "" if callable(value) else value[:24],
)
def test_folders_that_lack_something(folder, tmp_path, change, words):
    path = shutil.copytree(folder("SanaPipeline"), tmp_path / "SanaPipeline")
    change(path)
    with pytest.raises(RefusedError, match=words) as refused:
        pipelines.open_text(path)
        pipelines.open_vae(path, torch.float32)
    assert "\n" not in str(refused.value)


def change_index(path, **values):
    index = json.loads((path / "model_index.json").read_text())
    index = {key: value for key, value in {**index, **values}.items() if value is not None}
    (path / "model_index.json").write_text(json.dumps(index))


def test_a_package_that_is_not_there(folder, monkeypatch):
    from diffusers.pipelines.skyreels_v2 import pipeline_skyreels_v2 as module

    monkeypatch.delattr(module, "ftfy")
    clip, _ = diffusers_clips(pipelines.open_text(folder("SkyReelsV2Pipeline")), "cpu")
    with pytest.raises(RefusedError, match='cleans prompts with the package ftfy, .*-m pip install "ftfy"'):
        clip.encode(PROMPT)


def test_what_the_clip_is_not(folder):
    """Nodes that want more than text are told so."""
    clip, _ = diffusers_clips(pipelines.open_text(folder("SanaPipeline")), "cpu")
    with pytest.raises(RefusedError, match="SanaPipeline encodes a text alone here, and is given images too"):
        clip.tokenize(PROMPT, images=[torch.zeros(1, 8, 8, 3)])
    with pytest.raises(AttributeError, match="has no 'clone'; leave out the node"):
        clip.clone()
    assert not hasattr(clip, "cond_stage_model")


def test_text_encoders_that_do_not_fit(folder, monkeypatch):
    import comfy.model_management as management

    clip, _ = diffusers_clips(pipelines.open_text(folder("SanaPipeline")), "default")

    def full(*arguments, **options):
        raise management.OOM_EXCEPTION

    monkeypatch.setattr(management, "load_models_gpu", full)
    with pytest.raises(RefusedError, match=r"do not fit on cpu; choose device cpu in Load CLIP and VAE"):
        clip.encode(PROMPT)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_graph_paints_what_the_pipeline_paints(comfy, folder, tmp_path, name):
    """From text to image, on two ranks, with stock nodes around: the latent to 1e-4 of its standard
    deviation, the image to a step of 8 bits."""
    scale, width, height, cfg, empty, factor = GRAPHS[name]
    noise = torch.randn(1, LATENTS[name][0], height // scale, width // scale, generator=torch.manual_seed(11))
    inputs = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE,
        "latents": noise,
        "sigmas": SIGMAS,
        "num_inference_steps": 4,
        "height": height,
        "width": width,
    }
    pipeline = whole(folder(name), name)
    if name == "Flux3ModularPipeline":
        state = pipeline(**inputs, output_type="pt")
        latent, pixels = state.get("latents"), state.get("images")
    else:
        latent = (
            pipeline(**inputs, guidance_scale=cfg, output_type="latent", **SMALL.get(name, {})).images
            / factor
        )
        pixels = pipeline.vae.decode(latent).sample.detach() / 2 + 0.5
    save_file({"samples": latent.detach().contiguous()}, tmp_path / "latent.safetensors")
    target = comfy.folder / "models/diffusers" / f"tiny-{name}"
    shutil.copytree(folder(name), target, dirs_exist_ok=True)
    g = Graph()
    parts = g.add("LoadDiffusersCLIPVAE", model_name=target.name, device="default")
    positive, negative = (
        g.one("CLIPTextEncode", clip=[parts, 0], text=PROMPT),
        g.one("CLIPTextEncode", clip=[parts, 2], text=NEGATIVE),
    )
    dit = g.one(
        "LoadParallelDiT", config=g.one("ParallelConfig", device="cpu", cfg_degree=2), model_name=target.name
    )
    samples = g.one(
        "ParallelSampler",
        dit=dit,
        positive=positive,
        negative=negative,
        latent_image=g.one(empty, width=width, height=height, batch_size=1),
        seed=11,
        steps=4,
        cfg=cfg,
        sampler_name="euler",
        scheduler="simple",
        denoise=1.0,
    )
    distance = g.add("TestGoldenError", samples=samples, file=str(tmp_path / "latent.safetensors"))
    saved = g.add(
        "SaveImage", images=g.one("VAEDecode", samples=samples, vae=[parts, 1]), filename_prefix="tiny"
    )
    run = comfy.run(g.nodes)
    assert run.status == "success", run.message or run.node_errors
    told = json.loads(run.outputs[distance]["text"][0])
    assert told["shape"] == list(latent.shape) and told["error"] < 1e-4
    image = run.outputs[saved]["images"][0]
    (tmp_path / "image.png").write_bytes(
        comfy.fetch(f"/view?filename={image['filename']}&type={image['type']}&subfolder={image['subfolder']}")
    )
    painted = torch.from_numpy(np.asarray(Image.open(tmp_path / "image.png"))).float()
    want = pixels[0].clamp(0, 1).movedim(0, -1) * 255
    assert want.std() > 1 and (painted - want).abs().max() < 1.1
