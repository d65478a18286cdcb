"""ComfyUI's own nodes that wrap sampling, on the MODEL of Parallel Model: as on its own MODEL, or refused."""

import importlib

import pytest
import torch
from comfy_modules import comfy_modules
from pairs import ksampler
from parallel_dit.backend.protocol import RefusedError

with comfy_modules():
    from comfy_api.latest import io

#: Node -> (module, its further inputs); docs/models.md lists them.
WORK = {
    # a threshold at which they skip steps: at the usual 0.2 these weights' outputs change too much
    "EasyCacheNode": ("nodes_easycache", (3.0, 0.15, 0.95, False)),
    "LazyCacheNode": ("nodes_easycache", (3.0, 0.15, 0.95, False)),
    "CFGNorm": ("nodes_cfg", (1.0,)),
    "CFGZeroStar": ("nodes_cfg", ()),
    "RescaleCFG": ("nodes_model_advanced", (0.7,)),
    "TCFG": ("nodes_tcfg", ()),
    "APG": ("nodes_apg", (1.0, 5.0, 0.0)),
    "Mahiro": ("nodes_mahiro", ()),
    "EpsilonScaling": ("nodes_eps", (1.005,)),
    # within a latent of 16 x 16, of which 20 frequencies are all
    "FreSca": ("nodes_fresca", (1.0, 1.25, 3)),
    "ModelSamplingFlux": ("nodes_model_advanced", (1.2, 0.5, 1024, 1024)),
    "DifferentialDiffusion": ("nodes_differential_diffusion", (1.0,)),
}
#: Node -> (module, its further inputs, what the refusal names).
REFUSED = {
    "NAGuidance": ("nodes_nag", (5.0, 0.5, 1.5), r"patches of .*\('patches': attn1_output_patch\)"),
    "SkipLayerGuidanceDiT": (
        *("nodes_slg", (3.0, 0.0, 1.0, "0", "0", 0.0)),
        r"replacements of .*\('patches_replace': dit\)",
    ),
    "PerturbedAttentionGuidance": ("nodes_pag", (3.0,), r"replacements of .*\('patches_replace': attn1\)"),
    "ScaleROPE": ("nodes_rope", (1.0, 0.0, 1.0, 0.0, 1.0, 0.0), r"other positions \(Scale ROPE\)"),
    "LTXVModalityGuidance": ("nodes_lt", (3.0, 0.0, 1.0), r"attention to audio \(LTXV Modality Guidance\)"),
}


def patched(model, module: str, node: str, inputs: tuple):
    """The MODEL after one of ComfyUI's nodes; the test is skipped where this ComfyUI has none of the name."""
    try:
        cls = getattr(importlib.import_module(f"comfy_extras.{module}"), node)
    except (ImportError, AttributeError):
        pytest.skip(f"this ComfyUI has no {node}")
    if issubclass(cls, io.ComfyNode):
        return cls.execute(model, *inputs).result[0]
    return getattr(cls(), cls.FUNCTION)(model, *inputs)[0]


@pytest.mark.parametrize("node", WORK)
def test_it_does_what_it_does_elsewhere(flux, node):
    """With a mask of several levels, which Differential Diffusion alone reads otherwise."""
    module, inputs = WORK[node]
    levels = torch.linspace(0.0, 1.0, flux.noise.shape[-1]).expand(1, *flux.noise.shape[-2:])
    sample = ksampler(flux, steps=5, noise_mask=levels)
    assert flux.error(lambda model: sample(patched(model, module, node, inputs))) <= 1e-4
    plain, found = sample(flux.native), sample(patched(flux.native, module, node, inputs))
    assert (plain - found).abs().max() / plain.std() > 1e-3


@pytest.mark.parametrize("family", ["lumina2", "z-image-turbo"])
def test_renorm_cfg_does_too(pairs, family):
    """Lumina 2's, and of models of its kind: it reads the channels of the transformer's latent, and limits
    the norm that guidance gives, which it does here."""
    pair = pairs(family)
    sample = ksampler(pair, steps=4, cfg=6.0)

    def renormed(model, limit=0.5):
        return sample(patched(model, "nodes_lumina2", "RenormCFG", (100.0, limit)))

    assert pair.error(renormed) <= 1e-4
    assert (renormed(pair.ours) - renormed(pair.ours, 0.0)).abs().max() > 0.1


@pytest.mark.parametrize("node", REFUSED)
def test_what_reaches_into_the_transformer_is_refused(flux, node):
    module, inputs, words = REFUSED[node]
    with pytest.raises(RefusedError, match=words) as error:
        ksampler(flux, steps=2)(patched(flux.ours, module, node, inputs))
    assert "\n" not in str(error.value)
