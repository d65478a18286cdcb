"""diffusers' own pipelines of the tiny folders: how they are called, and what they give their transformer."""

import diffusers

PROMPT, NEGATIVE = "a red fox in snow", "blurry"
#: Pipeline whose VAE is a kind of its own -> channels, pixels to a latent's side, frames to one (None: of
#: images), channels of an image.
LATENTS = {
    "SanaPipeline": (32, 32, None, 3),
    "AuraFlowPipeline": (4, 8, None, 3),
    "SkyReelsV2Pipeline": (16, 8, 4, 3),
    "MochiPipeline": (12, 8, 6, 3),
    "QwenImage21Pipeline": (64, 16, None, 4),
    "Flux3ModularPipeline": (128, 16, None, 3),
}
#: What a call of a pipeline takes besides prompts and steps, to be small.
SMALL = {
    "SanaPipeline": {"use_resolution_binning": False},
    "SanaVideoPipeline": {"use_resolution_binning": False, "frames": 5},
    "SkyReelsV2Pipeline": {"num_frames": 5},
    "MochiPipeline": {"num_frames": 7},
}
#: Steps of the graphs; diffusers' schedulers shift these as ComfyUI's schedule is shifted.
SIGMAS = [1.0, 0.75, 0.5, 0.25]
#: Pipeline -> scale of its latents, width and height of the image, cfg, the node that makes an empty
#: latent, factor from LATENT to the pipeline's latents.
GRAPHS = {
    "SanaPipeline": (32, 128, 96, 4.5, "EmptyHunyuanImageLatent", 0.41407),
    "Flux3ModularPipeline": (16, 64, 48, 3.5, "EmptyFlux2LatentImage", 1.0),
    "AuraFlowPipeline": (8, 128, 96, 3.5, "EmptyLatentImage", 0.13025),
}


def whole(folder, name: str):
    """diffusers' own pipeline, with its transformer."""
    if name != "Flux3ModularPipeline":
        return diffusers.DiffusionPipeline.from_pretrained(folder)
    blocks = diffusers.Flux3AutoBlocks()
    blocks.sub_blocks.pop("prompt_upsampler")
    pipeline = blocks.init_pipeline()
    pipeline.update_components(
        **{
            spec.name: spec.load(pretrained_model_name_or_path=str(folder), subfolder=spec.name)
            for spec in blocks.expected_components
            if spec.default_creation_method == "from_pretrained"
        }
    )
    return pipeline


def seen_by_the_transformer(pipeline, **inputs) -> list[tuple]:
    """(text, mask or None) of every sample that the pipeline gives its transformer in two steps."""
    calls = []
    pipeline.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    pipeline(prompt=PROMPT, negative_prompt=NEGATIVE, height=64, width=64, num_inference_steps=2, **inputs)
    return [
        (text, mask)
        for call in calls
        for text, mask in zip(
            call["encoder_hidden_states"],
            call["encoder_attention_mask"] if call.get("encoder_attention_mask") is not None else [None] * 9,
        )
    ]
