"""Recipes of distilled models and LoRAs, which need 4 to 8 steps and no guidance; workflow_recipes.py says
what an entry holds."""

from recipe_parts import clip, image_latent, solve, video

QUANTIZED = "Every GPU holds the weights as the file stores them. Where they do not fit, auto divides them."
WITH_LORA = (
    "Every GPU holds the weights as the file stores them, and a LoRA beside them. Where they do not fit, "
    "auto divides them."
)

#: What two recipes of a model have in common.
Z_IMAGE = {
    "vae": "ae.safetensors",
    "latent": image_latent(),
    "solve": solve(8, 1.0, "res_multistep", shift=3.0),
}
KREA2 = {
    "clip": clip("qwen3vl_4b_fp8_scaled.safetensors", type="krea2"),
    "vae": "qwen_image_vae.safetensors",
    "latent": image_latent(kind="EmptyLatentImage"),
    "solve": solve(8, 1.0),
}

FEW_STEP_RECIPES = {
    "z_image_txt2img": {
        "title": "Z-Image Turbo",
        "model": "z_image_turbo_bf16.safetensors",
        "clip": clip("qwen_3_4b.safetensors", type="lumina2"),
        **Z_IMAGE,
    },
    "krea2_txt2img": {
        "title": "Krea 2 Turbo",
        "model": "krea2_turbo_fp8_scaled.safetensors",
        **KREA2,
    },
    "z_image_int8_txt2img": {
        "title": "Z-Image Turbo, int8",
        "model": "z_image_turbo_int8_convrot.safetensors",
        "clip": clip("qwen_3_4b_fp8_mixed.safetensors", type="lumina2"),
        **Z_IMAGE,
        "note": QUANTIZED,
    },
    "krea2_int8_lora_txt2img": {
        "title": "Krea 2 Turbo, int8 with a LoRA",
        "model": "krea2_turbo_int8_convrot.safetensors",
        "lora": ("krea2_darkbrush.safetensors", 0.8),
        **KREA2,
        "note": WITH_LORA,
    },
    "qwen_image_lightning_txt2img": {
        "title": "Qwen-Image in 4 steps, fp8",
        "model": "qwen_image_2512_fp8_e4m3fn.safetensors",
        "lora": ("Qwen-Image-2512-Lightning-4steps-V1.0-fp32.safetensors", 1.0),
        "clip": clip("qwen_2.5_vl_7b_fp8_scaled.safetensors", type="qwen_image"),
        "vae": "qwen_image_vae.safetensors",
        "latent": image_latent(1328, 1328),
        "solve": solve(4, 1.0, shift=3.1),
        "note": WITH_LORA,
    },
    "wan22_lightx2v_t2v": {
        "title": "Wan 2.2 in 4 steps, fp8",
        "model": "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors",
        "lora": ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors", 1.0),
        "low_noise": (
            "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors",
            "wan2.2_t2v_lightx2v_4steps_lora_v1.1_low_noise.safetensors",
        ),
        "clip": clip("umt5_xxl_fp8_e4m3fn_scaled.safetensors", type="wan"),
        "vae": "wan_2.1_vae.safetensors",
        "latent": video(640, 640, 81),
        "fps": 16.0,
        "solve": solve(4, 1.0, shift=5.0),
        "note": WITH_LORA,
    },
    "ltx25_t2v": {
        "title": "LTX-2.5 distilled, with audio",
        "model": "ltx-2.5-22b-distilled-transformer-comfy-int8-convrot.safetensors",
        "clip": clip("gemma4-12b-with-proj-ltx-2.5-comfy-int8-convrot.safetensors", type="ltxv"),
        "vae": "ltx-2.5-video-vae-bf16.safetensors",
        "latent": video(1280, 704, 121, "EmptyLTXVLatentVideo"),
        "rate": 24.0,
        "fps": 24.0,
        "audio": ("VAELoader", {"vae_name": "ltx-2.5-audio-vae-bf16.safetensors"}),
        "solve": solve(8, 1.0, "euler_ancestral"),
        "sigmas": (
            "ManualSigmas",
            {"sigmas": "1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0"},
        ),
        "note": "ComfyUI's template makes half this size, then upscales the latent and samples it again.",
    },
}
