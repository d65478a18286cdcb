"""TEST ONLY: a golden case as graph objects, the distance of a LATENT from its result, and loaders of
encoders without weights, as nodes of a real ComfyUI."""

import json
import zlib
from types import SimpleNamespace

import comfy.utils
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from .images import NODES, largest
from .messages import TestSentMessages

try:
    from comfy.nested_tensor import NestedTensor
except ImportError:  # ComfyUI 0.3.64, which has no models of several latents
    NestedTensor = None

# ComfyUI leaves out a step that comes sooner than this after another (seconds), where there is no preview:
# here every step counts
comfy.utils.PROGRESS_THROTTLE_MIN_INTERVAL = 0.0


class TestGoldenInputs:
    RETURN_TYPES = ("CONDITIONING", "CONDITIONING", "LATENT")
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "file": ("STRING", {"default": ""}),
                "change": (["nothing", "nan", "channels", "area", "control"],),
            },
            "optional": {"run": ("INT", {"default": 0})},  # another number: nothing of it is in the cache
        }

    def run(self, file, change, run=0):
        stored = load_file(file)
        positive, negative = (self._conditioning(stored, name) for name in ("positive", "negative"))
        latent = {"samples": self._latent(stored, "latent")}
        if "noise_mask" in stored:
            latent["noise_mask"] = stored["noise_mask"]
        if change == "nan":
            latent["samples"] = latent["samples"] + float("nan")
        elif change == "channels":
            latent["samples"] = latent["samples"][:, :4] + 1.0
        elif change == "area":
            positive[0][1]["area"] = (4, 4, 0, 0)
        elif change == "control":
            positive[0][1]["control"] = object()
        return positive, negative, latent

    @staticmethod
    def _latent(stored, name):
        return stored[name] if name in stored else NestedTensor([stored[f"{name}.0"], stored[f"{name}.1"]])

    @staticmethod
    def _conditioning(stored, name):
        values = {
            key.split(".")[1]: value.item() if value.ndim == 0 else value
            for key, value in stored.items()
            if key.startswith(name + ".")
        }
        return [[values.pop("cross_attn"), {"pooled_output": None, **values}]]


class TestGoldenError:
    """ui text: JSON with the largest error in units of the golden latent's standard deviation."""

    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"samples": ("LATENT",), "file": ("STRING", {"default": ""})}}

    def run(self, samples, file):
        want, got = TestGoldenInputs._latent(load_file(file), "samples"), samples["samples"]
        pairs = list(zip(got.unbind(), want.unbind(), strict=True)) if want.is_nested else [(got, want)]
        errors = [((a - b) / b.std()).abs().max().item() if a.shape == b.shape else None for a, b in pairs]
        error = None if None in errors else largest(errors)
        return {"ui": {"text": [json.dumps({"shape": list(got.shape), "error": error})]}}


class TestText:
    """In place of a text encoder's loader: CONDITIONING of a tiny model's widths, another one for each
    text."""

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {
                "width": ("INT", {"default": 64, "max": 4096}),
                "pooled": ("INT", {"default": 32}),
                "rows": ("INT", {"default": 12}),
            }
        }

    def run(self, width, pooled, rows):
        self.width, self.pooled, self.rows = width, pooled, rows
        return (self,)

    def tokenize(self, text, **options):
        return text

    def encode_from_tokens_scheduled(self, text, **options):
        def draw(*shape):
            return torch.randn(*shape, generator=torch.Generator().manual_seed(zlib.crc32(text.encode())))

        return [[draw(1, self.rows, self.width), {"pooled_output": draw(1, self.pooled)}]]


class TestGoldenText(TestText):
    """As TestText, with what a golden case's prompt holds: masks as they are, the rest drawn anew for each
    text."""

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"file": ("STRING", {"default": ""})}}

    def run(self, file):
        self.stored = TestGoldenInputs._conditioning(load_file(file), "positive")
        return (self,)

    def clone(self):
        return self

    def set_tokenizer_option(self, name, value):
        pass

    def encode_from_tokens_scheduled(self, text, **options):
        draws = torch.Generator().manual_seed(zlib.crc32(text.encode()))

        def drawn(value):
            return (
                torch.randn(value.shape, generator=draws)
                if isinstance(value, torch.Tensor) and value.is_floating_point()
                else value
            )

        ((prompt, values),) = self.stored
        return [
            [
                drawn(prompt),
                {key: drawn(value) for key, value in values.items() if key not in ("guidance", "frame_rate")},
            ]
        ]


class TestTextWithImages(TestGoldenText):
    """As TestGoldenText with texts of several lengths, and with the places of images that Qwen-Image 2.1's
    encoder tells of a prompt."""

    def tokenize(self, text, images=(), keep_vision=False, **options):
        self.slots = [] if keep_vision else [2 * i + 1 for i in range(len(images))]
        return text

    def encode_from_tokens_scheduled(self, text, **options):
        ((prompt, values),) = super().encode_from_tokens_scheduled(text)
        return [
            [prompt[:, : 5 + len(text) % 8], values | ({"image_slots": self.slots} if self.slots else {})]
        ]


class TestCheckpoint:
    """In place of a checkpoint's loader: TestGoldenText and TestVae."""

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {**TestGoldenText.INPUT_TYPES()["required"], **TestVae.INPUT_TYPES()["required"]},
            "optional": TestVae.INPUT_TYPES()["optional"],
        }

    def run(self, file, **vae):
        return (None, *TestGoldenText().run(file), *TestVae().run(**vae))


class TestVae:
    """In place of a VAE's loader: ``channels`` of ``scale`` x ``scale`` pixels' mean colour, and 4 frames to
    one where the images are frames of a video."""

    RETURN_TYPES = ("VAE",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"video": ("BOOLEAN", {"default": False})},
            "optional": {"scale": ("INT", {"default": 8}), "channels": ("INT", {"default": 16})},
        }

    def run(self, video, scale=8, channels=16):
        self.video, self.scale, self.channels, self.downscale_index_formula = (
            video,
            scale,
            channels,
            (4, scale, scale),
        )
        return (self,)

    def encode(self, pixels):
        means = F.avg_pool2d(pixels.movedim(-1, 1)[:, :3], self.scale) * 2 - 1
        latent = means.repeat(1, -(-self.channels // 3), 1, 1)[:, : self.channels]
        return latent[::4].movedim(1, 0)[None] if self.video else latent

    def decode(self, latent):
        if latent.ndim == 5:
            return torch.stack(
                [self.decode(frames).repeat_interleave(4, dim=0)[3:] for frames in latent.movedim(1, 2)]
            )
        return F.interpolate(latent[:, :3] / 2 + 0.5, scale_factor=self.scale).movedim(1, -1).clamp(0, 1)

    def decode_tiled(self, latent, **tiles):
        return self.decode(latent)

    def temporal_compression_decode(self):
        return 4 if self.video else None

    def spacial_compression_decode(self):
        return self.scale


class TestVision:
    """In place of a CLIP vision loader."""

    RETURN_TYPES = ("CLIP_VISION",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}}

    def run(self):
        return (self,)

    def encode_image(self, image, crop=True):
        return SimpleNamespace(
            penultimate_hidden_states=torch.randn(1, 257, 1280, generator=torch.Generator().manual_seed(0))
            * image.mean()
        )


class TestNativeModel:
    """ComfyUI's own model of a golden family in float32, from its FAMILY.json and a single file: what
    UNETLoader makes of files of released sizes."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"family": ("STRING", {"default": ""}), "file": ("STRING", {"default": ""})}}

    def run(self, family, file):
        import comfy.model_patcher
        import comfy.supported_models

        with open(family) as text:
            facts = json.load(text)
        # this entry of Flux came after the golden files
        config = getattr(comfy.supported_models, facts["comfy_class"])(
            ({"txt_ids_dims": []} if facts["comfy_class"] == "Flux" else {}) | facts["unet_config"]
        )
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model({}, device="cpu").eval()
        model.load_model_weights(load_file(file), "")
        return (comfy.model_patcher.ModelPatcher(model, torch.device("cpu"), torch.device("cpu")),)


class TestLatentError:
    """ui text: JSON with the largest difference of two latents, in standard deviations of the second."""

    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"ours": ("LATENT",), "theirs": ("LATENT",)}}

    def run(self, ours, theirs):
        a, b = ours["samples"], theirs["samples"]
        return {"ui": {"text": [json.dumps(((a - b) / b.std()).abs().max().item())]}}


NODE_CLASS_MAPPINGS = {
    cls.__name__: cls
    for cls in (
        TestGoldenInputs,
        TestGoldenError,
        TestText,
        TestGoldenText,
        TestTextWithImages,
        TestCheckpoint,
        TestVae,
        TestVision,
        TestNativeModel,
        TestLatentError,
        TestSentMessages,
    )
} | NODES
