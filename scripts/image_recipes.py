"""Recipes of workflows that make or edit an image; workflow_recipes.py says what an entry holds."""

from recipe_parts import BAD, clip, image_latent, solve

#: Files that several recipes load.
QWEN_IMAGE = {
    "clip": clip("qwen_2.5_vl_7b_fp8_scaled.safetensors", type="qwen_image"),
    "vae": "qwen_image_vae.safetensors",
}
QWEN_IMAGE_21 = {
    "model": "qwen_image_2.1_int8_convrot.safetensors",
    "clip": clip("qwen3vl_8b_int8_convrot.safetensors", type="qwen_image"),
    "vae": "qwen_image_2.1_vae_bf16.safetensors",
}
FLUX2 = {
    "model": "flux2_dev_fp8mixed.safetensors",
    "clip": clip("mistral_3_small_flux2_bf16.safetensors", type="flux2"),
    "vae": "flux2-vae.safetensors",
}

IMAGE_RECIPES = {
    "sd35_txt2img": {
        "title": "Stable Diffusion 3.5",
        "model": "sd3.5_large_fp8_scaled.safetensors",
        "checkpoint": "sd3.5_large_fp8_scaled.safetensors",
        "latent": image_latent(),
        "negative": BAD,
        "solve": solve(20, 4.0, scheduler="sgm_uniform"),
    },
    "pixart_sigma_txt2img": {
        "title": "PixArt-Sigma",
        "model": "PixArt-Sigma-XL-2-1024-MS",
        "clip": clip("t5xxl_fp16.safetensors", type="pixart"),
        "vae": "sdxl_vae.safetensors",
        "latent": image_latent(kind="EmptyLatentImage"),
        "negative": BAD,
        "solve": solve(20, 4.5, "dpmpp_2m", "sgm_uniform"),
    },
    "hunyuan_dit_txt2img": {
        "title": "Hunyuan-DiT",
        "model": "HunyuanDiT-v1.2-Diffusers",
        "checkpoint": "hunyuan_dit_1.2.safetensors",
        "latent": image_latent(kind="EmptyLatentImage"),
        "negative": BAD,
        "solve": solve(50, 5.0, "ddpm", "ddim_uniform"),
    },
    "chroma_txt2img": {
        "title": "Chroma",
        "model": "Chroma1-HD.safetensors",
        "clip": clip("t5xxl_fp16.safetensors", type="chroma"),
        "tokens": ("T5TokenizerOptions", {"min_padding": 0, "min_length": 0}),
        "vae": "ae.safetensors",
        "latent": image_latent(),
        "negative": BAD,
        "solve": solve(26, 3.5, scheduler="beta", shift=1.0),
    },
    "qwen_image_txt2img": {
        "title": "Qwen-Image",
        "model": "qwen_image_fp8_e4m3fn.safetensors",
        **QWEN_IMAGE,
        "latent": image_latent(1328, 1328),
        "negative": "",
        "solve": solve(20, 4.0, shift=3.1),
    },
    "qwen_image_edit": {
        "title": "Qwen-Image-Edit",
        "model": "qwen_image_edit_fp8_e4m3fn.safetensors",
        **QWEN_IMAGE,
        "image": (
            "ImageScaleToTotalPixels",
            {"upscale_method": "lanczos", "megapixels": 1.5, "resolution_steps": 1},
        ),
        "encode": "TextEncodeQwenImageEdit",
        "negative": "",
        "solve": solve(20, 2.5, shift=3.0),
        "note": "ComfyUI's template also patches the model with CFGNorm; `Parallel Model` takes it.",
    },
    "qwen_image21_txt2img": {
        "title": "Qwen-Image 2.1",
        **QWEN_IMAGE_21,
        "latent": image_latent(kind="EmptyLatentImage"),
        "encode": "TextEncodeQwenImage21",
        "solve": solve(25, 1.0),
        "note": "ComfyUI 0.37 or later.",
    },
    "qwen_image21_edit": {
        "title": "Qwen-Image 2.1, from an image",
        **QWEN_IMAGE_21,
        "image": None,
        "encode": "TextEncodeQwenImage21",
        "solve": solve(25, 1.0),
        "note": "ComfyUI 0.37 or later. Connect further images below the first; the prompt calls them "
        "<image1>, <image2> and so on.",
    },
    "flux_kontext_edit": {
        "title": "Flux.1 Kontext",
        "model": "flux1-dev-kontext_fp8_scaled.safetensors",
        "clip": clip("clip_l.safetensors", "t5xxl_fp8_e4m3fn_scaled.safetensors", type="flux"),
        "vae": "ae.safetensors",
        "image": ("FluxKontextImageScale", {}),
        "guidance": 2.5,
        "solve": solve(20, 1.0),
    },
    "flux2_txt2img": {
        "title": "Flux.2 dev",
        **FLUX2,
        "latent": image_latent(kind="EmptyFlux2LatentImage"),
        "guidance": 4.0,
        "sigmas": ("Flux2Scheduler", {"steps": 20}),
        "solve": solve(20, 1.0),
    },
    "flux2_edit": {
        "title": "Flux.2 dev, from an image",
        **FLUX2,
        "image": (
            "ImageScaleToTotalPixels",
            {"upscale_method": "lanczos", "megapixels": 1.0, "resolution_steps": 1},
        ),
        "latent": image_latent(kind="EmptyFlux2LatentImage"),
        "guidance": 4.0,
        "sigmas": ("Flux2Scheduler", {"steps": 20}),
        "solve": solve(20, 1.0),
        "note": "One `Set Reference Latent` for each further image.",
    },
    "lumina2_txt2img": {
        "title": "Lumina-Image 2.0",
        "model": "lumina_2_model_bf16.safetensors",
        "clip": clip("gemma_2_2b_fp16.safetensors", type="lumina2"),
        "vae": "ae.safetensors",
        "latent": image_latent(),
        "encode": "CLIPTextEncodeLumina2",
        "negative": BAD,
        "solve": solve(30, 4.0, "res_multistep"),
    },
    "hidream_txt2img": {
        "title": "HiDream-I1 Full",
        "model": "hidream_i1_full_fp8.safetensors",
        "vae": "ae.safetensors",
        "latent": image_latent(),
        "negative": BAD,
        "solve": solve(50, 5.0, "uni_pc", shift=3.0),
        "clip": clip(
            "clip_l_hidream.safetensors",
            "clip_g_hidream.safetensors",
            "t5xxl_fp8_e4m3fn_scaled.safetensors",
            "llama_3.1_8b_instruct_fp8_scaled.safetensors",
        ),
    },
    "sana_txt2img": {
        "title": "SANA 1.5",
        "model": "SANA1.5_1.6B_1024px_diffusers",
        "latent": image_latent(kind="EmptyHunyuanImageLatent"),
        "negative": "",
        "solve": solve(20, 4.5, "dpmpp_2m", shift=3.0),
        "note": "SANA's latents are 1/32 of the image's size, as those that the empty-latent node of "
        "HunyuanImage makes. Its pipeline puts an instruction in front of the prompt, not of the "
        "negative one: each has its CLIP.",
    },
    "flux3_txt2img": {
        "title": "FLUX.3",
        "model": "flux-3-image-klein-base",
        "latent": image_latent(kind="EmptyFlux2LatentImage"),
        "negative": "",
        "solve": solve(50, 3.5),
        "note": "The prompt is encoded as it stands, without FLUX.3's prompt upsampler: write long captions.",
    },
    "ideogram4_txt2img": {
        "title": "Ideogram 4",
        "model": "ideogram4_fp8_scaled.safetensors",
        "clip": clip("qwen3vl_8b_fp8_scaled.safetensors", type="ideogram4"),
        "vae": "flux2-vae.safetensors",
        "latent": image_latent(kind="EmptyFlux2LatentImage"),
        "sigmas": (
            "Ideogram4Scheduler",
            {"steps": 20, "width": 1024, "height": 1024, "mu": 0.0, "std": 1.75},
        ),
        "solve": solve(20, 7.0),
        "second_model": (
            "ideogram4_unconditional_fp8_scaled.safetensors",
            {"cfg": 3.0, "start_percent": 0.7, "end_percent": 1.0},
        ),
        "note": "Two models, which one guider calls in turns: both are MODELs of `Parallel Model`, and "
        "both stay on the ranks.",
    },
}
