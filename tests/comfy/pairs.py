"""A tiny checkpoint as ComfyUI's own MODEL and as the one of ParallelModel, on two ranks."""

import torch
from comfy_modules import comfy_modules
from parallel_dit.backend.config import ParallelConfig
from safetensors.torch import load_file
from tiny import GOLDEN, facts, weights_module, write_checkpoint
from versions import skip_without, skip_without_class

with comfy_modules():
    import comfy.model_detection
    import comfy.model_patcher
    import comfy.sample
    import comfy.supported_models
    from comfy.nested_tensor import NestedTensor
    from parallel_dit.nodes.host import handle
    from parallel_dit.nodes.parallel_model import remote_model

CONFIG = ParallelConfig(cfg_degree=2, device="cpu")
CPU = torch.device("cpu")
WEIGHT_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Pair:
    """A family's tiny checkpoint as ComfyUI's own MODEL and as ours, in one precision, and a golden case's
    inputs."""

    def __init__(self, name: str, folder, dtype: torch.dtype = torch.float32):
        wanted = facts(name)
        skip_without_class(wanted["comfy_class"])
        skip_without(["LTX-2 with its connectors, nor 2.3"] if name.startswith("ltx2") else [])
        state = weights_module().state_dict(wanted["shapes"])
        # ComfyUI detects what it can, and takes some widths for those of the released sizes
        config = getattr(comfy.supported_models, wanted["comfy_class"])(
            {**comfy.model_detection.detect_unet_config(state, ""), **wanted["unet_config"]}
        )
        config.unet_config.update(
            wanted["unet_config"]
        )  # some classes put the released widths over what they are given
        config.set_inference_dtype(dtype, None)
        native = config.get_model(state)
        native.load_model_weights(state, "")
        self.native = comfy.model_patcher.ModelPatcher(native, CPU, CPU)
        path = str(write_checkpoint(folder / f"{name}.safetensors", name))
        self.dit = handle.load(CONFIG, handle.ModelChoice(path, WEIGHT_DTYPES[dtype]))
        self.ours = remote_model(self.dit)
        stored = load_file(GOLDEN / f"{name}__euler_simple.safetensors")
        self.positive, self.negative = (_conditioning(stored, branch) for branch in ("positive", "negative"))
        self.noise = (
            stored["noise"] if "noise" in stored else NestedTensor([stored["noise.0"], stored["noise.1"]])
        )
        self.latent = self.noise * 0.0

    def error(self, run) -> float:
        """Largest difference of run(MODEL)'s latents, in standard deviations."""
        with torch.inference_mode():
            wanted, found = parts(run(self.native)), parts(run(self.ours))
        assert all(torch.isfinite(want).all() for want in wanted)
        errors = [(a - b).abs().max() / b.std() for a, b in zip(found, wanted, strict=True)]
        return torch.stack(errors).max().item()  # which is NaN where one is; Python's max may drop it


def parts(latent) -> list[torch.Tensor]:
    """The latents of a sample, one or several."""
    return latent.unbind() if latent.is_nested else [latent]


def _conditioning(stored, branch):
    values = {
        key.split(".")[1]: value.item() if value.ndim == 0 else value
        for key, value in stored.items()
        if key.startswith(branch + ".")
    }
    return [[values.pop("cross_attn"), {"pooled_output": None, **values}]]


def ksampler(pair: Pair, sampler="euler", scheduler="simple", steps=4, cfg=3.0, **changes):
    """MODEL -> what KSampler's node would return for it."""
    inputs = {
        "noise": pair.noise,
        "positive": pair.positive,
        "negative": pair.negative,
        "latent_image": pair.latent,
        "disable_pbar": True,
        "seed": 7,
        **changes,
    }
    return lambda model: comfy.sample.sample(
        model, steps=steps, cfg=cfg, sampler_name=sampler, scheduler=scheduler, **inputs
    )
