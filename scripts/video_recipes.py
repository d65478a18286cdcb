"""Recipes of workflows that make a video, some with audio; workflow_recipes.py says what an entry holds."""

from recipe_parts import BAD_VIDEO, clip, solve, video

BAD_SOUND_AND_VIDEO = (
    "blurry, low quality, still frame, frames, watermark, overlay, titles, has blurbox, has subtitles"
)
LTX2 = "ltx-2-19b-dev-fp8.safetensors"

VIDEO_RECIPES = {
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
}
