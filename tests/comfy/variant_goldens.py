"""Golden latents of variants: what a real ComfyUI's KSampler makes of its own conditioning nodes, with the
request that Parallel Sampler sends for the same inputs, in tests/golden/variants.

    COMFYUI_PATH=~/ComfyUI python tests/comfy/variant_goldens.py [NAME ...]      # with ComfyUI's Python
"""

import importlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

FOLDERS = ("", "tests", "tests/support", "tests/comfy", "scripts")
sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in FOLDERS]
sys.argv, NAMES = sys.argv[:1], sys.argv[1:]  # ComfyUI reads the arguments as its own
import pack  # noqa: F401  # the pack under its name in ComfyUI
import test_conditioning_nodes as walk
import torch
import variants

SETTINGS = walk.STEPS | {"denoise": 1.0}


#: What GetICLoRAParameters reads of a LoRA.
FACTOR = "reference_downscale_factor"
#: Small videos: a camera's path has 24 numbers for each pixel.
walk.SIZE |= {"width": 64, "height": 48}


OTHERS = {
    "cogvideox-1.0-i2v": {"denoise": 0.5},  # from its highest noise level, 4519, float32 alone leaves 1e-4
    "flux2-edit-zero": {"cfg": 1.0},  # two prompts with guidance fail in ComfyUI
}


def walked(node: str, absent: str = ""):
    return lambda case, prompts: walk.conditioned(node, case, absent, prompts)


def image_to_video(case: str, prompts: dict):
    """CogVideoX 1.0, which is given its image by InstructPixToPixConditioning."""
    node = importlib.import_module("comfy_extras.nodes_ip2p").InstructPixToPixConditioning
    made = node.execute(
        **prompts, vae=walk.value("VAE", "vae", case), pixels=walk.value("IMAGE", "pixels", case)
    )
    return *made.args[:2], {"samples": torch.zeros(1, 16, 3, 14, 18)}  # the image's in latent pixels


def at_timestep_0(case: str, prompts: dict):
    """A reference whose tokens are modulated by timestep 0."""
    given = importlib.import_module("comfy_extras.nodes_edit_model").ReferenceLatent
    placed = importlib.import_module("comfy_extras.nodes_flux").FluxKontextMultiReferenceLatentMethod
    latent = variants.VARIANTS[case].arguments["ref_latents.0"]
    empty = {"samples": torch.zeros_like(latent)}
    made = [given.execute(prompt, {"samples": latent}).args[0] for prompt in prompts.values()]
    return *(placed.execute(each, "index_timestep_zero").args[0] for each in made), empty


def smaller_guides(*audio: int):
    """Two images at a reference_downscale_factor of 2, one of them weighed, for a video, and its audio of
    shape ``audio``."""

    def conditioned(case: str, prompts: dict):
        nodes = importlib.import_module("comfy_extras.nodes_lt")
        latent = {"samples": torch.zeros(1, 128, 2, 4, 6)}
        given = {"vae": walk.images.Encoder(128, 32, 8), "iclora_parameters": {FACTOR: 2}}
        weighed = {"strength": 0.7, "attention_mask": walk.value("MASK", "mask", case)}
        for frame, weight in ((0, {"strength": 1.0}), (-1, weighed)):
            image = walk.value("IMAGE", "i" * (frame + 2), case)
            inputs = given | prompts | {"latent": latent, "image": image, "frame_idx": frame}
            *both, latent = nodes.LTXVAddGuide.execute(**inputs, **weight).args
            prompts = dict(zip(prompts, both))
        if audio:
            audio_latent = {"samples": torch.zeros(audio)}
            (latent,) = nodes.LTXVConcatAVLatent.execute(latent, audio_latent).args
        return *prompts.values(), latent

    return conditioned


def plain(*shape: int):
    return lambda case, prompts: (*prompts.values(), {"samples": torch.zeros(shape)})


#: Variant -> (positive, negative, latent) of its prompts.
GOLDENS = {
    "wan21-fun-control": walked("WanFunControlToVideo"),
    "wan21-fun-camera": walked("WanCameraImageToVideo"),
    "wan22-animate": walked("WanAnimateToVideo", "face_video"),  # of which an image is 3 MB
    "qwen-image-layered": walked("ReferenceLatent"),
    "flux2-edit-zero": at_timestep_0,
    "krea2-style": at_timestep_0,
    "cogvideox-1.0-i2v": image_to_video,
    "hunyuan-video15-meanflow": plain(1, 32, 3, 10, 11),
    "hunyuan-video15-sr": walked("HunyuanVideo15SuperResolution"),
    "ltxv-smaller-guides": smaller_guides(),
    "ltx25-smaller-guides": smaller_guides(1, 8, 9, 16),
}


def make(name: str, path: Path):
    """Write the golden file of a variant, whose checkpoint goes to ``path``."""
    model, dit, rank, prompts = walk.both(name, path)
    walk.remote_solver.ensure_loaded = lambda handle: (rank, dit.loaded)

    def inputs() -> dict:
        made = dict(zip(("positive", "negative", "latent_image"), GOLDENS[name](name, prompts)))
        return made | SETTINGS | OTHERS.get(name, {})

    with torch.inference_mode():
        (theirs,) = walk.nodes.KSampler().sample(model=model, **inputs())
        walk.remote_solver.sample_on_ranks("KSampler", dit, 0.0, inputs())
        latents = walk.parts(theirs["samples"])
        samples = model.model.latent_format.process_in(latents[0])
    (request,) = rank.requests
    if len(latents) > 1:
        samples = torch.cat([latent.flatten(1)[:, None] for latent in latents], dim=2)
    if "denoise_mask" in request.tensors:  # ComfyUI leaves noise in the gaps of guides, which nothing reads
        samples = samples * (request.tensors["denoise_mask"] >= 0)
    variants.write_golden(name, request, samples)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        for each in NAMES or GOLDENS:
            make(each, Path(folder) / f"{each}.safetensors")
            print(json.dumps(each))
