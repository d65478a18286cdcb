"""What the workflows of workflows/ are made of, as data: released files, encoders, latent and settings of each family.

Files and settings are those of ComfyUI's own templates; where it has none (PixArt-Sigma, Hunyuan-DiT, CogVideoX), those of the diffusers pipeline.
"""

PHOTO = "a lighthouse on a cliff at dusk, long exposure of the sea, warm light in one window"
CLIP_SCENE = "a red fox trots through fresh snow at sunrise, camera follows from the side"
EDIT = "Make it a snowy winter evening, keep everything else as it is."
BAD = "blurry, low quality, distorted, watermark"
BAD_VIDEO = "blurry, static, overexposed, distorted hands, watermark"


def clip(*names: str, **more) -> tuple[str, dict]:
    """A loader of so many text encoders."""
    if len(names) == 1:
        return "CLIPLoader", {"clip_name": names[0], "device": "default", **more}
    more |= {"device": "default"} if len(names) == 2 else {}
    return {2: "DualCLIPLoader", 3: "TripleCLIPLoader", 4: "QuadrupleCLIPLoader"}[len(names)], {f"clip_name{i}": name for i, name in enumerate(names, 1)} | more


def picture(width: int = 1024, height: int = 1024, kind: str = "EmptySD3LatentImage") -> tuple[str, dict]:
    return kind, {"width": width, "height": height, "batch_size": 1}


def video(width: int, height: int, length: int, kind: str = "EmptyHunyuanLatentVideo") -> tuple[str, dict]:
    return kind, {"width": width, "height": height, "length": length, "batch_size": 1}


def solve(steps: int, cfg: float, sampler: str = "euler", scheduler: str = "simple", shift: float = 0.0) -> dict:
    return {"steps": steps, "cfg": cfg, "sampler_name": sampler, "scheduler": scheduler, "denoise": 1.0, "shift": shift}


#: Name -> title; model (a file of models/diffusion_models, or a folder of models/diffusers); clip and vae, or a checkpoint that holds them; latent; solve.
#: Further: negative (none: zeros), guidance, fps (a video), image (an edit; its scaling node, whose size the latent takes where there is one), sigmas (a scheduler node), rate, encode, note.
RECIPES = {
    "sd35_txt2img": {
        "title": "Stable Diffusion 3.5", "model": "sd3.5_large_fp8_scaled.safetensors", "checkpoint": "sd3.5_large_fp8_scaled.safetensors", "latent": picture(), "negative": BAD,
        "solve": solve(20, 4.0, scheduler="sgm_uniform")},
    "pixart_sigma_txt2img": {
        "title": "PixArt-Sigma", "model": "PixArt-Sigma-XL-2-1024-MS", "clip": clip("t5xxl_fp16.safetensors", type="pixart"), "vae": "sdxl_vae.safetensors",
        "latent": picture(kind="EmptyLatentImage"), "negative": BAD, "solve": solve(20, 4.5, "dpmpp_2m", "normal")},
    "hunyuan_dit_txt2img": {
        "title": "Hunyuan-DiT", "model": "HunyuanDiT-v1.2-Diffusers", "checkpoint": "hunyuan_dit_1.2.safetensors", "latent": picture(kind="EmptyLatentImage"), "negative": BAD,
        "solve": solve(50, 5.0, "ddpm", "normal")},
    "chroma_txt2img": {
        "title": "Chroma", "model": "Chroma1-HD.safetensors", "clip": clip("t5xxl_fp16.safetensors", type="chroma"), "tokens": ("T5TokenizerOptions", {"min_padding": 0, "min_length": 0}),
        "vae": "ae.safetensors", "latent": picture(), "negative": BAD, "solve": solve(26, 3.5, scheduler="beta", shift=1.0)},
    "qwen_image_txt2img": {
        "title": "Qwen-Image", "model": "qwen_image_fp8_e4m3fn.safetensors", "clip": clip("qwen_2.5_vl_7b_fp8_scaled.safetensors", type="qwen_image"), "vae": "qwen_image_vae.safetensors",
        "latent": picture(1328, 1328), "negative": "", "solve": solve(20, 4.0, shift=3.1)},
    "qwen_image_edit": {
        "title": "Qwen-Image-Edit", "model": "qwen_image_edit_fp8_e4m3fn.safetensors", "clip": clip("qwen_2.5_vl_7b_fp8_scaled.safetensors", type="qwen_image"),
        "vae": "qwen_image_vae.safetensors", "image": ("ImageScaleToTotalPixels", {"upscale_method": "lanczos", "megapixels": 1.5, "resolution_steps": 1}), "encode": "TextEncodeQwenImageEdit",
        "negative": "", "solve": solve(20, 2.5, shift=3.0), "note": "ComfyUI's template also patches the model with CFGNorm; `Parallel Model` takes it."},
    "flux_kontext_edit": {
        "title": "Flux.1 Kontext", "model": "flux1-dev-kontext_fp8_scaled.safetensors", "clip": clip("clip_l.safetensors", "t5xxl_fp8_e4m3fn_scaled.safetensors", type="flux"), "vae": "ae.safetensors",
        "image": ("FluxKontextImageScale", {}), "guidance": 2.5, "solve": solve(20, 1.0)},
    "z_image_txt2img": {
        "title": "Z-Image Turbo", "model": "z_image_turbo_bf16.safetensors", "clip": clip("qwen_3_4b.safetensors", type="lumina2"), "vae": "ae.safetensors", "latent": picture(),
        "solve": solve(8, 1.0, "res_multistep", shift=3.0)},
    "krea2_txt2img": {
        "title": "Krea 2 Turbo", "model": "krea2_turbo_fp8_scaled.safetensors", "clip": clip("qwen3vl_4b_fp8_scaled.safetensors", type="krea2"), "vae": "qwen_image_vae.safetensors",
        "latent": picture(kind="EmptyLatentImage"), "solve": solve(8, 1.0)},
    "flux2_txt2img": {
        "title": "Flux.2 dev", "model": "flux2_dev_fp8mixed.safetensors", "clip": clip("mistral_3_small_flux2_bf16.safetensors", type="flux2"), "vae": "flux2-vae.safetensors",
        "latent": picture(kind="EmptyFlux2LatentImage"), "guidance": 4.0, "sigmas": ("Flux2Scheduler", {"steps": 20}), "solve": solve(20, 1.0)},
    "flux2_edit": {
        "title": "Flux.2 dev, from a picture", "model": "flux2_dev_fp8mixed.safetensors", "clip": clip("mistral_3_small_flux2_bf16.safetensors", type="flux2"), "vae": "flux2-vae.safetensors",
        "image": ("ImageScaleToTotalPixels", {"upscale_method": "lanczos", "megapixels": 1.0, "resolution_steps": 1}), "latent": picture(kind="EmptyFlux2LatentImage"), "guidance": 4.0,
        "sigmas": ("Flux2Scheduler", {"steps": 20}), "solve": solve(20, 1.0), "note": "One `Set Reference Latent` for each further picture."},
    "lumina2_txt2img": {
        "title": "Lumina-Image 2.0", "model": "lumina_2_model_bf16.safetensors", "clip": clip("gemma_2_2b_fp16.safetensors", type="lumina2"), "vae": "ae.safetensors", "latent": picture(),
        "encode": "CLIPTextEncodeLumina2", "negative": BAD, "solve": solve(30, 4.0, "res_multistep")},
    "hidream_txt2img": {
        "title": "HiDream-I1 Full", "model": "hidream_i1_full_fp8.safetensors", "vae": "ae.safetensors", "latent": picture(), "negative": BAD, "solve": solve(50, 5.0, "uni_pc", shift=3.0),
        "clip": clip("clip_l_hidream.safetensors", "clip_g_hidream.safetensors", "t5xxl_fp8_e4m3fn_scaled.safetensors", "llama_3.1_8b_instruct_fp8_scaled.safetensors")},
    "kandinsky5_t2v": {
        "title": "Kandinsky 5 Lite", "model": "kandinsky5lite_t2v_sft_5s.safetensors", "clip": clip("qwen_2.5_vl_7b_fp8_scaled.safetensors", "clip_l.safetensors", type="kandinsky5"),
        "vae": "hunyuan_video_vae_bf16.safetensors", "latent": video(768, 512, 121, "Kandinsky5ImageToVideo"), "negative": BAD_VIDEO, "fps": 24.0,
        "solve": solve(50, 5.0, "euler_ancestral", "beta", 5.0)},
    "hunyuan_video_t2v": {
        "title": "HunyuanVideo", "model": "hunyuan_video_t2v_720p_bf16.safetensors", "clip": clip("clip_l.safetensors", "llava_llama3_fp8_scaled.safetensors", type="hunyuan_video"),
        "vae": "hunyuan_video_vae_bf16.safetensors", "latent": video(848, 480, 73), "guidance": 6.0, "fps": 24.0, "solve": solve(20, 1.0, shift=7.0)},
    "hunyuan_video15_t2v": {
        "title": "HunyuanVideo 1.5", "model": "hunyuanvideo1.5_720p_t2v_fp16.safetensors", "vae": "hunyuanvideo15_vae_fp16.safetensors", "latent": video(1280, 720, 121, "EmptyHunyuanVideo15Latent"),
        "clip": clip("qwen_2.5_vl_7b_fp8_scaled.safetensors", "byt5_small_glyphxl_fp16.safetensors", type="hunyuan_video_15"), "negative": "", "fps": 24.0, "solve": solve(20, 6.0, shift=7.0)},
    "cogvideox_t2v": {
        "title": "CogVideoX 5B", "model": "CogVideoX-5b", "clip": clip("t5xxl_fp16.safetensors", type="cogvideox"), "vae": "cogvideox_vae.safetensors", "latent": video(720, 480, 49),
        "negative": "", "fps": 8.0, "solve": solve(50, 6.0, "ddim")},
    "ltxv_t2v": {
        "title": "LTX-Video", "model": "ltx-video-2b-v0.9.safetensors", "clip": clip("t5xxl_fp16.safetensors", type="ltxv"), "checkpoint": "ltx-video-2b-v0.9.safetensors",
        "latent": video(768, 512, 97, "EmptyLTXVLatentVideo"), "negative": BAD_VIDEO, "rate": 25.0, "fps": 24.0, "solve": solve(30, 3.0),
        "sigmas": ("LTXVScheduler", {"steps": 30, "max_shift": 2.05, "base_shift": 0.95, "stretch": True, "terminal": 0.1})},
}


def note_of(recipe: dict) -> str:
    """Which files go where, and how to share the work on more or fewer GPUs."""
    model, checkpoint = recipe["model"], recipe.get("checkpoint")
    holds = "VAE" if "clip" in recipe else "VAE and text encoders"
    files = [f"- `models/diffusion_models/{model}`" if model.endswith(".safetensors") else f"- `models/diffusers/{model}`: the folder that is published for diffusers"]
    if checkpoint == model:
        files[0] += f"; the same file, or a link to it, in `models/checkpoints` for its {holds}"
    elif checkpoint:
        files.append(f"- `models/checkpoints/{checkpoint}`, for its {holds}")
    if "clip" in recipe:
        names = [value for key, value in recipe["clip"][1].items() if key.startswith("clip_name")]
        files.append("- `models/text_encoders`: " + ", ".join(f"`{name}`" for name in names))
    if "vae" in recipe:
        files.append(f"- `models/vae/{recipe['vae']}`")
    how = ("`cfg_degree` 2: one GPU has the prompt, the other the negative prompt. Four GPUs: `ulysses_degree` or `pipefusion_degree` 2 beside it." if recipe["solve"]["cfg"] != 1.0 else
           "The model fits on each GPU: `ulysses_degree`. It does not: `pipefusion_degree` 2, `ulysses_degree` 1.")
    return "\n".join(["Two GPUs. Files:", *files, "", how, *([recipe["note"]] if "note" in recipe else [])])


def graph_of(name: str) -> tuple[str, str, dict]:
    """(title, note, the graph as /prompt takes it, with titles under ``_meta``); nodes are numbered from 2, after the note."""
    recipe, graph = RECIPES[name], {}

    def add(kind: str, title: str | None = None, **inputs) -> str:
        key = str(len(graph) + 2)
        graph[key] = {"class_type": kind, "inputs": inputs} | ({"_meta": {"title": title}} if title else {})
        return key

    is_video, settings = "fps" in recipe, recipe["solve"]
    checkpoint = add("CheckpointLoaderSimple", ckpt_name=recipe["checkpoint"]) if "checkpoint" in recipe else None
    clip_ = [add(recipe["clip"][0], **recipe["clip"][1]), 0] if "clip" in recipe else [checkpoint, 1]
    if "tokens" in recipe:
        clip_ = [add(recipe["tokens"][0], clip=clip_, **recipe["tokens"][1]), 0]
    config = add("ParallelConfig", **({"ulysses_degree": 2} if settings["cfg"] == 1.0 else {"cfg_degree": 2}))
    vae = [add("VAELoader", vae_name=recipe["vae"]), 0] if "vae" in recipe else [checkpoint, 2]
    picture_ = None
    if "image" in recipe:
        kind, more = recipe["image"]
        picture_ = [add(kind, image=[add("LoadImage", image="example.png"), 0], **more), 0]
    dit = [add("LoadParallelDiT", config=[config, 0], model_name=recipe["model"], weight_dtype="default"), 0]

    def prompt(text: str, title: str) -> list:
        encode = recipe.get("encode", "CLIPTextEncode")
        inputs = {"CLIPTextEncode": {"text": text}, "CLIPTextEncodeLumina2": {"system_prompt": "superior", "user_prompt": text},
                  "TextEncodeQwenImageEdit": {"prompt": text, "vae": vae, "image": picture_}}[encode]
        return [add(encode, title, clip=clip_, **inputs), 0]

    plain = positive = prompt(EDIT if picture_ else CLIP_SCENE if is_video else PHOTO, "Positive")
    latent, size = [add("VAEEncode", pixels=picture_, vae=vae), 0] if picture_ else None, {}
    if picture_ and "encode" not in recipe:
        positive = [add("ReferenceLatent", conditioning=positive, latent=latent), 0]
    if picture_ and "latent" in recipe:
        measured = add("GetImageSize", image=picture_)
        latent, size = None, {"width": [measured, 0], "height": [measured, 1]}
    if "guidance" in recipe:
        positive = [add("FluxGuidance", conditioning=positive, guidance=recipe["guidance"]), 0]
    negative = prompt(recipe["negative"], "Negative") if "negative" in recipe else [add("ConditioningZeroOut", "Negative (unused at cfg 1.0)", conditioning=plain), 0]
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
    wired = {"dit": dit, "positive": positive, "negative": negative, "latent_image": latent}
    if "sigmas" in recipe:
        kind, more = recipe["sigmas"]
        more = more | {"LTXVScheduler": {"latent": latent}, "Flux2Scheduler": {key: size[key] for key in ("width", "height") if key in size}}[kind]
        sampled = add("ParallelSamplerCustom", **wired, noise=[add("RandomNoise", noise_seed=7), 0], sigmas=[add(kind, **more), 0],
                      **{key: settings[key] for key in ("cfg", "sampler_name", "shift")})
    else:
        sampled = add("ParallelSampler", **wired, seed=7, **settings)
    images = [add("VAEDecode", samples=[sampled, 0], vae=vae), 0]
    prefix = f"parallel-{name.rsplit('_', 1)[0].replace('_', '-')}"
    if is_video:
        add("SaveAnimatedWEBP", images=images, filename_prefix=prefix, fps=recipe["fps"], lossless=False, quality=85, method="default")
    else:
        add("SaveImage", images=images, filename_prefix=prefix)
    return f"{recipe['title']} on several GPUs", note_of(recipe), graph
