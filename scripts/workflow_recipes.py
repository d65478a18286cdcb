"""What the workflows of workflows/ are made of, as data: released files, encoders, latent and settings of
each family.

Files and settings are those of ComfyUI's own templates; where it has none (PixArt-Sigma, Hunyuan-DiT,
CogVideoX), the defaults of the diffusers pipeline, with ComfyUI's solver and the scheduler that puts
timesteps where the published scheduler does (linspace: sgm_uniform, leading: ddim_uniform, trailing: simple).
"""

import json
from pathlib import Path

FLUX_FILES = (
    "Files:\n- `models/diffusion_models/flux1-dev.safetensors`, `models/vae/ae.safetensors`\n"
    "- `models/text_encoders/clip_l.safetensors`, `t5xxl_fp16.safetensors`"
)
FITS = (
    "*Parallel Config* shares the work in the way that is fastest for this model and sampler: set `gpus` to "
    "use fewer, or `method`."
)
PHOTO = "a lighthouse on a cliff at dusk, long exposure of the sea, warm light in one window"
CLIP_SCENE = "a red fox trots through fresh snow at sunrise, camera follows from the side"
EDIT = "Make it a snowy winter evening, keep everything else as it is."
BAD = "blurry, low quality, distorted, watermark"
BAD_VIDEO = "blurry, static, overexposed, distorted hands, watermark"
BAD_SOUND_AND_VIDEO = (
    "blurry, low quality, still frame, frames, watermark, overlay, titles, has blurbox, has subtitles"
)
SPOKEN_SCENE = (
    "a close-up of an old clockmaker at his bench, he lifts a small brass gear to the light "
    'and says: "Listen, it breathes." Soft ticking from many clocks fills the room'
)
LTX2 = "ltx-2-19b-dev-fp8.safetensors"
QUANTIZED = (
    "Every GPU holds the weights as the file stores them, and a LoRA beside them. Where they do not fit, "
    "auto divides them."
)


def clip(*names: str, **more) -> tuple[str, dict]:
    """A loader of so many text encoders."""
    if len(names) == 1:
        return "CLIPLoader", {"clip_name": names[0], "device": "default", **more}
    more |= {"device": "default"} if len(names) == 2 else {}
    return {2: "DualCLIPLoader", 3: "TripleCLIPLoader", 4: "QuadrupleCLIPLoader"}[len(names)], {
        f"clip_name{i}": name for i, name in enumerate(names, 1)
    } | more


def image_latent(
    width: int = 1024, height: int = 1024, kind: str = "EmptySD3LatentImage"
) -> tuple[str, dict]:
    return kind, {"width": width, "height": height, "batch_size": 1}


def video(width: int, height: int, length: int, kind: str = "EmptyHunyuanLatentVideo") -> tuple[str, dict]:
    return kind, {"width": width, "height": height, "length": length, "batch_size": 1}


def solve(
    steps: int, cfg: float, sampler: str = "euler", scheduler: str = "simple", shift: float = 0.0
) -> dict:
    return {
        "steps": steps,
        "cfg": cfg,
        "sampler_name": sampler,
        "scheduler": scheduler,
        "denoise": 1.0,
        "shift": shift,
    }


#: Name -> title; model (a file of models/diffusion_models, or a folder of models/diffusers); clip and vae, or
#: a checkpoint that holds them (none: the model's folder does); latent; solve.
#: Further: negative (none: zeros), guidance, fps (a video), image (an edit; its scaling node, whose size the
#: latent takes where there is one, or None), first_frame (a video's; its size and compression), sigmas (a
#: scheduler
#: node), rate, encode, note, audio (the loader of the VAE of a video's audio), second_model (one for the
#: negative prompt, and when the guider of both takes another cfg), lora (a file and its strength), low_noise
#: (the model of the second half of the steps, and its LoRA).
RECIPES = {
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
        "clip": clip("qwen_2.5_vl_7b_fp8_scaled.safetensors", type="qwen_image"),
        "vae": "qwen_image_vae.safetensors",
        "latent": image_latent(1328, 1328),
        "negative": "",
        "solve": solve(20, 4.0, shift=3.1),
    },
    "qwen_image_edit": {
        "title": "Qwen-Image-Edit",
        "model": "qwen_image_edit_fp8_e4m3fn.safetensors",
        "clip": clip("qwen_2.5_vl_7b_fp8_scaled.safetensors", type="qwen_image"),
        "vae": "qwen_image_vae.safetensors",
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
        "model": "qwen_image_2.1_int8_convrot.safetensors",
        "clip": clip("qwen3vl_8b_int8_convrot.safetensors", type="qwen_image"),
        "vae": "qwen_image_2.1_vae_bf16.safetensors",
        "latent": image_latent(kind="EmptyLatentImage"),
        "encode": "TextEncodeQwenImage21",
        "solve": solve(25, 1.0),
        "note": "ComfyUI 0.37 or later.",
    },
    "qwen_image21_edit": {
        "title": "Qwen-Image 2.1, from an image",
        "model": "qwen_image_2.1_int8_convrot.safetensors",
        "clip": clip("qwen3vl_8b_int8_convrot.safetensors", type="qwen_image"),
        "vae": "qwen_image_2.1_vae_bf16.safetensors",
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
    "z_image_txt2img": {
        "title": "Z-Image Turbo",
        "model": "z_image_turbo_bf16.safetensors",
        "clip": clip("qwen_3_4b.safetensors", type="lumina2"),
        "vae": "ae.safetensors",
        "latent": image_latent(),
        "solve": solve(8, 1.0, "res_multistep", shift=3.0),
    },
    "krea2_txt2img": {
        "title": "Krea 2 Turbo",
        "model": "krea2_turbo_fp8_scaled.safetensors",
        "clip": clip("qwen3vl_4b_fp8_scaled.safetensors", type="krea2"),
        "vae": "qwen_image_vae.safetensors",
        "latent": image_latent(kind="EmptyLatentImage"),
        "solve": solve(8, 1.0),
    },
    "flux2_txt2img": {
        "title": "Flux.2 dev",
        "model": "flux2_dev_fp8mixed.safetensors",
        "clip": clip("mistral_3_small_flux2_bf16.safetensors", type="flux2"),
        "vae": "flux2-vae.safetensors",
        "latent": image_latent(kind="EmptyFlux2LatentImage"),
        "guidance": 4.0,
        "sigmas": ("Flux2Scheduler", {"steps": 20}),
        "solve": solve(20, 1.0),
    },
    "flux2_edit": {
        "title": "Flux.2 dev, from an image",
        "model": "flux2_dev_fp8mixed.safetensors",
        "clip": clip("mistral_3_small_flux2_bf16.safetensors", type="flux2"),
        "vae": "flux2-vae.safetensors",
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
    "kandinsky5_t2v": {
        "title": "Kandinsky 5 Lite",
        "model": "kandinsky5lite_t2v_sft_5s.safetensors",
        "clip": clip("qwen_2.5_vl_7b_fp8_scaled.safetensors", "clip_l.safetensors", type="kandinsky5"),
        "vae": "hunyuan_video_vae_bf16.safetensors",
        "latent": video(768, 512, 121, "Kandinsky5ImageToVideo"),
        "negative": BAD_VIDEO,
        "fps": 24.0,
        "solve": solve(50, 5.0, "euler_ancestral", "beta", 5.0),
    },
    "hunyuan_video_t2v": {
        "title": "HunyuanVideo",
        "model": "hunyuan_video_t2v_720p_bf16.safetensors",
        "clip": clip("clip_l.safetensors", "llava_llama3_fp8_scaled.safetensors", type="hunyuan_video"),
        "vae": "hunyuan_video_vae_bf16.safetensors",
        "latent": video(848, 480, 73),
        "guidance": 6.0,
        "fps": 24.0,
        "solve": solve(20, 1.0, shift=7.0),
    },
    "hunyuan_video15_t2v": {
        "title": "HunyuanVideo 1.5",
        "model": "hunyuanvideo1.5_720p_t2v_fp16.safetensors",
        "vae": "hunyuanvideo15_vae_fp16.safetensors",
        "latent": video(1280, 720, 121, "EmptyHunyuanVideo15Latent"),
        "clip": clip(
            "qwen_2.5_vl_7b_fp8_scaled.safetensors",
            "byt5_small_glyphxl_fp16.safetensors",
            type="hunyuan_video_15",
        ),
        "negative": "",
        "fps": 24.0,
        "solve": solve(20, 6.0, shift=7.0),
    },
    "cogvideox_t2v": {
        "title": "CogVideoX 5B",
        "model": "CogVideoX-5b",
        "clip": clip("t5xxl_fp16.safetensors", type="cogvideox"),
        "vae": "cogvideox_vae.safetensors",
        "latent": video(720, 480, 49),
        "negative": "",
        "fps": 8.0,
        "solve": solve(50, 6.0, "ddim"),
    },
    "ltxv_t2v": {
        "title": "LTX-Video",
        "model": "ltx-video-2b-v0.9.safetensors",
        "clip": clip("t5xxl_fp16.safetensors", type="ltxv"),
        "checkpoint": "ltx-video-2b-v0.9.safetensors",
        "latent": video(768, 512, 97, "EmptyLTXVLatentVideo"),
        "negative": BAD_VIDEO,
        "rate": 25.0,
        "fps": 24.0,
        "solve": solve(30, 3.0),
        "sigmas": (
            "LTXVScheduler",
            {"steps": 30, "max_shift": 2.05, "base_shift": 0.95, "stretch": True, "terminal": 0.1},
        ),
    },
    "ltx2_t2v": {
        "title": "LTX-2 with audio",
        "model": LTX2,
        "clip": (
            "LTXAVTextEncoderLoader",
            {"text_encoder": "gemma_3_12B_it_fp4_mixed.safetensors", "ckpt_name": LTX2, "device": "default"},
        ),
        "checkpoint": LTX2,
        "latent": video(1280, 704, 121, "EmptyLTXVLatentVideo"),
        "negative": BAD_SOUND_AND_VIDEO,
        "rate": 24.0,
        "fps": 24.0,
        "audio": ("LTXVAudioVAELoader", {"ckpt_name": LTX2}),
        "solve": solve(20, 4.0, "euler_ancestral"),
        "sigmas": (
            "LTXVScheduler",
            {"steps": 20, "max_shift": 2.05, "base_shift": 0.95, "stretch": True, "terminal": 0.1},
        ),
        "note": "LTX-2.3's files work as well. ComfyUI's template makes half this size, then upscales the "
        "latent and samples it again with the distilled LoRA, which `Parallel LoRA` takes.",
    },
    "ltx2_i2v": {
        "title": "LTX-2 image to video with audio",
        "model": LTX2,
        "clip": (
            "LTXAVTextEncoderLoader",
            {"text_encoder": "gemma_3_12B_it_fp4_mixed.safetensors", "ckpt_name": LTX2, "device": "default"},
        ),
        "checkpoint": LTX2,
        "latent": video(1280, 704, 121, "EmptyLTXVLatentVideo"),
        "first_frame": ({"width": 1280, "height": 704}, 33),
        "negative": BAD_SOUND_AND_VIDEO,
        "rate": 25.0,
        "fps": 25.0,
        "audio": ("LTXVAudioVAELoader", {"ckpt_name": LTX2}),
        "solve": solve(20, 4.0),
        "sigmas": (
            "LTXVScheduler",
            {"steps": 20, "max_shift": 2.05, "base_shift": 0.95, "stretch": True, "terminal": 0.1},
        ),
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
    "minimax_h3_t2v": {
        "title": "MiniMax-H3 with audio",
        "model": "minimax_h3_fl2va_pruned_int8_convrot.safetensors",
        "clip": clip("qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", type="minimax"),
        "vae": "minimax_h3_video_vae_fp16.safetensors",
        "audio": ("VAELoader", {"vae_name": "minimax_h3_audio_vae_fp32.safetensors"}),
        "encode": "MiniMaxH3ImageToVideo",
        "latent": ("", {"width": 864, "height": 480, "length": 124}),
        "fps": 24.0,
        "solve": solve(20, 1.0, "res_multistep"),
        "note": "An image at first_frame or last_frame makes it an image to video.",
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
    "z_image_int8_txt2img": {
        "title": "Z-Image Turbo, int8",
        "model": "z_image_turbo_int8_convrot.safetensors",
        "clip": clip("qwen_3_4b_fp8_mixed.safetensors", type="lumina2"),
        "vae": "ae.safetensors",
        "latent": image_latent(),
        "solve": solve(8, 1.0, "res_multistep", shift=3.0),
        "note": QUANTIZED,
    },
    "krea2_int8_lora_txt2img": {
        "title": "Krea 2 Turbo, int8 with a LoRA",
        "model": "krea2_turbo_int8_convrot.safetensors",
        "lora": ("krea2_darkbrush.safetensors", 0.8),
        "clip": clip("qwen3vl_4b_fp8_scaled.safetensors", type="krea2"),
        "vae": "qwen_image_vae.safetensors",
        "latent": image_latent(kind="EmptyLatentImage"),
        "solve": solve(8, 1.0),
        "note": QUANTIZED,
    },
    "qwen_image_lightning_txt2img": {
        "title": "Qwen-Image in 4 steps, fp8",
        "model": "qwen_image_2512_fp8_e4m3fn.safetensors",
        "lora": ("Qwen-Image-2512-Lightning-4steps-V1.0-fp32.safetensors", 1.0),
        "clip": clip("qwen_2.5_vl_7b_fp8_scaled.safetensors", type="qwen_image"),
        "vae": "qwen_image_vae.safetensors",
        "latent": image_latent(1328, 1328),
        "solve": solve(4, 1.0, shift=3.1),
        "note": QUANTIZED,
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
        "note": QUANTIZED,
    },
}


#: Workflows whose graph is workflows/api/NAME.json -> title and note.
WRITTEN = {
    "demo": (
        "Parallel DiT demo",
        "Two processes share every denoising step of a small Flux, on the CPU, so this runs "
        "anywhere.\n\nWith "
        "two GPUs set `device` to `auto`. Try `pipefusion_degree` 2 and `ulysses_degree` 1, or both 2 (four "
        "ranks). The model knows circles, squares and triangles, left of, right of, above and below "
        "each other.",
    ),
    "flux_txt2img": ("Flux.1 dev on several GPUs", FLUX_FILES + "\n\n" + FITS),
    "flux_img2img": (
        "Image to image on several GPUs",
        FLUX_FILES + "\n\n`denoise` says how much of the image is made anew: 0.6 keeps its layout.",
    ),
    "flux_inpaint": (
        "Inpainting on several GPUs",
        FLUX_FILES
        + "\n\nRight-click the image, *Open in MaskEditor*, and paint over what should change; the "
        "rest of the latent stays as it is.",
    ),
    "parallel_model": (
        "Any sampler on several GPUs",
        "ComfyUI's own sampling nodes: **Parallel Model** makes a MODEL of a Parallel DiT. "
        + FLUX_FILES
        + "\n\nEvery sampler, guider and scheduler can follow.",
    ),
    "wan21_t2v": (
        "Wan 2.1 text to video on several GPUs",
        "Files:\n- `models/diffusion_models/wan2.1_t2v_14B_fp16.safetensors` (or 1.3B), "
        "`models/vae/wan_2.1_vae.safetensors`\n- `models/text_encoders/umt5_xxl_fp16.safetensors`\n\n"
        "`shift` 0 is the model's own (8).",
    ),
    "wan21_i2v": (
        "Wan 2.1 image to video on several GPUs",
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
        "stay loaded on the same GPUs, and auto counts both.",
    ),
}
#: Input that a node feeds -> its title, where the graph alone is kept.
TITLES = {"positive": "Positive", "negative": "Negative"}
#: All workflows, the demo first.
NAMES = [*WRITTEN, *RECIPES]
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
    return f"{recipe['title']} on several GPUs", note_of(recipe), graph


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
