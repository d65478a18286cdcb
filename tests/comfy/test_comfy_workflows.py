"""The bundled workflows, queued in a real ComfyUI: tiny checkpoints under the names of the real ones, and
encoders without weights."""

import json
import os
import re

import pipeline_folders
import pytest
from comfy_server import PACK
from loras import write_lora
from PIL import Image
from quantized import ANY_MATRIX, write_scaled
from safetensors.torch import save_file
from tiny import GOLDEN, facts, weights_module
from versions import skip_without, skip_without_nodes
from wan_variants import IMAGE_EMBEDDER, WAN_36

NAMES = sorted(path.stem for path in (PACK / "workflows" / "api").glob("*.json"))
#: Loaders that would read gigabytes -> what stands in for them.
TEXT, VIDEO_TEXT = (
    ("TestText", {"width": 64, "pooled": 32, "rows": 12}),
    ("TestText", {"width": 4096, "pooled": 32, "rows": 512}),
)
STAND_INS = {
    "flux": {"DualCLIPLoader": TEXT, "VAELoader": ("TestVae", {"video": False})},
    "wan": {
        "CLIPLoader": VIDEO_TEXT,
        "VAELoader": ("TestVae", {"video": True}),
        "CLIPVisionLoader": ("TestVision", {}),
    },
}
#: Start of a workflow's name -> the golden family whose tiny checkpoint and prompt stand in for the released
#: ones.
TINY = {
    "sd35": "sd3",
    "pixart_sigma": "pixart-sigma",
    "hunyuan_dit": "hunyuan-dit",
    "chroma": "chroma",
    "qwen_image21": "qwen-image21",
    "qwen_image_": "qwen-image",
    "flux_kontext": "flux-dev",
    "z_image": "z-image-turbo",
    "krea2": "krea2",
    "flux2": "flux2-dev",
    "lumina2": "lumina2",
    "hidream": "hidream",
    "kandinsky5": "kandinsky5",
    "hunyuan_video_": "hunyuan-video",
    "hunyuan_video15": "hunyuan-video15",
    "cogvideox": "cogvideox",
    "ltxv": "ltxv",
    "ltx2_": "ltx2",
    "ltx23": "ltx23",
    "ltx25": "ltx23",
    "minimax_h3": "minimax-h3",
    "ideogram4": "ideogram4",
}
#: Start of a workflow's name whose encoders are a folder's -> the tiny pipeline that stands in for it,
#: encoders and all.
FOLDERS = {"sana": "SanaPipeline", "flux3": "Flux3ModularPipeline"}
LOADERS = (
    "CLIPLoader",
    "DualCLIPLoader",
    "TripleCLIPLoader",
    "QuadrupleCLIPLoader",
    "LTXAVTextEncoderLoader",
)
#: Family whose video has audio -> its latent: channels, and frequencies where it has them.
AUDIO = {
    **dict.fromkeys(("ltx2", "ltx23"), {"channels": 8, "frequencies": 16}),
    "minimax-h3": {"channels": 32},
}
#: Input -> value that keeps a run short; a step of the graph is scaled with them.
SMALL = {
    "width": 128,
    "height": 128,
    "resolution": 128,
    "length": 9,
    "frames_number": 9,
    "steps": 4,
    "device": "cpu",
}
#: Noise levels that are written out, for as many steps.
SIGMAS = "1.0, 0.9, 0.7, 0.4, 0.0"
#: Family whose latents are smaller -> pixels to one of them, and their channels.
SCALES, CHANNELS = (
    {"flux2-dev": 16, "ltx2": 32, "ltx23": 32, "qwen-image21": 16},
    {"flux2-dev": 128, "ltx2": 128, "ltx23": 128, "qwen-image21": 64},
)
#: Widths that a node takes at least.
MIN_SIZE = {"Ideogram4Scheduler": 256}
WAN_IMAGE = WAN_36 | IMAGE_EMBEDDER


#: Part of a file's name -> how its matrices are stored; plain float8 has no scales.
QUANTIZED = {"int8_convrot": "int8_tensorwise", "fp8_scaled": "float8_e4m3fn", "fp8_e4m3fn": "plain float8"}


#: Workflows that run on four ranks here -> their degrees.
FOUR_RANKS = {
    "wan21_i2v": {"cfg_degree": 2, "ulysses_degree": 2},
    "wan21_t2v": {"cfg_degree": 2, "ulysses_degree": 2},
    "wan22_t2v_two_stage": {"cfg_degree": 2, "pipefusion_degree": 2},
}


def read(name: str) -> dict:
    """The workflow with degrees in the place of auto, which would be one rank on the CPU (test_auto.py)."""
    graph = json.loads((PACK / "workflows" / "api" / f"{name}.json").read_text())
    (config,) = nodes_of(graph, "ParallelConfig")
    if config["inputs"].get("method") == "auto":
        one_prompt = any(node["inputs"].get("cfg") == 1.0 for node in graph.values())
        method = "ulysses_degree" if one_prompt or nodes_of(graph, "ParallelModel") else "cfg_degree"
        config["inputs"] |= FOUR_RANKS.get(name, {method: 2})
    return graph


def nodes_of(graph: dict, kind: str) -> list[dict]:
    return [node for node in graph.values() if node["class_type"].startswith(kind)]


def family_of(name: str) -> str:
    return next(
        (family for start, family in {**TINY, **FOLDERS}.items() if name.startswith(start)),
        "wan" if name.startswith("wan") else "flux",
    )


def stand_ins(family: str, scale: int) -> dict:
    """Loader -> what stands in for it. ``scale``: pixels to one of the latent; the edits' own nodes make
    images of a million pixels, which 64 keeps small."""
    if family in STAND_INS:
        return STAND_INS[family]
    golden = {"file": str(GOLDEN / f"{family}__euler_simple.safetensors")}
    image = {
        "video": family in ("qwen-image", "ltx2", "ltx23"),
        "scale": scale,
        "channels": CHANNELS.get(family, 16),
    }
    return dict.fromkeys(
        LOADERS, ("TestTextWithImages" if family == "qwen-image21" else "TestGoldenText", golden)
    ) | {
        "CheckpointLoaderSimple": ("TestCheckpoint", golden | image),
        "VAELoader": ("TestVae", image),
        "LTXVAudioVAELoader": ("TestAudioVae", AUDIO.get(family, {})),
    }


def stand_in(graph: dict, family: str, scale: int = 8) -> dict:
    """The graph at a small size, with loaders of encoders replaced and on two ranks of the CPU."""
    replaced = stand_ins(family, scale)
    for node in graph.values():
        inputs = node["inputs"]
        share = SMALL["steps"] / inputs["steps"] if "steps" in inputs else 1
        for key in ("start_at_step", "end_at_step"):
            if inputs.get(key, 10000) < 10000:
                inputs[key] = int(inputs[key] * share)
        small = SMALL | ({"megapixels": 0.02} if family == "flux2-dev" else {})
        inputs |= {
            key: value
            for key, value in small.items()
            if key in inputs
            and not isinstance(inputs[key], list)
            or node["class_type"] == "ParallelConfig"
            and key == "device"
        }
        inputs |= {"sigmas": SIGMAS} if node["class_type"] == "ManualSigmas" else {}
        inputs |= {
            key: MIN_SIZE[node["class_type"]] for key in ("width", "height") if node["class_type"] in MIN_SIZE
        }
        if "audio" in inputs.get("vae_name", ""):
            node["class_type"], node["inputs"] = "TestAudioVae", AUDIO[family]
        elif node["class_type"] in replaced:
            node["class_type"], node["inputs"] = replaced[node["class_type"]]
        if node["class_type"] == "LTXVLatentUpsampler":  # its model has a gigabyte
            scaled = {"samples": inputs["samples"], "upscale_method": "nearest-exact", "scale_by": 2.0}
            node["class_type"], node["inputs"] = "LatentUpscaleBy", scaled
        if (
            not inputs.get("model_name", ".safetensors").endswith(".safetensors")
            and family not in FOLDERS.values()
        ):  # a folder of diffusers
            inputs["model_name"] += ".safetensors"
    return graph


def write_tiny(path, family: str):
    """A tiny checkpoint under the name of a real one: other weights for every name."""
    shapes = facts({"flux": "flux-dev", "wan": "wan21-t2v"}.get(family, family))["shapes"] | (
        WAN_IMAGE if "i2v" in path.name else {}
    )
    state = weights_module().state_dict(shapes)
    if "low_noise" in path.name:
        state = {key: value.flip(0) for key, value in state.items()}
    state = {key: value.contiguous() for key, value in state.items()}
    stored = next((kind for ending, kind in QUANTIZED.items() if ending in path.name), None)
    if stored:
        write_scaled(path, state, stored, ANY_MATRIX)
    else:
        save_file(state, path)
    os.utime(path, (1e9, 1e9))  # the same file as the last time, which loads nothing again


@pytest.fixture
def files(comfy):
    """files(graph, family): a tiny checkpoint for every model that a graph names, and the image that it
    loads."""
    made = []

    def make(graph, family):
        for node in nodes_of(graph, "LoadDiffusersCLIPVAE"):
            pipeline_folders.write(comfy.folder / "models/diffusers" / node["inputs"]["model_name"], family)
        for node in nodes_of(graph, "LoadParallelDiT") if family not in FOLDERS.values() else []:
            made.append(comfy.folder / "models/diffusion_models" / node["inputs"]["model_name"])
            write_tiny(made[-1], family)
        for node in nodes_of(graph, "ParallelLoRA"):
            made.append(comfy.folder / "models/loras" / node["inputs"]["lora_name"])
            made[-1].parent.mkdir(exist_ok=True)
            shapes = facts({"wan": "wan21-t2v"}.get(family, family))["shapes"]
            write_lora(
                made[-1],
                {k[:-7]: v for k, v in shapes.items() if ANY_MATRIX.search(k) and len(v) == 2},
                "comfyui",
            )
        for node in nodes_of(graph, "LoadImage"):
            made.append(comfy.folder / "input" / node["inputs"]["image"])
            image = Image.linear_gradient("L").resize((128, 128)).convert("RGB")
            image.putalpha(Image.new("L", (128, 128), 255))
            image.paste((0, 0, 0, 0), (0, 64, 128, 128))  # transparent: LoadImage's mask
            image.save(made[-1])

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def image_of(comfy, run) -> bytes:
    image = next(output["images"][0] for output in run.outputs.values() if "images" in output)
    return comfy.fetch(
        f"/view?filename={image['filename']}&type={image['type']}&subfolder={image['subfolder']}"
    )


@pytest.mark.parametrize(
    "config",
    [{}, {"cfg_degree": 1, "ulysses_degree": 2}, {"cfg_degree": 1, "pipefusion_degree": 2}],
    ids=["as it is", "ulysses", "pipefusion"],
)
def test_demo_makes_an_image(comfy, config):
    graph = read("demo")
    nodes_of(graph, "ParallelConfig")[0]["inputs"].update(config)
    run = comfy.run(graph)
    assert run.status == "success", run.message or run.node_errors
    assert run.steps[-1] == (20, 20) and run.previews > 0
    (sampler,) = (key for key, node in graph.items() if node["class_type"] == "ParallelSampler")
    (text,) = run.outputs[sampler]["parallel_dit"]
    # 256 tokens are too few for a third patch
    assert text.startswith("num_pipeline_patch 0: 2 patches\n") == ("pipefusion_degree" in config)
    image = image_of(comfy, run)
    assert image[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(image[16:20], "big") == 256


def degrees(name: str) -> list:
    """Workflows with the same ranks follow each other, so that the ranks start once."""
    (config,) = nodes_of(read(name), "ParallelConfig")
    return sorted((key, value) for key, value in config["inputs"].items() if key.endswith("_degree"))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"demo"}, key=lambda name: (degrees(name), name)))
def test_workflow_makes_an_image(comfy, files, name):
    family = family_of(name)
    graph = stand_in(read(name), family, scale=SCALES.get(family, 64 if "_edit" in name else 8))
    files(graph, family)
    skip_without_nodes(graph, comfy.get("/object_info"))
    run = comfy.run(graph)
    skip_without(re.findall(r"this ComfyUI has no (\w+)", run.message))
    assert run.status == "success", run.message or run.node_errors
    steps = sum(
        min(node["inputs"].get("end_at_step", 4), 4) - node["inputs"].get("start_at_step", 0)
        for node in nodes_of(graph, "ParallelSampler")
        or [node for node in graph.values() if "steps" in node["inputs"]]
    )
    done = [(value, most) for value, most in run.steps if most <= 4]  # a slow load tells of its bytes
    passes = 1 + len(nodes_of(graph, "LatentUpscaleBy"))
    assert len(done) == steps == 4 * passes
    assert sum(most for value, most in done if value == most) == 4 * passes
    image = image_of(comfy, run)
    start, kind = {"SaveImage": (1, b"PNG"), "SaveAnimatedWEBP": (8, b"WEBP"), "SaveVideo": (4, b"ftyp")}[
        next(node["class_type"] for node in graph.values() if node["class_type"].startswith("Save"))
    ]
    assert image[start:].startswith(kind)


def test_both_experts_stay_loaded(comfy, files):
    """Two loaders, one backend: the second stage and a second run load nothing."""
    graph = stand_in(read("wan22_t2v_two_stage"), "wan")
    files(graph, "wan")
    assert comfy.run(graph).status == "success"
    log = comfy.log.read_text(errors="replace")
    ranks = comfy.descendants("backend.worker").keys()
    again = {
        key: {
            **node,
            "inputs": {**node["inputs"], **({"noise_seed": 8} if "noise_seed" in node["inputs"] else {})},
        }
        for key, node in graph.items()
    }
    run = comfy.run(again)
    assert run.status == "success" and len(run.steps) == 4
    loaders = {key for key, node in graph.items() if node["class_type"] == "LoadParallelDiT"}
    assert loaders <= set(run.cached) and comfy.descendants("backend.worker").keys() == ranks
    assert "starting" not in comfy.log.read_text(errors="replace").removeprefix(log)
