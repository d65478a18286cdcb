"""Builds the graph of a workflow from its recipe, as ComfyUI's /prompt takes it."""

import json
from pathlib import Path

from workflow_recipes import RECIPES, WRITTEN, note_of

PHOTO = "a lighthouse on a cliff at dusk, long exposure of the sea, warm light in one window"
CLIP_SCENE = "a red fox trots through fresh snow at sunrise, camera follows from the side"
EDIT = "Make it a snowy winter evening, keep everything else as it is."
SPOKEN_SCENE = (
    "a close-up of an old clockmaker at his bench, he lifts a small brass gear to the light "
    'and says: "Listen, it breathes." Soft ticking from many clocks fills the room'
)
#: Input that a node feeds -> its title, where the graph alone is kept.
TITLES = {"positive": "Positive", "negative": "Negative"}
API = Path(__file__).resolve().parents[1] / "workflows/api"


def written(name: str) -> tuple[str, str, dict]:
    """Return what ``graph_of`` does, of a graph that is kept as it is; prompts get titles."""
    graph = json.loads((API / f"{name}.json").read_text())
    for node in graph.values():
        for key, title in TITLES.items():
            link = node["inputs"].get(key)
            fed = graph[link[0]] if isinstance(link, list) else {}
            if fed.get("class_type") in ("CLIPTextEncode", "ConditioningZeroOut"):
                unused = " (unused at cfg 1.0)" if fed["class_type"] == "ConditioningZeroOut" else ""
                fed["_meta"] = {"title": title + unused}
    return *WRITTEN[name], graph


def graph_of(name: str) -> tuple[str, str, dict]:
    """(title, note, the graph as /prompt takes it, with titles under ``_meta``); nodes are numbered from 2,
    after the note."""
    if name in WRITTEN:
        return written(name)
    recipe, graph = RECIPES[name], {}

    def add(kind: str, title: str | None = None, **inputs) -> str:
        key = str(len(graph) + 2)
        graph[key] = {"class_type": kind, "inputs": inputs} | ({"_meta": {"title": title}} if title else {})
        return key

    is_video, settings = "fps" in recipe, recipe["solve"]
    checkpoint = (
        add("CheckpointLoaderSimple", ckpt_name=recipe["checkpoint"]) if "checkpoint" in recipe else None
    )
    folder = (
        None
        if "clip" in recipe or checkpoint
        else add("LoadDiffusersCLIPVAE", model_name=recipe["model"], device="default")
    )
    clip_ = (
        [folder, 0]
        if folder
        else [add(recipe["clip"][0], **recipe["clip"][1]), 0]
        if "clip" in recipe
        else [checkpoint, 1]
    )
    if "tokens" in recipe:
        clip_ = [add(recipe["tokens"][0], clip=clip_, **recipe["tokens"][1]), 0]
    config = add("ParallelConfig", None, gpus="", method="auto")
    vae = (
        [folder, 1]
        if folder
        else [add("VAELoader", vae_name=recipe["vae"]), 0]
        if "vae" in recipe
        else [checkpoint, 2]
    )
    audio_vae = [add(recipe["audio"][0], **recipe["audio"][1]), 0] if "audio" in recipe else None
    loaded_image = None
    if "image" in recipe:
        loaded_image = [add("LoadImage", image="example.png"), 0]
        loaded_image = (
            [add(recipe["image"][0], image=loaded_image, **recipe["image"][1]), 0]
            if recipe["image"]
            else loaded_image
        )
    if "first_frame" in recipe:
        size, compression = recipe["first_frame"]
        scaled = [
            add(
                "ImageScale",
                image=[add("LoadImage", image="example.png"), 0],
                upscale_method="lanczos",
                crop="center",
                **size,
            ),
            0,
        ]
        loaded_image = [add("LTXVPreprocess", image=scaled, img_compression=compression), 0]

    def load(name):
        return [
            add(
                "LoadParallelDiT", config=[config, 0], model_name=name, weight_dtype="default", matmul="auto"
            ),
            0,
        ]

    def with_lora(dit: list, name: str, strength: float) -> list:
        return [add("ParallelLoRA", dit=dit, lora_name=name, strength=strength), 0]

    dit = load(recipe["model"])
    dit = with_lora(dit, *recipe["lora"]) if "lora" in recipe else dit

    def prompt(text: str, title: str, clip_: list = clip_) -> list:
        encode = recipe.get("encode", "CLIPTextEncode")
        inputs = {
            "CLIPTextEncode": {"text": text},
            "CLIPTextEncodeLumina2": {"system_prompt": "superior", "user_prompt": text},
            "TextEncodeQwenImageEdit": {"prompt": text, "vae": vae, "image": loaded_image},
        }[encode]
        return [add(encode, title, clip=clip_, **inputs), 0]

    is_edit = "image" in recipe
    text = SPOKEN_SCENE if "audio" in recipe else EDIT if is_edit else CLIP_SCENE if is_video else PHOTO
    if recipe.get("encode") == "MiniMaxH3ImageToVideo":
        made = add(
            "MiniMaxH3ImageToVideo", "Positive", clip=clip_, vae=vae, prompt=text, **recipe["latent"][1]
        )
        plain, latent = [made, 0], [made, 1]
    elif recipe.get("encode") == "TextEncodeQwenImage21":
        seen = {"vae": vae, "images.image_1": loaded_image} if is_edit else {}
        made = add(
            "TextEncodeQwenImage21",
            "Prompts",
            clip=clip_,
            prompt=text,
            negative_prompt="",
            resolution=1024,
            **seen,
        )
        plain, latent = [made, 0], [made, 2] if is_edit else None
    else:
        plain, latent = (
            prompt(text, "Positive"),
            [add("VAEEncode", pixels=loaded_image, vae=vae), 0] if is_edit else None,
        )
    positive, size = plain, {}
    if is_edit and "encode" not in recipe:
        positive = [add("ReferenceLatent", conditioning=positive, latent=latent), 0]
    if is_edit and "latent" in recipe:
        measured = add("GetImageSize", image=loaded_image)
        latent, size = None, {"width": [measured, 0], "height": [measured, 1]}
    if "guidance" in recipe:
        positive = [add("FluxGuidance", conditioning=positive, guidance=recipe["guidance"]), 0]
    if recipe.get("encode") == "TextEncodeQwenImage21":
        negative = [made, 1]
    elif "negative" in recipe:
        negative = prompt(recipe["negative"], "Negative", [folder, 2] if folder else clip_)
    else:
        negative = [
            add(
                "ConditioningZeroOut",
                "Negative" if settings["cfg"] != 1.0 else "Negative (unused at cfg 1.0)",
                conditioning=plain,
            ),
            0,
        ]
    if "rate" in recipe:
        both = add("LTXVConditioning", positive=positive, negative=negative, frame_rate=recipe["rate"])
        positive, negative = [both, 0], [both, 1]
    if latent is None:
        kind, size = recipe["latent"][0], recipe["latent"][1] | size
        if kind == "Kandinsky5ImageToVideo":
            made = add(kind, positive=positive, negative=negative, vae=vae, **size)
            positive, negative, latent = [made, 0], [made, 1], [made, 2]
        else:
            latent = [add(kind, **size), 0]
    if "first_frame" in recipe:
        latent = [
            add(
                "LTXVImgToVideoInplace",
                vae=vae,
                image=loaded_image,
                latent=latent,
                strength=1.0,
                bypass=False,
            ),
            0,
        ]
    if audio_vae and "rate" in recipe:
        audio = [
            add(
                "LTXVEmptyLatentAudio",
                audio_vae=audio_vae,
                frames_number=recipe["latent"][1]["length"],
                frame_rate=recipe["rate"],
                batch_size=1,
            ),
            0,
        ]
        latent = [add("LTXVConcatAVLatent", video_latent=latent, audio_latent=audio), 0]
    sampled = sample(add, recipe, load, dit, positive, negative, latent, size)
    images, heard = sampled, sampled
    if audio_vae and "rate" in recipe:
        both = add("LTXVSeparateAVLatent", av_latent=sampled)
        images, heard = [both, 0], [both, 1]
    images = [add("VAEDecode", samples=images, vae=vae), 0]
    prefix = f"parallel-{name.rsplit('_', 1)[0].replace('_', '-')}"
    if audio_vae:
        audio = [
            add("LTXVAudioVAEDecode", samples=heard, audio_vae=audio_vae)
            if "rate" in recipe
            else add("VAEDecodeAudio", samples=heard, vae=audio_vae),
            0,
        ]
        add(
            "SaveVideo",
            video=[add("CreateVideo", images=images, audio=audio, fps=recipe["fps"]), 0],
            filename_prefix=prefix,
            **{"format": "auto", "format.codec": "auto"},
        )
    elif is_video:
        add(
            "SaveAnimatedWEBP",
            images=images,
            filename_prefix=prefix,
            fps=recipe["fps"],
            lossless=False,
            quality=85,
            method="default",
        )
    else:
        add("SaveImage", images=images, filename_prefix=prefix)
    return recipe["title"], note_of(recipe), graph


def two_stages(add, settings: dict, wired: dict, low: list) -> list:
    """The first half of the steps by one model, and the second by ``low``."""
    half = settings["steps"] // 2
    common = {key: settings[key] for key in ("steps", "cfg", "sampler_name", "scheduler")}
    first = add(
        "ParallelSamplerAdvanced",
        **wired,
        add_noise="enable",
        noise_seed=7,
        **common,
        start_at_step=0,
        end_at_step=half,
        return_with_leftover_noise="enable",
        shift=settings["shift"],
    )
    second = add(
        "ParallelSamplerAdvanced",
        **wired | {"dit": low, "latent_image": [first, 0]},
        add_noise="disable",
        noise_seed=0,
        **common,
        start_at_step=half,
        end_at_step=10000,
        return_with_leftover_noise="disable",
        shift=settings["shift"],
    )
    return [second, 0]


def sample(
    add, recipe: dict, load, dit: list, positive: list, negative: list, latent: list, size: dict
) -> list:
    """The sampler of a recipe and what it takes besides prompts and latent; ``size``: links to an image's
    width and height, where the latent has them."""
    settings, wired = (
        recipe["solve"],
        {"dit": dit, "positive": positive, "negative": negative, "latent_image": latent},
    )
    if "low_noise" in recipe:
        model, lora = recipe["low_noise"]
        low = [add("ParallelLoRA", dit=load(model), lora_name=lora, strength=1.0), 0]
        return two_stages(add, settings, wired, low)
    if "sigmas" not in recipe:
        return [add("ParallelSampler", **wired, seed=7, **settings), 0]
    kind, more = recipe["sigmas"]
    noise = [add("RandomNoise", noise_seed=7), 0]
    sigmas = [
        add(
            kind,
            **more
            | {
                "LTXVScheduler": {"latent": latent},
                "Flux2Scheduler": {key: size[key] for key in ("width", "height") if key in size},
            }.get(kind, {}),
        ),
        0,
    ]
    if "second_model" not in recipe:
        return [
            add(
                "ParallelSamplerCustom",
                **wired,
                noise=noise,
                sigmas=sigmas,
                **{key: settings[key] for key in ("cfg", "sampler_name", "shift")},
            ),
            0,
        ]
    other, override = recipe["second_model"]
    models = [[add("ParallelModel", dit=one), 0] for one in (dit, load(other))]
    guider = add(
        "DualModelGuider",
        model=[add("CFGOverride", model=models[0], **override), 0],
        model_negative=models[1],
        positive=positive,
        negative=negative,
        cfg=settings["cfg"],
    )
    solver = [add("KSamplerSelect", sampler_name=settings["sampler_name"]), 0]
    return [
        add(
            "SamplerCustomAdvanced",
            noise=noise,
            guider=[guider, 0],
            sampler=solver,
            sigmas=sigmas,
            latent_image=latent,
        ),
        0,
    ]
