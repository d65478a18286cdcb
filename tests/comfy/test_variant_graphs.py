"""Variants of the families in graphs of a real ComfyUI: its own conditioning nodes, its own KSampler beside
ParallelSampler, and itself on ParallelModel, on two ranks."""

import json

import pytest
from graphs import SAMPLER, Graph
from tiny import GOLDEN, as_folder, facts
from variants import VARIANTS, described
from variants import write as variants_write
from versions import skip_without, skip_without_nodes


def references(video: bool, method: str = "", negative: bool = False, batch: int = 1, channels: int = 16):
    """Two reference pictures of other sizes, one of odd sides; the latent's sides are odd too."""

    def build(g: Graph, positive, other):
        extra = (1,) if video else ()
        for shape, seed in (((11, 14), 2), ((8, 27), 3)):
            picture = g.latent(1, channels, *extra, *shape, seed=seed)
            positive = g.one("ReferenceLatent", conditioning=positive, latent=picture)
            other = g.one("ReferenceLatent", conditioning=other, latent=picture) if negative else other
        if method:
            positive = g.one(
                "FluxKontextMultiReferenceLatentMethod",
                conditioning=positive,
                reference_latents_method=method,
            )
        return positive, other, g.latent(batch, channels, *extra, 15, 18, empty=True)

    return build


def inpainting(g, positive, negative):
    mask = g.one("TestMask", width=128, height=104)
    return g.three(
        "InpaintModelConditioning",
        positive=positive,
        negative=negative,
        vae=g.vae(temporal=0),
        pixels=g.image(),
        mask=mask,
        noise_mask=True,
    )


def control(g, positive, negative):
    return g.three(
        "InstructPixToPixConditioning",
        positive=positive,
        negative=negative,
        vae=g.vae(temporal=0),
        pixels=g.image(136, 120),
    )


def pictured_video(g, positive, negative):
    positive, negative, _ = g.three(
        "InstructPixToPixConditioning", positive=positive, negative=negative, vae=g.vae(), pixels=g.image()
    )
    return positive, negative, g.latent(1, 16, 3, 15, 18, empty=True)


def layers(pictured: bool):
    """Qwen-Image-Layered's own latent; a picture to be taken apart, or none."""

    def build(g, positive, negative):
        if pictured:
            picture = g.latent(1, 16, 1, 14, 18, seed=2)
            positive, negative = (
                g.one("ReferenceLatent", conditioning=prompt, latent=picture)
                for prompt in (positive, negative)
            )
        size = {"width": 144, "height": 112, "layers": 2, "batch_size": 2}
        return positive, negative, g.one("EmptyQwenImageLayeredLatentImage", **size)

    return build


def encoded(*pictures, shape=None):
    """Qwen-Image 2.1's own node: prompts with pictures of these sizes among their rows, and a latent of the
    first one's size unless its ``shape`` is told."""

    def build(g, positive, negative):
        clip = g.one("TestPicturedText", file=str(GOLDEN / "qwen-image21__euler_simple.safetensors"))
        images = {
            f"images.image_{i}": g.image(width, height, seed=i)
            for i, (width, height) in enumerate(pictures, 1)
        }
        positive, negative, latent = g.three(
            "TextEncodeQwenImage21",
            clip=clip,
            vae=g.vae(64, 16, 0),
            prompt="a winter evening",
            negative_prompt="",
            resolution=128,
            **images,
        )
        return positive, negative, latent if shape is None else g.latent(*shape, empty=True)

    return build


def plain(*shape):
    return lambda g, positive, negative: (positive, negative, g.latent(*shape, empty=True))


def first_frame(node, features=True, vae=None, batch=1, **size):
    def build(g, positive, negative):
        size_of = {"width": 144, "height": 112, "length": 9} | size
        seen = {"clip_vision_output": g.features(width=features)} if features else {}
        return g.three(
            node,
            positive=positive,
            negative=negative,
            vae=g.vae(**(vae or {})),
            start_image=g.image(frames=1),
            batch_size=batch,
            **size_of,
            **seen,
        )

    return build


def first_and_last_frame(g, positive, negative):
    return g.three(
        "WanFirstLastFrameToVideo",
        positive=positive,
        negative=negative,
        vae=g.vae(),
        width=144,
        height=112,
        length=9,
        batch_size=1,
        clip_vision_start_image=g.features(seed=3),
        clip_vision_end_image=g.features(seed=4),
        start_image=g.image(seed=1),
        end_image=g.image(seed=2),
    )


WAN_SIZE = {"width": 144, "height": 112, "length": 9, "batch_size": 1}


WAN_FUN, WAN_FUN_22 = "WanFunControlToVideo", "Wan22FunControlToVideo"


def fun_control(node, features=False, **pictures):
    """Wan Fun Control's nodes; ``pictures``: input -> how many frames are connected."""

    def build(g, positive, negative):
        further = {name: g.image(frames=count, seed=count) for name, count in pictures.items()}
        further |= {"clip_vision_output": g.features()} if features else {}
        return g.three(node, positive=positive, negative=negative, vae=g.vae(), **WAN_SIZE, **further)

    return build


def fun_camera(features=False, pictured=True, moved=True):
    def build(g, positive, negative):
        further = {"clip_vision_output": g.features()} if features else {}
        further |= {"start_image": g.image()} if pictured else {}
        if moved:
            size = {name: WAN_SIZE[name] for name in ("width", "height", "length")}
            further["camera_conditions"] = g.one("WanCameraEmbedding", camera_pose="Pan Left", **size)
        return g.three(
            "WanCameraImageToVideo",
            positive=positive,
            negative=negative,
            vae=g.vae(),
            **WAN_SIZE,
            **further,
        )

    return build


def phantom(negative_output):
    """Frames of subjects after the video; the negative prompt has them too, or empty ones."""

    def build(g, positive, negative):
        node = g.add(
            "WanPhantomSubjectToVideo",
            positive=positive,
            negative=negative,
            vae=g.vae(),
            images=g.image(frames=2),
            **WAN_SIZE,
        )
        return [node, 0], [node, negative_output], [node, 3]

    return build


def bernini(g, positive, negative):
    """A video of the latent's size, another one, and a picture."""
    return g.three(
        "BerniniConditioning",
        positive=positive,
        negative=negative,
        vae=g.vae(),
        **WAN_SIZE,
        ref_max_size=128,
        source_video=g.image(frames=9),
        reference_video=g.image(96, 64, frames=5, seed=2),
        **{"reference_images.reference_image_0": g.image(64, 96, seed=3)},
    )


def vace(*videos):
    """WanVaceToVideo, once for each of ``videos``, which names the inputs that are connected."""

    def build(g, positive, negative):
        latent: list = []
        for seed, inputs in enumerate(videos, 1):
            further = {}
            if "control_video" in inputs:
                further["control_video"] = g.image(frames=9, seed=seed)
            if "control_masks" in inputs:
                further["control_masks"] = g.one("TestMask", width=144, height=112)
            if "reference_image" in inputs:
                further["reference_image"] = g.image(seed=seed)
            positive, negative, latent = g.three(
                "WanVaceToVideo",
                positive=positive,
                negative=negative,
                vae=g.vae(),
                strength=0.5 + 0.4 * seed,
                **WAN_SIZE,
                **further,
            )
        return positive, negative, latent

    return build


def animate(*inputs):
    """WanAnimateToVideo with these of its inputs."""

    def build(g, positive, negative):
        made = {
            "clip_vision_output": lambda: g.features(),
            "reference_image": lambda: g.image(seed=1),
            "face_video": lambda: g.image(frames=9, seed=2),
            "pose_video": lambda: g.image(frames=5, seed=3),  # its last picture is repeated
            "background_video": lambda: g.image(frames=9, seed=4),
            "character_mask": lambda: g.one("TestMask", width=144, height=112),
            "continue_motion": lambda: g.image(frames=5, seed=5),
        }
        return g.three(
            "WanAnimateToVideo",
            positive=positive,
            negative=negative,
            vae=g.vae(),
            continue_motion_max_frames=5,
            video_frame_offset=0,
            **WAN_SIZE,
            **{name: made[name]() for name in inputs},
        )

    return build


def given_frame(g, positive, negative):
    latent = g.one(
        "Wan22ImageToVideoLatent",
        vae=g.vae(48, 16),
        width=288,
        height=224,
        length=9,
        batch_size=2,
        start_image=g.image(288, 224),
    )
    return positive, negative, latent


def hunyuan(kind, batch=1):
    def build(g, positive, negative):
        node = g.add(
            "HunyuanImageToVideo",
            positive=positive,
            vae=g.vae(),
            width=144,
            height=112,
            length=9,
            batch_size=batch,
            guidance_type=kind,
            start_image=g.image(),
        )
        return [node, 0], negative, [node, 1]

    return build


def ltx_image(g, positive, negative):
    return g.three(
        "LTXVImgToVideo",
        positive=positive,
        negative=negative,
        vae=g.vae(128, 32, 8),
        image=g.image(),
        width=224,
        height=160,
        length=17,
        batch_size=2,
        strength=0.8,
    )


def ltx_guides(g, positive, negative):
    vae = g.vae(128, 32, 8)
    latent = g.latent(1, 128, 3, 5, 7, empty=True)
    for frame, seed in ((0, 1), (-1, 2)):
        positive, negative, latent = g.three(
            "LTXVAddGuide",
            positive=positive,
            negative=negative,
            vae=vae,
            latent=latent,
            image=g.image(224, 160, seed=seed),
            frame_idx=frame,
            strength=1.0,
        )
    return positive, negative, latent


def ltx2_image(g, positive, negative):
    """A first frame, and sound with a mask."""
    video = g.one(
        "LTXVImgToVideoInplace",
        vae=g.vae(128, 32, 8),
        image=g.image(),
        latent=g.latent(2, 128, 3, 5, 7, empty=True),
        strength=0.8,
        bypass=False,
    )
    audio = g.one(
        "SetLatentNoiseMask",
        samples=g.latent(2, 8, 9, 16, seed=5),
        mask=g.one("TestMask", width=16, height=9),
    )
    return positive, negative, g.one("LTXVConcatAVLatent", video_latent=video, audio_latent=audio)


def ltx2_guides(g, positive, negative):
    positive, negative, video = ltx_guides(g, positive, negative)
    return (
        positive,
        negative,
        g.one("LTXVConcatAVLatent", video_latent=video, audio_latent=g.latent(1, 8, 9, 16, empty=True)),
    )


def minimax_guides(g, positive, negative):
    """A keyframe at the beginning, and a picture with sound at a later frame; a prompt with a picture in
    it."""
    positive = g.one(
        "TestConditioningValues",
        conditioning=positive,
        values=json.dumps({"minimax_token_tags": [1] * 4 + [0] * 5 + [1] * 3}),
        rows=0,
    )
    latent = g.one(
        "LTXVConcatAVLatent",
        video_latent=g.latent(1, 24, 3, 8, 10, empty=True),
        audio_latent=g.latent(1, 32, 2, 15, empty=True),
    )
    guide = {"vae": g.vae(24, 16, 4), "audio_vae": g.one("TestAudioVae", channels=32), "latent": latent}
    positive = g.one(
        "MiniMaxH3AddGuide", positive=positive, image=g.image(160, 128, seed=1), frame_idx=0, **guide
    )
    audio = g.one("EmptyAudio", duration=0.2, sample_rate=16000, channels=2)
    return (
        g.one(
            "MiniMaxH3AddGuide",
            positive=positive,
            image=g.image(160, 128, seed=2),
            audio=audio,
            frame_idx=4,
            **guide,
        ),
        negative,
        latent,
    )


def minimax_frames(g, positive, negative):
    """A first and a last frame of other sizes, as the model's own node hands them over."""
    clip = g.one("TestGoldenText", file=str(GOLDEN / "minimax-h3__euler_simple.safetensors"))
    node = g.add(
        "MiniMaxH3ImageToVideo",
        clip=clip,
        vae=g.vae(24, 16, 4),
        prompt="a lantern is lit",
        width=160,
        height=128,
        length=22,
        first_frame=g.image(96, 128, seed=1),
        last_frame=g.image(200, 128, seed=2),
    )
    return [node, 0], negative, [node, 1]


def minimax_references(g, positive, negative):
    """Pictures, a video with its sound and sound alone, as the model's own node hands them over."""
    clip = g.one("TestGoldenText", file=str(GOLDEN / "minimax-h3__euler_simple.safetensors"))
    audio = g.one("EmptyAudio", duration=0.2, sample_rate=16000, channels=2)
    node = g.add(
        "MiniMaxH3ReferenceToVideo",
        clip=clip,
        vae=g.vae(24, 16, 4),
        audio_vae=g.one("TestAudioVae", channels=32),
        prompt="<Picture 1>",
        width=160,
        height=128,
        length=5,
        ref_image_size="match",
        **{
            "ref_images.ref_image_0": g.image(96, 128, seed=1),
            "ref_videos.ref_video_0": g.image(96, 64, frames=5, seed=2),
            "ref_video_audios.ref_video_audio_0": audio,
            "ref_audios.ref_audio_0": audio,
        },
    )
    return [node, 0], negative, [node, 1]


def with_values(build, **values):
    """``values`` set on both prompts."""

    def changed(g, positive, negative):
        return build(
            g,
            *(
                g.one("TestConditioningValues", conditioning=prompt, values=json.dumps(values), rows=0)
                for prompt in (positive, negative)
            ),
        )

    return changed


#: Name -> (variant, what makes positive, negative and latent of two prompts, rows of the negative prompt
#: where they are not 7).
GRAPHS = {
    "kontext, offset": ("flux-kontext", references(False, negative=True, batch=2)),
    "kontext, index": ("flux-kontext", references(False, "index")),
    "kontext, uxo": ("flux-kontext", references(False, "uxo/uno")),
    "fill": ("flux-fill", inpainting),
    "canny": ("flux-canny", control),
    "schnell": ("flux-schnell", plain(1, 16, 15, 18)),
    "flux.2, index": ("flux2-edit", references(False, negative=True, batch=2, channels=128)),
    "flux.2, offset": ("flux2-edit", references(False, "offset", channels=128)),
    "flux.2, uxo": ("flux2-edit", references(False, "uxo/uno", channels=128)),
    "qwen edit": ("qwen-image-edit", references(True, negative=True)),
    "qwen edit, offset": ("qwen-image-edit", references(True, "offset")),
    "qwen edit 2511": ("qwen-image-edit-2511", references(True, batch=2)),
    "qwen edit 2511, index": ("qwen-image-edit-2511", references(True, "index")),
    "qwen layered": ("qwen-image-layered", layers(pictured=True)),
    "qwen layered, text to layers": ("qwen-image-layered", layers(pictured=False)),
    "qwen 2.1": ("qwen-image21-edit", encoded(shape=(2, 64, 8, 10))),
    "qwen 2.1, odd sides": ("qwen-image21-edit", encoded(shape=(1, 64, 15, 9))),
    "qwen 2.1, a picture": ("qwen-image21-edit", encoded((128, 96))),
    "qwen 2.1, two pictures": ("qwen-image21-edit", encoded((128, 96), (96, 160), shape=(2, 64, 7, 9))),
    "qwen 2.1, other references": ("qwen-image21-edit", references(False, channels=64, negative=True)),
    "krea 2, reference": ("krea2-edit", references(True, "index")),
    "wan 2.1 i2v": ("wan21-i2v", first_frame("WanImageToVideo", 1280, batch=2)),
    "wan 2.1 flf2v": ("wan21-flf2v", first_and_last_frame),
    "wan 2.2 i2v": ("wan22-i2v", first_frame("WanImageToVideo", None)),
    "wan 2.2 i2v without picture": ("wan22-i2v", plain(1, 16, 3, 15, 18)),
    "wan 2.2 ti2v": ("wan22-ti2v", given_frame),
    "wan 2.2 ti2v without picture": ("wan22-ti2v", plain(1, 48, 3, 15, 18)),
    "wan fun control": ("wan21-fun-control", fun_control(WAN_FUN, True, start_image=1, control_video=9)),
    "wan fun control without anything": ("wan21-fun-control", fun_control(WAN_FUN)),
    "wan fun control, reference": ("wan21-fun-control", fun_control(WAN_FUN_22, ref_image=1)),
    "wan 2.2 fun control": ("wan22-fun-control", fun_control(WAN_FUN_22, ref_image=1, control_video=9)),
    "wan 2.2 fun control without anything": ("wan22-fun-control", fun_control(WAN_FUN_22)),
    "wan fun camera": ("wan21-fun-camera", fun_camera(features=True)),
    "wan fun camera that stays": ("wan21-fun-camera", fun_camera(moved=False)),
    "wan 2.2 fun camera": ("wan22-fun-camera", fun_camera()),
    "wan 2.2 fun camera without picture": ("wan22-fun-camera", fun_camera(pictured=False)),
    "wan phantom": ("wan21-phantom", phantom(1)),
    "wan phantom, empty subjects": ("wan21-phantom", phantom(2)),
    "wan bernini": ("wan22-bernini", bernini),
    "wan vace": ("wan21-vace", vace(("control_video", "control_masks", "reference_image"))),
    "wan vace, text to video": ("wan21-vace", plain(2, 16, 3, 16, 18)),
    "wan vace without anything": ("wan21-vace", vace(())),
    "wan vace, two videos": ("wan21-vace-two", vace(("control_video",), ("control_video", "control_masks"))),
    "wan animate": (
        "wan22-animate",
        animate("clip_vision_output", "reference_image", "face_video", "pose_video"),
    ),
    "wan animate, a character replaced": (
        "wan22-animate",
        animate("reference_image", "face_video", "background_video", "character_mask", "continue_motion"),
    ),
    "wan animate without anything": ("wan22-animate", animate()),
    "hunyuan-video i2v": ("hunyuan-video-i2v", hunyuan("v1 (concat)")),
    "hunyuan-video i2v, v2": ("hunyuan-video-i2v-v2", hunyuan("v2 (replace)", 2)),
    "hunyuan-video 1.5 i2v": (
        "hunyuan-video15-i2v",
        first_frame("HunyuanVideo15ImageToVideo", 1152, {"channels": 32, "spatial": 16}),
    ),
    "hunyuan-video 1.5, meanflow": ("hunyuan-video15-meanflow", plain(2, 32, 3, 10, 11)),
    "hunyuan-image 2.1, distilled": ("hunyuan-image21-distilled", plain(1, 64, 9, 11)),
    "ltxv i2v": ("ltxv-i2v", ltx_image),
    "ltxv guides": ("ltxv-i2v", ltx_guides),
    "ltx2 i2v": ("ltx2-i2v", ltx2_image),
    "ltx2.5 guides": ("ltx25-i2v", ltx2_guides),
    "minimax-h3 guides": ("minimax-h3-guides", minimax_guides),
    "minimax-h3 first and last frame": ("minimax-h3-guides", minimax_frames),
    "minimax-h3 references": ("minimax-h3-guides", minimax_references),
    "cogvideox i2v": ("cogvideox-i2v", pictured_video),
    "cogvideox 1.0 i2v": ("cogvideox-1.0-i2v", pictured_video),
    "cogvideox 1.0 i2v without picture": ("cogvideox-1.0-i2v", plain(1, 16, 3, 15, 18)),
    "cogvideox 1.5 i2v": ("cogvideox-1.5-i2v", plain(1, 16, 3, 14, 18)),
    "sd3.5 medium": ("sd3.5-medium", plain(2, 16, 15, 18)),
    "sd3.5 medium, a prompt that ComfyUI repeats": ("sd3.5-medium", plain(1, 16, 16, 16), 6),
    "pixart alpha": ("pixart-alpha", with_values(plain(1, 4, 40, 48), width=384, height=320)),
    "hunyuan-dit 1.1": ("hunyuan-dit-1.1", with_values(plain(1, 4, 24, 32), width=256, height=192)),
}
#: Variants whose attention has no use for prompts of two lengths.
ONE_LENGTH = ("hunyuan-dit-1.1",)
TOLERANCES = {"krea2-edit": 2e-4}


@pytest.mark.parametrize("name", GRAPHS)
def test_same_latent_as_ksampler(family_comfy, name):
    variant, build, rows = (*GRAPHS[name], 7)[:3]
    family = VARIANTS[variant].family if variant in VARIANTS else variant
    told = described(variant) if variant in VARIANTS else facts(variant)
    file = family_comfy.folder / f"models/diffusion_models/{variant}.safetensors"
    g = Graph()
    prompts = g.add(
        "TestGoldenInputs",
        file=str(GOLDEN / f"{family}__euler_simple.safetensors"),
        change="nothing",
    )
    negative = g.one(
        "TestConditioningValues",
        conditioning=[prompts, 1],
        values="{}",
        rows=0 if variant in ONE_LENGTH else rows,
    )
    positive, negative, latent = build(g, [prompts, 0], negative)
    inputs = {"positive": positive, "negative": negative, "latent_image": latent, **SAMPLER}
    theirs = g.one(
        "KSampler",
        model=g.one("TestReferenceModel", file=str(file), facts=json.dumps(told)),
        **inputs,
    )
    config = g.one("ParallelConfig", ulysses_degree=2, device="cpu")
    dit = g.one("LoadParallelDiT", config=config, model_name=file.name)
    ours = (
        g.one("ParallelSampler", dit=dit, **inputs),
        g.one("KSampler", model=g.one("ParallelModel", dit=dit), **inputs),
    )
    results = [g.add("TestLatentDistance", samples=samples, reference=theirs) for samples in ours]
    known = family_comfy.get("/object_info")
    skip_without_nodes(g.nodes, known)
    skip_without(
        {"QwenImage21"} if "qwen-image21" in variant and "TextEncodeQwenImage21" not in known else ()
    )
    run = family_comfy.run(g.nodes)
    assert run.status == "success", run.message or run.node_errors
    for result in results:
        assert json.loads(run.outputs[result]["text"][0])["error"] < TOLERANCES.get(variant, 1e-4)


def test_same_latent_from_ksampler_on_the_model_of_parallel_model(family_comfy):
    """Each call of the model carries the references."""
    variant, build = GRAPHS["flux.2, index"]
    file = family_comfy.folder / f"models/diffusion_models/{variant}.safetensors"
    g = Graph()
    prompts = g.add(
        "TestGoldenInputs",
        file=str(GOLDEN / f"{VARIANTS[variant].family}__euler_simple.safetensors"),
        change="nothing",
    )
    positive, negative, latent = build(g, [prompts, 0], [prompts, 1])
    inputs = {"positive": positive, "negative": negative, "latent_image": latent, **SAMPLER}
    config = g.one("ParallelConfig", ulysses_degree=2, device="cpu")
    ours = g.one("ParallelModel", dit=g.one("LoadParallelDiT", config=config, model_name=file.name))
    models = ours, g.one("TestReferenceModel", file=str(file), facts=json.dumps(described(variant)))
    samples, reference = (g.one("KSampler", model=model, **inputs) for model in models)
    result = g.add("TestLatentDistance", samples=samples, reference=reference)
    run = family_comfy.run(g.nodes)
    assert run.status == "success", run.message or run.node_errors
    assert json.loads(run.outputs[result]["text"][0])["error"] < 1e-4


def experts(folder, seed: int, names: dict[str, str]) -> tuple[dict, str, str]:
    """Wan 2.2's way: one model makes the first steps, another the last ones; both on one ParallelConfig. The
    same with KSampler (Advanced) beside it. ``names``: variant -> model_name."""
    g = Graph()
    prompts = g.add(
        "TestGoldenInputs", file=str(GOLDEN / "wan21-t2v__euler_simple.safetensors"), change="nothing"
    )
    config = g.one("ParallelConfig", ulysses_degree=2, device="cpu")
    ours = theirs = g.latent(1, 16, 3, 16, 16, empty=True)
    loaded = {name: g.one("LoadParallelDiT", config=config, model_name=names[name]) for name in EXPERTS}
    for name, part in EXPERTS.items():
        file = str(folder / f"models/diffusion_models/{name}.safetensors")
        inputs = {
            "positive": [prompts, 0],
            "negative": [prompts, 1],
            "noise_seed": seed,
            "steps": 4,
            "cfg": 3.0,
            "sampler_name": "euler",
            "scheduler": "simple",
            **part,
        }
        ours = g.one("ParallelSamplerAdvanced", dit=loaded[name], latent_image=ours, **inputs)
        theirs = g.one(
            "KSamplerAdvanced",
            model=g.one("TestReferenceModel", file=file, facts=json.dumps(described(name))),
            latent_image=theirs,
            **inputs,
        )
    return (
        g.nodes,
        g.add("TestLatentDistance", samples=ours, reference=theirs),
        g.add("TestBackendState", samples=ours),
    )


#: Model -> its steps: those of high noise and those of low noise.
EXPERTS = {
    "wan22-i2v": {
        "add_noise": "enable",
        "start_at_step": 0,
        "end_at_step": 2,
        "return_with_leftover_noise": "enable",
    },
    "wan22-i2v-low": {
        "add_noise": "disable",
        "start_at_step": 2,
        "end_at_step": 10000,
        "return_with_leftover_noise": "disable",
    },
}


def test_two_experts_stay_loaded_on_one_backend(family_comfy):
    states = []
    files = {name: f"{name}.safetensors" for name in EXPERTS}
    for seed in (1, 2, 3):
        nodes, error, state = experts(family_comfy.folder, seed, files)
        run = family_comfy.run(nodes)
        assert run.status == "success", run.message or run.node_errors
        assert json.loads(run.outputs[error]["text"][0])["error"] < 1e-4
        states.append(json.loads(run.outputs[state]["text"][0]))
    first, *later = states
    assert len(first["models"]) == 2
    for state in later:
        assert (
            state["models"] == first["models"]
            and state["sent"]["Sample"] == 2
            and "Unload" not in state["sent"]
        )


def test_both_experts_of_a_pipelines_folder(family_comfy):
    """The released folder of Wan 2.2 A14B: its name is the expert of high noise, the one of low noise is
    listed below it."""
    pipeline = family_comfy.folder / "models/diffusers/wan22-a14b"
    pipeline.mkdir(parents=True)
    (pipeline / "model_index.json").write_text(json.dumps({"_class_name": "WanImageToVideoPipeline"}))
    names = dict(zip(EXPERTS, ("wan22-a14b", "wan22-a14b/transformer_2")))
    for name in reversed(EXPERTS):
        file = variants_write(pipeline / "file.safetensors", name)
        transformer = as_folder(file)
        file.unlink()
        if name == "wan22-i2v-low":
            transformer.rename(pipeline / "transformer_2")
    nodes, error, _ = experts(family_comfy.folder, 4, names)
    options = family_comfy.get("/object_info/LoadParallelDiT")["LoadParallelDiT"]["input"]["required"]
    assert set(names.values()) <= set(options["model_name"][1]["options"])
    run = family_comfy.run(nodes)
    assert run.status == "success", run.message or run.node_errors
    assert json.loads(run.outputs[error]["text"][0])["error"] < 1e-4
