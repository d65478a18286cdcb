"""Variants of the families in graphs of a real ComfyUI: its own conditioning nodes, its own KSampler next to
ParallelSampler, and itself on ParallelModel, on two ranks."""

import json

import pytest
from graphs import SAMPLER, Graph
from image_conditioning import control, encoded, guided, inpainting, layers, plain, references, with_values
from tiny import GOLDEN, as_folder, facts
from variants import VARIANTS, described
from variants import write as variants_write
from versions import skip_without, skip_without_nodes
from video_conditioning import (
    hunyuan,
    image_to_video,
    ltx2_guides,
    ltx2_image,
    ltx2_smaller_guides,
    ltx_guides,
    ltx_image,
    ltx_smaller_guides,
    minimax_frames,
    minimax_guides,
    minimax_references,
    super_resolution,
)
from wan_conditioning import (
    WAN_FUN,
    WAN_FUN_22,
    animate,
    bernini,
    first_and_last_frame,
    first_frame,
    fun_camera,
    fun_control,
    given_frame,
    phantom,
    vace,
)

#: Name -> (variant, what makes positive, negative and latent of two prompts, rows of the negative prompt
#: where they are not 7).
GRAPHS = {
    "kontext, offset": ("flux-kontext", references(False, negative=True, batch=2)),
    "kontext, index": ("flux-kontext", references(False, "index")),
    "kontext, uxo": ("flux-kontext", references(False, "uxo/uno")),
    "fill": ("flux-fill", inpainting),
    "canny": ("flux-canny", control),
    "schnell": ("flux-schnell", plain(1, 16, 15, 18)),
    "flux.1 without guidance": ("flux-kontext", guided(plain(2, 16, 15, 18), None)),
    "chroma with guidance": ("chroma", guided(plain(1, 16, 15, 18), 3.5)),
    "flux.2, index": ("flux2-edit", references(False, negative=True, batch=2, channels=128)),
    "flux.2, at timestep 0": ("flux2-edit-zero", references(False, "index_timestep_zero", channels=128)),
    "flux.2, offset": ("flux2-edit", references(False, "offset", channels=128)),
    "flux.2, uxo": ("flux2-edit", references(False, "uxo/uno", channels=128)),
    "qwen edit": ("qwen-image-edit", references(True, negative=True)),
    "qwen edit, offset": ("qwen-image-edit", references(True, "offset")),
    "qwen edit, uxo": ("qwen-image-edit", references(True, "uxo/uno")),
    "qwen edit, at timestep 0": (
        "qwen-image-edit-zero",
        references(True, "index_timestep_zero", negative=True, batch=2),
    ),
    "qwen edit 2511": ("qwen-image-edit-2511", references(True, batch=2)),
    "qwen edit 2511, index": ("qwen-image-edit-2511", references(True, "index")),
    "qwen layered": ("qwen-image-layered", layers(with_image=True)),
    "qwen layered, text to layers": ("qwen-image-layered", layers(with_image=False)),
    "qwen 2.1": ("qwen-image21-edit", encoded(shape=(2, 64, 8, 10))),
    "qwen 2.1, odd sides": ("qwen-image21-edit", encoded(shape=(1, 64, 15, 9))),
    "qwen 2.1, an image": ("qwen-image21-edit", encoded((128, 96))),
    "qwen 2.1, two images": ("qwen-image21-edit", encoded((128, 96), (96, 160), shape=(2, 64, 7, 9))),
    "qwen 2.1, other references": ("qwen-image21-edit", references(False, channels=64, negative=True)),
    "krea 2, reference": ("krea2-edit", references(True, "index")),
    "krea 2, style": ("krea2-style", references(True, "index_timestep_zero")),
    "wan 2.1 i2v": ("wan21-i2v", first_frame("WanImageToVideo", 1280, batch=2)),
    "wan 2.1 flf2v": ("wan21-flf2v", first_and_last_frame),
    "wan 2.2 i2v": ("wan22-i2v", first_frame("WanImageToVideo", None)),
    "wan 2.2 i2v without image": ("wan22-i2v", plain(1, 16, 3, 15, 18)),
    "wan 2.2 i2v with an unused reference": ("wan22-i2v", references(True, negative=True)),
    "wan 2.2 ti2v": ("wan22-ti2v", given_frame),
    "wan 2.2 ti2v without image": ("wan22-ti2v", plain(1, 48, 3, 15, 18)),
    "wan fun control": ("wan21-fun-control", fun_control(WAN_FUN, True, start_image=1, control_video=9)),
    "wan fun control without anything": ("wan21-fun-control", fun_control(WAN_FUN)),
    "wan fun control, reference": ("wan21-fun-control", fun_control(WAN_FUN_22, ref_image=1)),
    "wan 2.2 fun control": ("wan22-fun-control", fun_control(WAN_FUN_22, ref_image=1, control_video=9)),
    "wan 2.2 fun control without anything": ("wan22-fun-control", fun_control(WAN_FUN_22)),
    "wan fun camera": ("wan21-fun-camera", fun_camera(features=True)),
    "wan fun camera that stays": ("wan21-fun-camera", fun_camera(moved=False)),
    "wan 2.2 fun camera": ("wan22-fun-camera", fun_camera()),
    "wan 2.2 fun camera without image": ("wan22-fun-camera", fun_camera(with_image=False)),
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
        animate("reference_image", "background_video", "character_mask", "continue_motion"),
    ),
    "wan animate without anything": ("wan22-animate", animate()),
    "hunyuan-video i2v": ("hunyuan-video-i2v", hunyuan("v1 (concat)")),
    "hunyuan-video i2v, v2": ("hunyuan-video-i2v-v2", hunyuan("v2 (replace)", 2)),
    "hunyuan-video without guidance": ("hunyuan-video-i2v-v2", guided(plain(1, 16, 3, 14, 18), None)),
    "hunyuan-video i2v, v2, without guidance": (
        "hunyuan-video-i2v-v2",
        guided(hunyuan("v2 (replace)"), None),
    ),
    "hunyuan-video 1.5 i2v": (
        "hunyuan-video15-i2v",
        first_frame("HunyuanVideo15ImageToVideo", 1152, {"channels": 32, "spatial": 16}),
    ),
    "hunyuan-video 1.5, meanflow": ("hunyuan-video15-meanflow", plain(2, 32, 3, 10, 11)),
    "hunyuan-video 1.5 sr": ("hunyuan-video15-sr", super_resolution),
    "hunyuan-image 2.1, distilled": ("hunyuan-image21-distilled", plain(1, 64, 9, 11)),
    "hunyuan-image 2.1, distilled, without guidance": (
        "hunyuan-image21-distilled",
        guided(plain(1, 64, 9, 11), None),
    ),
    "ltxv i2v": ("ltxv-i2v", ltx_image),
    "ltxv guides": ("ltxv-i2v", ltx_guides),
    "ltxv smaller guides": ("ltxv-i2v", ltx_smaller_guides),
    "ltx2.5 smaller guides": ("ltx25-i2v", ltx2_smaller_guides),
    "ltx2 i2v": ("ltx2-i2v", ltx2_image),
    "ltx2.5 guides": ("ltx25-i2v", ltx2_guides),
    "minimax-h3 guides": ("minimax-h3-guides", minimax_guides),
    "minimax-h3 first and last frame": ("minimax-h3-guides", minimax_frames),
    "minimax-h3 references": ("minimax-h3-guides", minimax_references),
    "cogvideox i2v": ("cogvideox-i2v", image_to_video),
    "cogvideox 1.0 i2v": ("cogvideox-1.0-i2v", image_to_video),
    "cogvideox 1.0 i2v without image": ("cogvideox-1.0-i2v", plain(1, 16, 3, 15, 18)),
    "cogvideox 1.5 i2v": ("cogvideox-1.5-i2v", plain(1, 16, 3, 14, 18)),
    "sd3.5 medium": ("sd3.5-medium", plain(2, 16, 15, 18)),
    "sd3.5 medium, a prompt that ComfyUI repeats": ("sd3.5-medium", plain(1, 16, 16, 16), 6),
    "pixart alpha": ("pixart-alpha", with_values(plain(1, 4, 40, 48), width=384, height=320)),
    "hunyuan-dit 1.1": ("hunyuan-dit-1.1", with_values(plain(1, 4, 24, 32), width=256, height=192)),
}
#: Variants whose attention has no use for prompts of two lengths.
ONE_LENGTH = ("hunyuan-dit-1.1",)
TOLERANCES = {"krea2-edit": 2e-4, "krea2-style": 2e-4}
#: Family -> its sampler's other settings. From CogVideoX' highest noise level, 4519, one Euler step rounds
#: by 3e-4 of the latent's deviation in float32 (ComfyUI's, too); a last digit of the output moves it by 7e-5.
SETTINGS = {"cogvideox": {"denoise": 0.5}}


def errors(family_comfy, name, kind="error", **changes) -> list[float]:
    """The distances of ParallelSampler's latent and of ParallelModel's from KSampler's, of a graph; ``kind``:
    a number of TestLatentDistance's."""
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
    values = {"values": "{}", "rows": 0 if variant in ONE_LENGTH else rows}
    negative = g.one("TestConditioningValues", conditioning=[prompts, 1], **values)
    positive, negative, latent = build(g, [prompts, 0], negative)
    settings = SAMPLER | SETTINGS.get(family, {}) | changes
    inputs = {"positive": positive, "negative": negative, "latent_image": latent, **settings}
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
    return [json.loads(run.outputs[result]["text"][0])[kind] for result in results]


@pytest.mark.parametrize("name", GRAPHS)
def test_same_latent_as_ksampler(family_comfy, name):
    tolerance = TOLERANCES.get(GRAPHS[name][0], 1e-4)
    assert all(error < tolerance for error in errors(family_comfy, name))  # NaN, too, is none


def test_from_the_highest_noise_level(family_comfy):
    """Where rounding moves single values, and all of them by less than 1e-5."""
    assert all(each < 1e-5 for each in errors(family_comfy, "cogvideox 1.5 i2v", "rms", denoise=1.0))


@pytest.mark.parametrize("solver", ["uni_pc", "uni_pc_bh2"])
def test_where_the_last_step_of_unipc_ends(family_comfy, solver):
    """At 0.001, as a model that is told where steps end reads."""
    found = errors(family_comfy, "hunyuan-video 1.5, meanflow", sampler_name=solver)
    assert all(error < 1e-4 for error in found)


@pytest.mark.parametrize(
    "node, says",
    [
        ("KSampler", "keyframe_idxs holds 70 tokens, which is not a whole number of 48-token latent frames"),
        ("ParallelSampler", "keyframe_idxs has 70 tokens, but the latent 240, 48 a frame"),
    ],
)
def test_guides_of_another_size_are_refused_as_in_comfyui(family_comfy, node, says):
    g = Graph()
    file = family_comfy.folder / "models/diffusion_models/ltxv-i2v.safetensors"
    prompts = g.add("TestGoldenInputs", file=str(GOLDEN / "ltxv__euler_simple.safetensors"), change="nothing")
    positive, negative, _ = ltx_guides(g, [prompts, 0], [prompts, 1])
    latent = g.one(
        "SetLatentNoiseMask",
        samples=g.latent(1, 128, 5, 6, 8, empty=True),
        mask=g.one("TestMask", width=256, height=192),
    )
    if node == "KSampler":
        known = json.dumps(described("ltxv-i2v"))
        model = {"model": g.one("TestReferenceModel", file=str(file), facts=known)}
    else:
        config = g.one("ParallelConfig", ulysses_degree=2, device="cpu")
        model = {"dit": g.one("LoadParallelDiT", config=config, model_name=file.name)}
    samples = g.one(node, **model, positive=positive, negative=negative, latent_image=latent, **SAMPLER)
    g.add("TestLatentDistance", samples=samples, reference=samples)
    run = family_comfy.run(g.nodes)
    assert run.status == "error" and says in run.message


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
    same with KSampler (Advanced) for comparison. ``names``: variant -> model_name."""
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
    backends = family_comfy.get("/parallel_dit/status")["backends"]
    assert any(set(files.values()) <= set(backend["models"]) for backend in backends), backends
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
