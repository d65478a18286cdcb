"""A CLIP whose prompts a diffusers folder's pipeline encodes: what nodes call that encode text."""

import comfy.model_management
import comfy.model_patcher
import torch

from ...backend.protocol import RefusedError
from .pipelines import TextPipeline


class DiffusersCLIP:
    """What CLIPTextEncode and other nodes that encode one text ask of a CLIP. ``patcher``: ComfyUI's handle
    of the encoders' weights, with which its memory management moves them. ``negative``: prompts are encoded
    as the pipeline encodes negative ones."""

    def __init__(self, pipeline: TextPipeline, patcher: comfy.model_patcher.ModelPatcher, negative=False):
        self.pipeline = pipeline
        self.patcher = patcher
        self.negative = negative

    def tokenize(self, text: str, return_word_ids: bool = False, **options) -> dict:
        """Return a prompt for the methods below. The pipeline makes its tokens, and reads weights,
        (word:1.2), as text. RefusedError for what is no text."""
        further = [key for key, value in options.items() if value]
        if further:
            raise RefusedError(
                f"{self.pipeline.name} encodes a text alone here, and is given {', '.join(further)} too; "
                f"encode the prompt with CLIP Text Encode."
            )
        return {"text": text}

    def encode_from_tokens_scheduled(
        self, tokens: dict, unprojected: bool = False, add_dict: dict | None = None, show_pbar: bool = True
    ) -> list:
        """Return the CONDITIONING of one prompt."""
        values = self._encode(tokens)
        return [[values.pop("cond"), {**values, **(add_dict or {})}]]

    def encode_from_tokens(self, tokens: dict, return_pooled: bool = False, return_dict: bool = False):
        """Return hidden states (1, T, E), the pooled output with them, or all values, as it is asked for."""
        values = {"pooled_output": None, **self._encode(tokens)}
        if return_dict:
            return values
        return (values["cond"], values["pooled_output"]) if return_pooled else values["cond"]

    def encode(self, text: str) -> torch.Tensor:
        """Return hidden states (1, T, E)."""
        return self._encode(self.tokenize(text))["cond"]

    def _encode(self, tokens: dict) -> dict:
        management = comfy.model_management
        device = self.patcher.load_device
        try:
            # the encoders are modules of transformers, which run where all of their weights are
            management.load_models_gpu([self.patcher], force_full_load=True)
            with torch.inference_mode():
                values = self.pipeline.encode(tokens["text"], self.negative, device)
        except management.OOM_EXCEPTION as reason:
            # a load that failed in its midst is not in ComfyUI's list: nothing else takes back what it moved
            self.patcher.detach()
            management.soft_empty_cache()
            raise RefusedError(
                f"the text encoders of {self.pipeline.name} ({self.patcher.model_size() / 2**30:.1f} GiB) "
                f"do not fit on {device}; choose device cpu in Load CLIP and VAE."
            ) from reason

        tensors = {}
        for key, value in values.items():
            dtype = torch.float32 if value.is_floating_point() else value.dtype
            tensors[key] = value.to(management.intermediate_device(), dtype)
        return tensors

    def __getattr__(self, name: str):
        raise AttributeError(
            f"this CLIP is the text encoder of a diffusers folder, which encodes text and has no {name!r}; "
            f"leave out the node that asks for it (LoRAs and hooks for text encoders, CLIP Set Last "
            f"Layer), or load the encoders with CLIPLoader."
        )


def diffusers_clips(pipeline: TextPipeline, device: str) -> tuple[DiffusersCLIP, DiffusersCLIP]:
    """Return (CLIP, CLIP for negative prompts); ``device`` as in CLIPLoader: default or cpu."""
    management = comfy.model_management
    load_device = offload_device = torch.device("cpu")
    if device != "cpu":
        load_device = management.text_encoder_device()
        offload_device = management.text_encoder_offload_device()
    patcher = comfy.model_patcher.ModelPatcher(pipeline.modules, load_device, offload_device)
    return DiffusersCLIP(pipeline, patcher), DiffusersCLIP(pipeline, patcher, negative=True)
