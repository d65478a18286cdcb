"""The arguments that ComfyUI's model objects make, where they are no tensors or not those that the backend
takes: one function a family, model arguments -> model arguments."""

from types import SimpleNamespace

import torch

from ...backend.protocol import RefusedError


def connectors_stand_in(config: dict):
    """Return a function in the place of ComfyUI's connectors, which are on the ranks: it marks a prompt that
    they have yet to finish by one more feature, where its width does not show that."""

    def connectors(states, unprocessed=False):
        marked = unprocessed and not config["use_prompt_embeddings"]
        return torch.nn.functional.pad(states, (0, 1)) if marked else states

    return connectors


def ltx2_transformer_attributes(config: dict) -> dict:
    """Return what ComfyUI's LTXAV reads of its transformer: what takes the place of its connectors, and, for
    guides in context windows, how a latent becomes tokens and where these are in pixels."""
    from comfy.ldm.lightricks.symmetric_patchifier import SymmetricPatchifier

    return {
        "preprocess_text_embeds": connectors_stand_in(config),
        "patchifier": SymmetricPatchifier(1, start_end=True),
        "vae_scale_factors": (8, 32, 32),
        "causal_temporal_positioning": True,
    }


def ltx2(arguments: dict) -> dict:
    """Return LTX-2's arguments; text that connectors_stand_in marked by one more feature loses it."""
    text = arguments["c_crossattn"]
    frames = arguments.get("generated_keyframes")
    if text.shape[2] % 2:  # connectors_stand_in has marked it
        arguments = {**arguments, "c_crossattn": text[..., :-1], "unprocessed_ltxav_embeds": True}
    tensors = ltxv(arguments)
    if frames:
        names = ("first_latent_frame", "num_keyframes", "tokens_per_frame")
        tensors["generated_keyframes"] = torch.tensor([[frames[name] for name in names]])
    return tensors


#: Reference tokens of ComfyUI's MiniMax-H3 layout, which are not denoised -> video (0) or audio (2).
MINIMAX_REFERENCES = {"cond": 0, "ref_img": 0, "cond_audio": 2, "ref_audio": 2}
#: What else its payload holds: the backend knows it by itself, or it is in the layout.
MINIMAX_KNOWN = set(
    "seed audio_scale layout text_token_tags keyframes refs cond_video_latents cond_audio_latents "
    "visual_cond_noise_aug audio_cond_noise_aug".split()
)


#: Values of a mask from here on are 1 to ComfyUI's model.
MINIMAX_KEEPS_NOTHING = 1.0 - 1e-3
MINIMAX_MASKED = (
    "latent_image has a noise mask, with which MiniMax-H3 denoises tokens at times and noise levels of their "
    "own; the ranks do not run that: remove the mask, or sample with KSampler and an ordinary MODEL."
)


def check_minimax_mask(mask: torch.Tensor):
    """Raise RefusedError for a noise mask that keeps something, if only within a patch of 2 x 2, of which the
    model's arguments say nothing: the loop on the ranks puts noise back where this model's leaves x."""
    if (mask < MINIMAX_KEEPS_NOTHING).any():
        raise RefusedError(MINIMAX_MASKED)


def minimax_h3(arguments: dict) -> dict:
    """Return ComfyUI's payload as tensors: reference tokens of keyframes and images by its own model's code,
    their positions by its layout, and which tokens of text are images. RefusedError for a noise mask."""
    if {"denoise_mask", "audio_denoise_mask"} & arguments.keys():
        raise RefusedError(MINIMAX_MASKED)
    payload = arguments.get("minimax_payload", {})
    tensors = {key: value for key, value in arguments.items() if key != "minimax_payload"}
    further = sorted(payload.keys() - MINIMAX_KNOWN)
    if further:
        raise RefusedError(
            f"the prompt carries {', '.join(further)}, which the ranks do not know; remove the node that "
            f"sets it, or sample with KSampler and an ordinary MODEL."
        )
    tags = payload.get("text_token_tags")
    if tags is not None and (tags != 1).any():
        tensors["text_tags"] = tags.reshape(1, -1)
    layout = payload.get("layout")
    segments = layout.segments if layout else []
    references = [segment for segment in segments if segment[2] in MINIMAX_REFERENCES]
    return tensors | _minimax_references(payload, layout, references) if references else tensors


def _minimax_references(payload: dict, layout, references: list[tuple[int, int, str]]) -> dict:
    """Return the tokens of ``references``, (start, stop, kind) in the layout, with their times, tags and
    positions, and the position at which the audio begins."""
    from comfy.ldm.minimax import model

    own = SimpleNamespace(patch_size=(1, 2, 2))
    tokens = {
        "given_video": model.MiniMaxH3Model._cond_video_rows(own, payload, "cpu"),
        "given_audio": model.MiniMaxH3Model._cond_audio_rows(own, payload, "cpu"),
    }
    video_time = payload.get("visual_cond_noise_aug", model.VISUAL_COND_TIMESTEP)
    audio_time = payload.get("audio_cond_noise_aug", model.AUDIO_COND_TIMESTEP)
    tags = [torch.full((stop - start,), MINIMAX_REFERENCES[kind]) for start, stop, kind in references]
    positions = [layout.position_ids[start:stop] for start, stop, _ in references]
    audio = next(start for start, _, kind in layout.segments if kind == "audio")
    return {
        **{name: value[None] for name, value in tokens.items() if value is not None},
        "given_times": torch.tensor([[video_time, audio_time]]),
        "origin": layout.position_ids[audio, 0],
        "given_tags": torch.cat(tags)[None],
        "given_positions": torch.cat(positions)[None],
    }


def ltxv(arguments: dict) -> dict:
    """Return the arguments of LTX-Video and LTX-2: guides become ``guide_weights``, the weight of each of
    their tokens, unless all are 1. Generated keyframes are dropped, which ``ltx2`` alone sends."""
    dropped = ("generated_keyframes", "guide_attention_entries")
    tensors = {key: value for key, value in arguments.items() if key not in dropped}
    guides = arguments.get("guide_attention_entries") or []
    counts = [guide["pre_filter_count"] for guide in guides]
    present = _present(arguments.get("denoise_mask"), sum(counts))
    parts = zip(guides, present.split(counts))
    weights = [_guide_weights(guide, int(part.sum())) for guide, part in parts]
    if any((each != 1.0).any() for each in weights):
        tensors["guide_weights"] = _placed(torch.cat(weights, dim=1), present)
    return tensors


def _present(mask: torch.Tensor | None, count: int) -> torch.Tensor:
    """Return which of the last ``count`` tokens, the guides', ComfyUI's model is given: all but the gaps of a
    smaller guide, where the mask is below 0."""
    if mask is None or mask[0, 0].numel() < count:  # the ranks refuse these guides
        return torch.ones(count, dtype=torch.bool)
    present = (mask[0] >= 0).all(dim=0).flatten().cpu()
    return present[len(present) - count :]


def _guide_weights(guide: dict, count: int) -> torch.Tensor:
    """Return (1, at most ``count`` tokens): a guide's strength, times its attention mask as ComfyUI's own
    model reduces it."""
    mask = guide.get("pixel_mask")
    if mask is None:
        return torch.full((1, count), guide["strength"], dtype=torch.float32)
    from comfy.ldm.lightricks.model import LTXVModel

    reduced = LTXVModel._downsample_mask_to_latent(mask.float().cpu(), *guide["latent_shape"])
    return reduced[:1, :count] * guide["strength"]


def _placed(weights: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    """Return (1, tokens of guides): ``weights`` at those that are ``present``, in order, and 1 elsewhere."""
    placed = torch.ones(1, len(present))
    places = present.nonzero()[: weights.shape[1], 0]
    placed[:, places] = weights[:, : len(places)]
    return placed


def qwen_image21(arguments: dict) -> dict:
    """Return the places of the references as a tensor, the same for every sample. As in ComfyUI's own
    transformer, places of missing images are left out and every token of the prompt is seen."""
    tensors = {key: value for key, value in arguments.items() if key not in ("attention_mask", "image_slots")}
    slots = arguments.get("image_slots", ())[: len(arguments.get("ref_latents", ()))]
    if slots:
        tensors["image_slots"] = torch.tensor([slots], dtype=torch.long)
    return tensors


def hunyuan_video15(arguments: dict) -> dict:
    """Return the arguments without super resolution's ``disable_time_r`` of False: the ranks tell every model
    that reads it where a step ends. True, which no node of ComfyUI's sets, stays and is refused."""
    sent = dict(arguments)
    if sent.get("disable_time_r") is False:
        del sent["disable_time_r"]
    return sent


def wan_vace(arguments: dict) -> dict:
    """Return the strength of each control video as a tensor, the same for every sample."""
    return arguments | {"vace_strength": torch.tensor([arguments["vace_strength"]], dtype=torch.float32)}
