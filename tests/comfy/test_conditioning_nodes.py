"""ComfyUI's conditioning nodes input by input: with all that is optional, without each, and without any, the
latent is KSampler's own of the same CONDITIONING. The inputs are read from the nodes' own schemas."""

import asyncio
import importlib
import inspect

import pytest
import torch
import variants
from comfy_modules import ROOT, comfy_modules
from safetensors.torch import load_file
from tiny import GOLDEN, facts, write_checkpoint
from versions import skip_without_class

with comfy_modules():
    import golden_pack.images as images
    import native
    from comfy.nested_tensor import NestedTensor
    from golden_pack import TestGoldenText
    from native import ParallelDiT, Rank, client_protocol, remote_solver, weightless_patcher
    from pairs import _conditioning, parts
    from parallel_dit.backend.client.auto.model_choice import ModelChoice
    from parallel_dit.backend.config import ParallelConfig

    import nodes

#: Cases that are golden families, and no variants.
FAMILIES = ("wan21-vace", "kandinsky5")
#: Type of inputs that take a dictionary of any number of others.
GROWING = "COMFY_AUTOGROW_V3"
#: Types of inputs for which ``value`` has something.
LINKS = (
    "IMAGE",
    "MASK",
    "VAE",
    "CLIP_VISION_OUTPUT",
    "WAN_CAMERA_EMBEDDING",
    "LATENT",
    "TRACKS",
    "AUDIO",
    "IC_LORA_PARAMETERS",
    GROWING,
)
#: Types that a person sets in the node itself.
WIDGETS = {"INT", "FLOAT", "BOOLEAN", "STRING", "COMBO"}
#: Sides and frames of every video, where the node asks for them.
SIZE = {"width": 144, "height": 112, "length": 9, "batch_size": 1, "strength": 0.8}
MINIMAX_SIZE = {"width": 96, "height": 64, "length": 22, "prompt": "a lantern is lit"}
#: Node, and what tells it apart -> (its file of comfy_extras, its other inputs, the variants or golden
#: families that it is for).
NODES = {
    "WanImageToVideo": ("nodes_wan", {}, ("wan21-i2v", "wan22-i2v")),
    "WanFirstLastFrameToVideo": ("nodes_wan", {}, ("wan21-flf2v", "wan22-i2v")),
    "WanFunInpaintToVideo": ("nodes_wan", {}, ("wan21-i2v",)),
    "WanFunControlToVideo": ("nodes_wan", {}, ("wan21-fun-control",)),
    "Wan22FunControlToVideo": ("nodes_wan", {}, ("wan21-fun-control", "wan22-fun-control")),
    "WanCameraImageToVideo": ("nodes_wan", {}, ("wan21-fun-camera", "wan22-fun-camera")),
    "WanVaceToVideo": ("nodes_wan", {}, ("wan21-vace",)),
    "BerniniConditioning": ("nodes_bernini", {"ref_max_size": 128}, ("wan22-bernini",)),
    "Wan22ImageToVideoLatent": ("nodes_wan", {}, ("wan22-ti2v",)),
    "HunyuanImageToVideo": ("nodes_hunyuan", {"guidance_type": "v1 (concat)"}, ("hunyuan-video-i2v",)),
    "HunyuanImageToVideo v2": (
        "nodes_hunyuan",
        {"guidance_type": "v2 (replace)"},
        ("hunyuan-video-i2v-v2",),
    ),
    "HunyuanVideo15ImageToVideo": ("nodes_hunyuan", {}, ("hunyuan-video15-i2v",)),
    "HunyuanVideo15SuperResolution": (
        "nodes_hunyuan",
        {"noise_augmentation": 0.7},
        ("hunyuan-video15-sr",),
    ),
    "Kandinsky5ImageToVideo": ("nodes_kandinsky5", {}, ("kandinsky5",)),
    "WanTrackToVideo": (
        "nodes_wan",
        {"tracks": '[{"x": 20, "y": 20}, {"x": 90, "y": 60}]', "temperature": 220.0, "topk": 2},
        ("wan21-i2v",),
    ),
    "WanMoveTrackToVideo": ("nodes_wanmove", {}, ("wan21-i2v",)),
    "WanAnimateToVideo": (
        "nodes_wan",
        {"continue_motion_max_frames": 5, "video_frame_offset": 0},
        ("wan22-animate",),
    ),
    "VOIDInpaintConditioning": ("nodes_void", {"length": 13}, ("cogvideox-void",)),
    "LTXVAddGuide": ("nodes_lt", {"frame_idx": 0}, ("ltxv-i2v",)),
    "MiniMaxH3ImageToVideo": ("nodes_minimax_h3", MINIMAX_SIZE, ("minimax-h3-guides",)),
    "MiniMaxH3AddGuide": ("nodes_minimax_h3", {"frame_idx": 0}, ("minimax-h3-guides",)),
    "MiniMaxH3ReferenceToVideo": (
        "nodes_minimax_h3",
        MINIMAX_SIZE | {"ref_image_size": "match"},
        ("minimax-h3-guides",),
    ),
    "ReferenceLatent": ("nodes_edit_model", {}, ("flux-kontext", "qwen-image-layered")),
}
#: Conditioning nodes with optional inputs that are not walked -> why.
ELSEWHERE = {
    "WanPhantomSubjectToVideo": "without images the node itself fails; test_variant_graphs.py",
    "TextEncodeQwenImageEdit": "hands on what ReferenceLatent does, after a text encoder",
    "TextEncodeQwenImageEditPlus": "hands on what ReferenceLatent does, after a text encoder",
    "TextEncodeQwenImage21": "test_variant_graphs.py, with images",
    "TextEncodeZImageOmni": "of Z-Image Omni, which is refused",
    "WanSoundImageToVideo": "of Wan S2V, which is refused",
    "WanSoundImageToVideoExtend": "of Wan S2V, which is refused",
    "WanHuMoImageToVideo": "of HuMo, which is refused",
    "WanSCAILToVideo": "of SCAIL, which is refused",
    "WanAnimate2ToVideo": "of Wan Animate 2, which is refused",
    "WanDancerVideo": "of WanDancer, which is refused",
    "WanInfiniteTalkToVideo": "changes MODEL by a model patch, which is refused",
    "TextEncodeJoyImageEdit": "of JoyImage, which is refused",
    "TextEncodeMageFlowEdit": "of Mage-Flow, which is refused",
    "Hunyuan3Dv2ConditioningMultiView": "of a model of shapes",
    "ReferenceTimbreAudio": "of ACE-Step, a model of music",
}
#: (Node, what is absent) that the node itself refuses: a guide of nothing, an image without its VAE.
REFUSED = {("MiniMaxH3AddGuide", absent) for absent in ("*", "vae", "audio_vae")}
REFUSED.add(("HunyuanVideo15SuperResolution", "vae"))
#: Node -> inputs that are left out where another is: each image of a face costs a CPU seconds.
DEAR = {"WanAnimateToVideo": ("face_video",)}
STEPS = {"seed": 5, "steps": 2, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple"}
#: Variant or family -> its VAE (channels, pixels to a latent's side, frames to a latent's), where it is not
#: Wan's.
VAES = {
    "wan22-ti2v": (48, 16, 4),
    "hunyuan-video15-i2v": (32, 16, 4),
    "hunyuan-video15-sr": (32, 16, 4),
    "ltxv-i2v": (128, 32, 8),
    "minimax-h3-guides": (24, 16, 4),
}
#: Variant -> shapes of its latents, where they are not Wan's nor Flux's.
LATENTS = {
    "ltxv-i2v": [(1, 128, 3, 4, 6)],
    "minimax-h3-guides": [(1, 24, 7, 4, 6), (1, 32, 2, 36)],
}
#: Variant -> shape of the enlarged video that it is given.
ENLARGED = {"hunyuan-video15-sr": (1, 32, 3, 7, 9)}


def value(kind: str, name: str, case: str):
    """What is connected to an optional input of a type of ComfyUI's."""
    if kind == GROWING:
        part = name.removesuffix("s")
        return {f"{part}_0": value("AUDIO" if "audio" in name else "IMAGE", part, case)}
    frames = 9 if "video" in name and name != "face_video" else 1  # each of a face costs a CPU seconds
    if kind == "IMAGE":
        return images.TestImage().run(136, 104, frames, len(name))[0]
    if kind == "MASK":
        mask = images.TestMask().run(144, 112)[0]
        return mask.expand(9, -1, -1) if name == "quadmask" else mask  # of a video
    if kind == "VAE":
        if name == "audio_vae":
            return images.TestAudioVae().run(32)[0]
        return images.Encoder(*VAES.get(case, (16, 8, 4)))
    if kind == "CLIP_VISION_OUTPUT":
        return images.TestClipVision().run(25, 1152 if case.startswith("hunyuan") else 1280, len(name))[0]
    if kind == "WAN_CAMERA_EMBEDDING":
        cameras = importlib.import_module("comfy_extras.nodes_camera_trajectory")
        sides = SIZE["width"], SIZE["height"], SIZE["length"]
        return cameras.WanCameraEmbedding.execute("Pan Left", *sides).args[0]
    if kind == "LATENT":
        shape = (1, 16, 14, 10) if case.startswith("flux") else (1, 16, 1, 14, 10)
        shape = ENLARGED.get(case, shape)
        return {"samples": images.randn(shape, 3)} if case not in LATENTS else empty(case)
    if kind == "CLIP":
        return TestGoldenText().run(str(GOLDEN / "minimax-h3__euler_simple.safetensors"))[0]
    if kind == "AUDIO":
        return {"waveform": torch.zeros(1, 2, 3200), "sample_rate": 16000}
    if kind == "IC_LORA_PARAMETERS":
        return {"reference_downscale_factor": 2}
    if kind == "TRACKS":
        moving = torch.arange(9.0)[:, None, None] * torch.tensor([[8.0, 4.0], [0.0, 8.0]]) + 16.0
        return {"track_path": moving, "track_visibility": torch.ones(9, 2, dtype=torch.bool)}
    raise AssertionError(f"nothing is known of {kind}")


def empty(case: str) -> dict:
    """An empty LATENT of a case."""
    shapes = LATENTS.get(case, [(1, 16, 14, 18) if case.startswith("flux") else (1, 16, 3, 14, 18)])
    latents = [torch.zeros(shape) for shape in shapes]
    return {"samples": NestedTensor(latents) if len(latents) > 1 else latents[0]}


def walks() -> list[tuple[str, str, str]]:
    """(node, variant, optional input that is left out: "" for none, "*" for all)."""
    return [
        (node, case, absent)
        for node, (_, _, cases) in NODES.items()
        for case in cases
        for absent in ["", *(name for name, _ in links(node)), *(["*"] if links(node) else [])]
        if (node, absent) not in REFUSED
    ]


def node_class(node: str):
    return getattr(importlib.import_module(f"comfy_extras.{NODES[node][0]}"), node.partition(" ")[0])


def links(node: str) -> list[tuple[str, str]]:
    """(name, type) of a node's optional inputs that another node gives."""
    schema = node_class(node).define_schema()
    return [(each.id, each.io_type) for each in schema.inputs if each.optional and each.io_type in LINKS]


def conditioned(node: str, case: str, absent: str, prompts: dict) -> tuple[list, list, dict]:
    """Positive, negative and latent of a node without what is ``absent``."""
    schema = node_class(node).define_schema()
    given = SIZE | prompts | NODES[node][1] | {"conditioning": prompts["positive"]}
    values = {
        each.id: given[each.id] if each.id in given else value(each.io_type, each.id, case)
        for each in schema.inputs
        if not each.optional
    }
    left_out = {absent, *DEAR.get(node, ())} if absent else set()
    if absent != "*":
        values |= {name: value(kind, name, case) for name, kind in links(node) if name not in left_out}
    results = list(zip(schema.outputs, node_class(node).execute(**values).args))
    made = [result for output, result in results if output.io_type == "CONDITIONING"]
    latents = [result for output, result in results if output.io_type == "LATENT"]
    positive, negative = [*made, *list(prompts.values())[len(made) :]]
    return positive, negative, (latents or [empty(case)])[0]


def with_optional_inputs() -> set[str]:
    """Names of ComfyUI's nodes that give CONDITIONING and have optional inputs of other nodes."""
    found = set()
    for path in sorted((ROOT / "comfy_extras").glob("nodes_*.py")):
        if "Conditioning.Output" not in path.read_text():
            continue
        for node in asyncio.run(nodes_of(f"comfy_extras.{path.stem}")):
            schema = node.define_schema()
            outputs = {each.io_type for each in schema.outputs}
            optional = {each.io_type for each in schema.inputs if each.optional} - WIDGETS
            if "CONDITIONING" in outputs and optional:
                found.add(schema.node_id)
    return found


async def nodes_of(module: str) -> list[type]:
    """The nodes that a module of ComfyUI's registers."""
    extension = importlib.import_module(module).comfy_entrypoint()
    extension = await extension if inspect.isawaitable(extension) else extension
    return await extension.get_node_list()


def test_every_conditioning_node_is_walked_or_says_why_not():
    """A node of a later ComfyUI than the one this was written for fails here."""
    walked = {node.partition(" ")[0] for node in NODES}
    assert not walked & ELSEWHERE.keys()
    assert with_optional_inputs() <= walked | ELSEWHERE.keys()


def both(case: str, path) -> tuple:
    """ComfyUI's MODEL of a case, written to ``path``, a PARALLEL_DIT of it, its rank and the prompts."""
    told = facts(case) if case in FAMILIES else variants.described(case)
    skip_without_class(told["comfy_class"])
    write_checkpoint(path, case) if case in FAMILIES else variants.write(path, case)
    model = images.TestReferenceModel().run(str(path), native.json.dumps(told))[0]
    rank = Rank(str(path))
    loaded = client_protocol.Loaded("tiny", rank.engine.models["tiny"].family.name, rank.engine.facts("tiny"))
    dit = ParallelDiT(ParallelConfig(), ModelChoice(""), loaded, weightless_patcher(loaded))
    family = case if case in FAMILIES else variants.VARIANTS[case].family
    stored = load_file(GOLDEN / f"{family}__euler_simple.safetensors")
    return model, dit, rank, {name: _conditioning(stored, name) for name in ("positive", "negative")}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(case) -> (ComfyUI's MODEL, a PARALLEL_DIT whose rank is this process, prompts); the last."""
    cached = {}

    def made(case):
        if case not in cached:
            cached.clear()
            cached[case] = both(case, tmp_path_factory.mktemp("model") / "model.safetensors")
        return cached[case]

    return made


@pytest.mark.full
@pytest.mark.parametrize("node, case, absent", walks())
def test_optional_inputs(node, case, absent, models, monkeypatch):
    model, dit, rank, prompts = models(case)
    monkeypatch.setattr(remote_solver, "ensure_loaded", lambda handle: (rank, dit.loaded))

    def inputs() -> dict:  # anew: some of ComfyUI's models change what they are given
        names = ("positive", "negative", "latent_image")
        made = dict(zip(names, conditioned(node, case, absent, prompts)))
        denoise = 0.5 if case.startswith("cogvideox") else 1.0  # float32 alone leaves 1e-4 of sigma 4519
        return {**made, **STEPS, "denoise": denoise}

    with torch.inference_mode():
        (theirs,) = nodes.KSampler().sample(model=model, **inputs())
        (ours,) = remote_solver.sample_on_ranks("KSampler", dit, 0.0, inputs()).args
    found, wanted = parts(ours["samples"]), parts(theirs["samples"])
    masks = parts(theirs["noise_mask"]) if case.startswith("ltx") else [None] * len(wanted)
    for got, want, mask in zip(found, wanted, masks, strict=True):
        got, want = images.in_mask(got, mask), images.in_mask(want, mask)
        assert ((got - want).abs().max() / want.std()).item() < 1e-4
