"""TEST ONLY: a golden case as graph objects, and the distance of a LATENT from its result, as nodes of a real ComfyUI."""

import json

from safetensors.torch import load_file


class TestGoldenInputs:
    RETURN_TYPES = ("CONDITIONING", "CONDITIONING", "LATENT")
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"file": ("STRING", {"default": ""}), "change": (["nothing", "nan", "channels", "area", "control", "combine", "range"],)}}

    def run(self, file, change):
        stored = load_file(file)
        positive, negative = (self._conditioning(stored, name) for name in ("positive", "negative"))
        latent = {"samples": stored["latent"]}
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
        elif change == "combine":
            positive = positive + positive
        elif change == "range":
            positive[0][1].update(start_percent=0.0, end_percent=0.5)
        return positive, negative, latent

    @staticmethod
    def _conditioning(stored, name):
        values = {key.split(".")[1]: value.item() if value.ndim == 0 else value for key, value in stored.items() if key.startswith(name + ".")}
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
        want, got = load_file(file)["samples"], samples["samples"]
        error = ((got - want) / want.std()).abs().max().item() if got.shape == want.shape else None
        return {"ui": {"text": [json.dumps({"shape": list(got.shape), "error": error})]}}


NODE_CLASS_MAPPINGS = {"TestGoldenInputs": TestGoldenInputs, "TestGoldenError": TestGoldenError}
