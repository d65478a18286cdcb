"""TEST ONLY: images, a VAE and CLIP features without weights, ComfyUI's own model of a tiny checkpoint, and
the distance of two LATENTs."""

import json
import sys
from collections import Counter

import comfy.clip_vision
import comfy.model_patcher
import comfy.supported_models
import torch
from safetensors.torch import load_file

CPU = torch.device("cpu")


def randn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def largest(errors: list) -> float:
    """Return the largest, NaN where one is; Python's max may drop it."""
    return torch.tensor(errors, dtype=torch.float64).max().item()


class TestImage:
    RETURN_TYPES, FUNCTION, CATEGORY = ("IMAGE",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "width": ("INT", {"default": 128}),
                "height": ("INT", {"default": 128}),
                "frames": ("INT", {"default": 1}),
                "seed": ("INT", {"default": 0}),
            }
        }

    def run(self, width, height, frames, seed):
        return (torch.rand((frames, height, width, 3), generator=torch.Generator().manual_seed(seed)),)


class TestMask:
    RETURN_TYPES, FUNCTION, CATEGORY = ("MASK",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"width": ("INT", {"default": 128}), "height": ("INT", {"default": 128})}}

    def run(self, width, height):
        mask = torch.zeros(1, height, width)
        mask[:, height // 4 :, width // 3 :] = 1.0
        return (mask,)


class TestLatent:
    """Random; ``empty``: zeros."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("LATENT",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "shape": ("STRING", {"default": "[1,16,16,16]"}),
                "seed": ("INT", {"default": 0}),
                "empty": ("BOOLEAN", {"default": False}),
            }
        }

    def run(self, shape, seed, empty):
        latent = randn(json.loads(shape), seed)
        return ({"samples": torch.zeros_like(latent) if empty else latent},)


class Encoder:
    """Pixels (frames, H, W, 3) -> (1, channels, [frames,] h, w): means of squares of pixels, mixed; the first
    frame of every group."""

    def __init__(self, channels, spatial, temporal):
        self.latent_channels, self.spatial, self.temporal = channels, spatial, temporal
        self.downscale_index_formula = (temporal, spatial, spatial)

    def spacial_compression_encode(self):
        return self.spatial

    def encode(self, pixels):
        means = torch.nn.functional.avg_pool2d(pixels.movedim(-1, 1), self.spatial)
        mixed = torch.einsum("cd,fdhw->fchw", 4.0 * randn((self.latent_channels, 3), 5), means - 0.5)
        if not self.temporal:
            return mixed
        return mixed[torch.arange(0, len(mixed), self.temporal)].movedim(0, 1).unsqueeze(0).contiguous()


class TestVAE:
    RETURN_TYPES, FUNCTION, CATEGORY = ("VAE",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "channels": ("INT", {"default": 16}),
                "spatial": ("INT", {"default": 8}),
                "temporal": ("INT", {"default": 0}),
            }
        }

    def run(self, channels, spatial, temporal):
        return (Encoder(channels, spatial, temporal),)


class TestAudioVae:
    """Audio (1, samples, channels) -> (1, ``channels``, 2, samples / 400), or in LTX's shape: (1,
    ``channels``, moments, frequencies)."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("VAE",), "run", "test"
    audio_sample_rate, output_sample_rate = 16000, 16000

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"channels": ("INT", {"default": 32})},
            "optional": {"frequencies": ("INT", {"default": 0})},
        }

    def run(self, channels, frequencies=0):
        self.latent_channels, self.latent_frequency_bins, self.first_stage_model = channels, frequencies, self
        return (self,)

    def num_of_latents_from_frames(self, frames, rate):
        return -(-25 * frames // int(rate))

    def encode(self, audio):
        return randn((1, self.latent_channels, 2, audio.shape[1] // 400), 6)

    def decode(self, latent):
        """(B, samples, 2)."""
        moments = latent.shape[2] if self.latent_frequency_bins else latent.shape[3]
        return latent.flatten(1).mean(dim=1).tanh().view(-1, 1, 1).expand(-1, 400 * moments, 2).contiguous()


class TestClipVision:
    RETURN_TYPES, FUNCTION, CATEGORY = ("CLIP_VISION_OUTPUT",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "rows": ("INT", {"default": 25}),
                "width": ("INT", {"default": 1280}),
                "seed": ("INT", {"default": 0}),
            }
        }

    def run(self, rows, width, seed):
        output = comfy.clip_vision.Output()
        output.penultimate_hidden_states = output.last_hidden_state = randn((1, rows, width), seed)
        return (output,)


class TestConditioningValues:
    """Sets keys of a CONDITIONING, from JSON."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "conditioning": ("CONDITIONING",),
                "values": ("STRING", {"default": "{}"}),
                "rows": ("INT", {"default": 0}),
            }
        }

    def run(self, conditioning, values, rows):
        """``rows``: cut the prompt to so many; 0 leaves it."""
        ((prompt, stored),) = conditioning
        stored = {
            key: value[:, :rows] if rows and key == "attention_mask" else value
            for key, value in stored.items()
        }
        return (
            [
                [
                    prompt[:, :rows] if rows else prompt,
                    stored
                    | {
                        key: torch.tensor(value) if isinstance(value, list) else value
                        for key, value in json.loads(values).items()
                    },
                ]
            ],
        )


class TestReferenceModel:
    """ComfyUI's own MODEL of a checkpoint in float32."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"file": ("STRING", {"default": ""}), "facts": ("STRING", {"default": ""})}}

    def run(self, file, facts):
        facts = json.loads(facts)
        config = getattr(comfy.supported_models, facts["comfy_class"])(facts["unet_config"])
        config.set_inference_dtype(torch.float32, None)
        weights = load_file(file)
        model = config.get_model(weights, "")
        missing, _ = model.diffusion_model.load_state_dict(
            config.process_unet_state_dict(weights), strict=False
        )
        assert not missing, missing
        return (comfy.model_patcher.ModelPatcher(model, CPU, CPU),)


class TestIcLoraParameters:
    """What GetICLoRAParameters reads of a LoRA's header."""

    RETURN_TYPES, FUNCTION, CATEGORY = ("IC_LORA_PARAMETERS",), "run", "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"factor": ("INT", {"default": 2})}}

    def run(self, factor):
        return ({"reference_downscale_factor": factor},)


def in_mask(latent, mask):
    """The values of ``latent`` without the gaps of a smaller guide, where ComfyUI leaves noise."""
    return latent if mask is None else latent[(mask >= 0).expand_as(latent)]


class TestLatentDistance:
    """ui text: JSON with the largest difference of two LATENTs and its root mean square, in units of the
    second's standard deviation, where no noise mask is below 0."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "test", True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "reference": ("LATENT",)}}

    def run(self, samples, reference):
        got, want = samples["samples"], reference["samples"]
        pairs = list(zip(got.unbind(), want.unbind(), strict=True)) if want.is_nested else [(got, want)]
        masks = reference.get("noise_mask")
        masks = masks.unbind() if getattr(masks, "is_nested", False) else [masks]
        if not any(mask is not None and (mask < 0).any() for mask in masks):
            masks = [None] * len(pairs)
        fits = all(a.shape == b.shape for a, b in pairs)
        parts = [(in_mask(a, m), in_mask(b, m)) for (a, b), m in zip(pairs, masks, strict=True) if fits]
        distances = [(a - b) / b.std() for a, b in parts]
        error = largest([each.abs().max().item() for each in distances]) if fits else None
        rms = largest([each.square().mean().sqrt().item() for each in distances]) if fits else None
        return {"ui": {"text": [json.dumps({"shape": list(want.shape), "error": error, "rms": rms})]}}


class TestBackendState:
    """ui text: JSON with the models on the ranks of every backend, and how many requests of each type were
    sent since the last time."""

    RETURN_TYPES, FUNCTION, CATEGORY, OUTPUT_NODE = (), "run", "test", True
    sent = Counter()

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",)}}

    @classmethod
    def IS_CHANGED(cls, samples):
        return float("nan")

    def run(self, samples):
        module = next(
            module
            for name, module in sys.modules.items()
            if name.endswith("parallel-dit.backend.client.pool")
        )
        client = sys.modules[module.__name__.removesuffix("pool") + "client"].BackendClient
        if not hasattr(client, "counted"):
            client.counted, send = True, client.send
            client.send = lambda self, message: (
                TestBackendState.sent.update([type(message).__name__]),
                send(self, message),
            )[1]
        models = sorted(
            model
            for backend in module._backends.values()
            for model in backend.client.request(module.protocol.Ping()).models
        )
        sent = dict(TestBackendState.sent)
        TestBackendState.sent.clear()
        return {"ui": {"text": [json.dumps({"models": models, "sent": sent})]}}


NODES = {
    cls.__name__: cls
    for cls in (
        TestImage,
        TestMask,
        TestLatent,
        TestVAE,
        TestAudioVae,
        TestClipVision,
        TestConditioningValues,
        TestReferenceModel,
        TestIcLoraParameters,
        TestLatentDistance,
        TestBackendState,
    )
}
