"""What the workflows of workflows/ are made of, as data: released files, encoders, latent and settings of
each family.

Files and settings are those of ComfyUI's own templates; where it has none (PixArt-Sigma, Hunyuan-DiT,
CogVideoX), the defaults of the diffusers pipeline, with ComfyUI's solver and the scheduler that puts
timesteps where the published scheduler does (linspace: sgm_uniform, leading: ddim_uniform, trailing: simple).
"""

from few_step_recipes import FEW_STEP_RECIPES
from image_recipes import IMAGE_RECIPES
from video_recipes import VIDEO_RECIPES

FLUX_FILES = (
    "Files:\n- `models/diffusion_models/flux1-dev.safetensors`, `models/vae/ae.safetensors`\n"
    "- `models/text_encoders/clip_l.safetensors`, `t5xxl_fp16.safetensors`"
)
FITS = (
    "*Parallel Config* shares the work in the way that is fastest for this model and sampler: set `gpus` to "
    "use fewer, or `method`."
)

#: Name -> title; model (a file of models/diffusion_models, or a folder of models/diffusers); clip and vae, or
#: a checkpoint that holds them (none: the model's folder does); latent; solve.
#: Further: negative (none: zeros), guidance, fps (a video), image (an edit; its scaling node, whose size the
#: latent takes where there is one, or None), first_frame (a video's; its size and compression), sigmas (a
#: scheduler node), rate, encode, note, audio (the loader of the VAE of a video's audio), second_model (one
#: for the negative prompt, and when the guider of both takes another cfg), lora (a file and its strength),
#: low_noise (the model of the second half of the steps, and its LoRA).
RECIPES = IMAGE_RECIPES | VIDEO_RECIPES | FEW_STEP_RECIPES

#: Workflows whose graph is workflows/api/NAME.json -> title and note.
WRITTEN = {
    "demo": (
        "Parallel DiT demo",
        "Two ranks share every denoising step of a small Flux: two GPUs, or two processes on the CPU where "
        "there is none. With one GPU set `device` to `cpu`.\n\nHow they share is set by hand here: `method` "
        "is manual, and `cfg_degree` 2, an advanced input, gives each rank one of the two prompts. Try "
        "`ulysses_degree` 2 or `pipefusion_degree` 2 in its place, or with it (four ranks). The model knows "
        "circles, squares and triangles, left of, right of, above and below each other.",
    ),
    "flux_txt2img": ("Flux.1 dev", FLUX_FILES + "\n\n" + FITS),
    "flux_img2img": (
        "Image to image",
        FLUX_FILES + "\n\n`denoise` says how much of the image is made anew: 0.6 keeps its layout.",
    ),
    "flux_inpaint": (
        "Inpainting",
        FLUX_FILES
        + "\n\nRight-click the image, *Open in MaskEditor*, and paint over what should change; the "
        "rest of the latent stays as it is.",
    ),
    "parallel_model": (
        "Any sampler",
        "ComfyUI's own sampling nodes: **Parallel Model** makes a MODEL of a Parallel DiT. "
        + FLUX_FILES
        + "\n\nEvery sampler, guider and scheduler can follow.",
    ),
    "wan21_t2v": (
        "Wan 2.1 text to video",
        "Files:\n- `models/diffusion_models/wan2.1_t2v_14B_fp16.safetensors` (or 1.3B), "
        "`models/vae/wan_2.1_vae.safetensors`\n- `models/text_encoders/umt5_xxl_fp16.safetensors`\n\n"
        "`shift` 0 is the model's own (8).",
    ),
    "wan21_i2v": (
        "Wan 2.1 image to video",
        "Files:\n- `models/diffusion_models/wan2.1_i2v_480p_14B_fp16.safetensors`, "
        "`models/vae/wan_2.1_vae.safetensors`\n- `models/text_encoders/umt5_xxl_fp16.safetensors`, "
        "`models/clip_vision/clip_vision_h.safetensors`\n\nThe image is the first frame.",
    ),
    "wan22_t2v_two_stage": (
        "Wan 2.2: two experts on the same GPUs",
        "Files:\n- `models/diffusion_models/wan2.2_t2v_high_noise_14B_fp16.safetensors` and "
        "`..._low_noise_...`\n- `models/vae/wan_2.1_vae.safetensors`, "
        "`models/text_encoders/umt5_xxl_fp16.safetensors`\n\nBoth loaders have one Parallel Config, "
        "so both models "
        "stay loaded on the same GPUs, and auto counts both.\n\nTwo cards of 24 GB do not hold both in fp16: "
        "take the template `wan22_lightx2v_t2v` (fp8), or four cards.",
    ),
}
#: All workflows, the demo first.
NAMES = [*WRITTEN, *RECIPES]


def note_of(recipe: dict) -> str:
    """Which files go where, and how many GPUs share the work."""
    model, checkpoint = recipe["model"], recipe.get("checkpoint")
    holds = (
        ("VAEs and the prompt's projection" if "audio" in recipe else "VAE")
        if "clip" in recipe
        else "VAE and text encoders"
    )
    more = [recipe[key][0] for key in ("second_model", "low_noise") if key in recipe]
    files = [
        ", ".join(
            f"- `models/diffusion_models/{name}`" if not i else f"`{name}`"
            for i, name in enumerate([model, *more])
        )
        if model.endswith(".safetensors")
        else f"- `models/diffusers/{model}`: the folder that is published for diffusers"
    ]
    if not checkpoint and "clip" not in recipe:
        files[0] += ", with text encoders and VAE"
    elif checkpoint == model:
        files[0] += f"; the same file, or a link to it, in `models/checkpoints` for its {holds}"
    elif checkpoint:
        files.append(f"- `models/checkpoints/{checkpoint}`, for its {holds}")
    loras = [recipe["lora"][0]] if "lora" in recipe else []
    loras += [recipe["low_noise"][1]] if "low_noise" in recipe else []
    if loras:
        files.append("- `models/loras`: " + ", ".join(f"`{name}`" for name in loras))
    if "clip" in recipe:
        names = [
            value for key, value in recipe["clip"][1].items() if key.startswith(("clip_name", "text_encoder"))
        ]
        files.append("- `models/text_encoders`: " + ", ".join(f"`{name}`" for name in names))
    vaes = [
        recipe[key] if key == "vae" else recipe[key][1].get("vae_name")
        for key in ("vae", "audio")
        if key in recipe
    ]
    files += [f"- `models/vae/{name}`" for name in vaes if name]
    return "\n".join(["Files:", *files, "", FITS, *([recipe["note"]] if "note" in recipe else [])])
