"""A family's tiny checkpoint as a MODEL and as a PARALLEL_DIT in one process, and both sides' latents of a
node."""

import torch
from comfy_modules import comfy_modules
from native import native_model, parallel_dit
from safetensors.torch import load_file
from tiny import GOLDEN

with comfy_modules():
    import comfy.samplers
    from comfy_extras import nodes_custom_sampler as custom
    from comfy_extras import nodes_model_advanced as advanced
    from parallel_dit.nodes.parallel_sampler import ParallelSampler
    from parallel_dit.nodes.parallel_sampler_advanced import ParallelSamplerAdvanced
    from parallel_dit.nodes.parallel_sampler_custom import ParallelSamplerCustom

    import nodes


SEED, STEPS = 11, 4


class Pair:
    """A family's MODEL, PARALLEL_DIT, prompts and latent."""

    def __init__(self, family, folder, monkeypatch):
        self.model = native_model(family)
        self.dit, self.rank = parallel_dit(family, folder, monkeypatch)
        stored = load_file(GOLDEN / f"{family}__euler_simple.safetensors")
        self.positive, self.negative = (self._prompt(stored, name) for name in ("positive", "negative"))
        self.empty = {"samples": torch.zeros_like(stored["latent"])}
        self.plain = None
        self.latent_image = {
            "samples": torch.randn(stored["latent"].shape, generator=torch.Generator().manual_seed(1))
        }

    @staticmethod
    def _prompt(stored, name):
        values = {
            key.split(".")[1]: value.item() if value.ndim == 0 else value
            for key, value in stored.items()
            if key.startswith(name + ".")
        }
        return [[values.pop("cross_attn"), {"pooled_output": None, **values}]]

    def both(self, node: str, model=None, shift=0.0, **inputs):
        """(ComfyUI's latent, ours) of KSampler or KSamplerAdvanced."""
        inputs = {
            "steps": STEPS,
            "cfg": 2.5,
            "sampler_name": "euler",
            "scheduler": "simple",
            "positive": self.positive,
            "negative": self.negative,
            "latent_image": self.latent_image,
            **inputs,
        }
        parallel = {"KSampler": ParallelSampler, "KSamplerAdvanced": ParallelSamplerAdvanced}[node]
        with torch.inference_mode():
            (native,) = getattr(nodes, node)().sample(model=model or self.model, **inputs)
            (found,) = parallel.execute(dit=self.dit, shift=shift, **inputs).result
        return native, found


def error(native, found) -> float:
    """Largest distance in standard deviations."""
    native, found = native["samples"], found["samples"]
    assert native.shape == found.shape and native.dtype == found.dtype
    return ((native - found).abs().max() / native.std()).item()


def custom_both(pair, noise, sigmas, solver="euler", cfg=2.5, latent=None, model=None, shift=0.0):
    latent = latent or pair.latent_image
    guider = comfy.samplers.CFGGuider(model or pair.model)
    guider.set_conds(pair.positive, pair.negative)
    guider.set_cfg(cfg)
    with torch.inference_mode():
        native = custom.SamplerCustomAdvanced.execute(
            noise, guider, comfy.samplers.sampler_object(solver), sigmas.clone(), latent
        ).result
        found = ParallelSamplerCustom.execute(
            dit=pair.dit,
            noise=noise,
            cfg=cfg,
            sampler_name=solver,
            sigmas=sigmas.clone(),
            positive=pair.positive,
            negative=pair.negative,
            latent_image=latent,
            shift=shift,
        ).result
    return native, found


def shifted(model, node, **inputs):
    made = getattr(advanced, node)()
    return getattr(made, made.FUNCTION)(model, **inputs)[0]
