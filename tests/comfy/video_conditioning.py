"""Conditioning nodes of videos of other families than Wan; builders as in image_conditioning.py."""

import json

from tiny import GOLDEN


def image_to_video(g, positive, negative):
    positive, negative, _ = g.three(
        "InstructPixToPixConditioning", positive=positive, negative=negative, vae=g.vae(), pixels=g.image()
    )
    return positive, negative, g.latent(1, 16, 3, 15, 18, empty=True)


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


def super_resolution(g, positive, negative):
    """HunyuanVideo 1.5's second stage; as everywhere, with what the first one has made."""
    return g.three(
        "HunyuanVideo15SuperResolution",
        positive=positive,
        negative=negative,
        vae=g.vae(32, 16, 4),
        start_image=g.image(144, 112),
        clip_vision_output=g.features(width=1152),
        latent=g.latent(1, 32, 3, 7, 9),
        noise_augmentation=0.7,
    )


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
    weighed = {"strength": 0.7, "attention_mask": g.one("TestMask", width=224, height=160)}
    for frame, seed, weight in ((0, 1, {"strength": 1.0}), (-1, 2, weighed)):
        positive, negative, latent = g.three(
            "LTXVAddGuide",
            positive=positive,
            negative=negative,
            vae=vae,
            latent=latent,
            image=g.image(224, 160, seed=seed),
            frame_idx=frame,
            **weight,
        )
    return positive, negative, latent


def ltx_smaller_guides(g, positive, negative, sides=(4, 6)):
    """An image and a weighed one at half the size, as an IC-LoRA's header asks for, and one at the
    latent's."""
    latent = g.latent(1, 128, 3, *sides, empty=True)
    size = {"width": 32 * sides[1], "height": 32 * sides[0]}
    half = g.one("TestIcLoraParameters", factor=2)
    weighed = {"strength": 0.7, "attention_mask": g.one("TestMask", **size)}
    guides = [{"strength": 1.0, "iclora_parameters": half}, weighed | {"iclora_parameters": half}, weighed]
    for seed, guide in enumerate(guides, start=1):
        positive, negative, latent = g.three(
            "LTXVAddGuide",
            positive=positive,
            negative=negative,
            vae=g.vae(128, 32, 8),
            latent=latent,
            image=g.image(**size, seed=seed),
            frame_idx=8 * (seed - 1),
            **guide,
        )
    return positive, negative, latent


def ltx2_smaller_guides(g, positive, negative):
    positive, negative, video = ltx_smaller_guides(g, positive, negative)
    audio = g.latent(1, 8, 9, 16, empty=True)
    return positive, negative, g.one("LTXVConcatAVLatent", video_latent=video, audio_latent=audio)


def ltx2_image(g, positive, negative):
    """A first frame, and audio with a mask."""
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
    """A keyframe at the beginning, and an image with audio at a later frame; a prompt with an image in
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
    """Images, a video with its audio and audio alone, as the model's own node hands them over."""
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
