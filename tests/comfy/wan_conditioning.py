"""Conditioning nodes of Wan in a graph; builders as in image_conditioning.py."""

WAN_SIZE = {"width": 144, "height": 112, "length": 9, "batch_size": 1}


def first_frame(node, features=True, vae=None, batch=1, **size):
    def build(g, positive, negative):
        seen = {"clip_vision_output": g.features(width=features)} if features else {}
        return g.three(
            node,
            positive=positive,
            negative=negative,
            vae=g.vae(**(vae or {})),
            start_image=g.image(frames=1),
            **{**WAN_SIZE, "batch_size": batch, **size},
            **seen,
        )

    return build


def first_and_last_frame(g, positive, negative):
    return g.three(
        "WanFirstLastFrameToVideo",
        positive=positive,
        negative=negative,
        vae=g.vae(),
        **WAN_SIZE,
        clip_vision_start_image=g.features(seed=3),
        clip_vision_end_image=g.features(seed=4),
        start_image=g.image(seed=1),
        end_image=g.image(seed=2),
    )


WAN_FUN, WAN_FUN_22 = "WanFunControlToVideo", "Wan22FunControlToVideo"


def fun_control(node, features=False, **frames):
    """Wan Fun Control's nodes; ``frames``: input -> how many frames are connected."""

    def build(g, positive, negative):
        further = {name: g.image(frames=count, seed=count) for name, count in frames.items()}
        further |= {"clip_vision_output": g.features()} if features else {}
        return g.three(node, positive=positive, negative=negative, vae=g.vae(), **WAN_SIZE, **further)

    return build


def fun_camera(features=False, with_image=True, moved=True):
    def build(g, positive, negative):
        further = {"clip_vision_output": g.features()} if features else {}
        further |= {"start_image": g.image()} if with_image else {}
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
    """A video of the latent's size, another one, and an image."""
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
            "face_video": lambda: g.image(seed=2),  # each image costs a CPU seconds
            "pose_video": lambda: g.image(frames=5, seed=3),  # its last frame is repeated
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
