"""The LoadDiffusersCLIPVAE node: CLIP and VAE of a pipeline's folder, for encoders that ComfyUI lacks."""

import os
from pathlib import Path

import comfy.model_management
import torch
from comfy_api.latest import io

from ..backend.client.launching.dependencies import require_dependencies
from ..backend.protocol import RefusedError
from .diffusers_folder.pipelines import has_encoders, open_text, open_vae
from .diffusers_folder.text_encoder import diffusers_clips
from .diffusers_folder.vae import DiffusersVAE
from .host.model_files import diffusers_folders
from .host.refusals import errors_on_node
from .host.schema import schema


class LoadDiffusersCLIPVAE(io.ComfyNode):
    """A folder of models/diffusers -> CLIP, VAE and the CLIP of negative prompts."""

    @classmethod
    def define_schema(cls):
        return schema(
            "text encoder",
            "vae",
            "diffusers",
            "sana",
            "cogview",
            "flux.3",
            node_id="LoadDiffusersCLIPVAE",
            display_name="Load CLIP and VAE (diffusers)",
            description="Text encoders and VAE of a diffusers folder, for models that ComfyUI has no "
            "loader for (SANA, FLUX.3, CogView 4, ...). Prompts are encoded by diffusers' own "
            "pipeline.",
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=[name for name, path in diffusers_folders().items() if has_encoders(Path(path))],
                    tooltip="A pipeline's folder in models/diffusers; that of Load Parallel DiT.",
                ),
                io.Combo.Input(
                    "device",
                    options=["default", "cpu"],
                    default="default",
                    optional=True,
                    tooltip="Where the text encoders run, as in CLIPLoader.",
                ),
            ],
            outputs=[
                io.Clip.Output(
                    display_name="clip",
                    tooltip="For CLIP Text Encode. Prompts are plain text: weights, (word:1.2), are read "
                    "as text.",
                ),
                io.Vae.Output(display_name="vae", tooltip="For VAE Decode and VAE Encode."),
                io.Clip.Output(
                    display_name="negative_clip",
                    tooltip="For the CLIP Text Encode of the negative prompt, where the pipeline encodes "
                    "that otherwise: SANA puts an instruction in front of the other one.",
                ),
            ],
        )

    @classmethod
    @errors_on_node()
    def execute(cls, model_name, device="default") -> io.NodeOutput:
        path = diffusers_folders().get(model_name)
        if path is None or not os.path.isdir(path):
            raise RefusedError(
                f"model_name is {model_name!r}, which is no diffusers folder in models/diffusers; put it "
                f"there and refresh the page."
            )
        require_dependencies()
        folder = Path(path)
        management = comfy.model_management
        text = open_text(folder)
        vae = open_vae(folder, management.vae_dtype(management.vae_device(), [torch.bfloat16, torch.float32]))
        clip, negative = diffusers_clips(text, device)
        return io.NodeOutput(clip, DiffusersVAE(vae), negative)
