"""What would change the weights behind ParallelModel's MODEL, or cannot reach the ranks: refused by name, and
the ranks stay."""

import pytest
import torch
from comfy_modules import comfy_modules
from pairs import CONFIG, ksampler
from parallel_dit.backend.client import pool
from parallel_dit.backend.protocol import RefusedError

with comfy_modules():
    import comfy.hooks
    import comfy.sd
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras import nodes_custom_sampler, nodes_flux
    from parallel_dit.nodes.host import progress
    from parallel_dit.nodes.parallel_sampler_custom import ParallelSamplerCustom


def kv_cached(model):
    """Through Flux KV Cache, which an older ComfyUI lacks."""
    if not hasattr(nodes_flux, "FluxKVCache"):
        pytest.skip("this ComfyUI has no Flux KV Cache")
    return nodes_flux.FluxKVCache.execute(model)


REFUSED = {
    "LoRA": (
        lambda m: comfy.sd.load_lora_for_models(m, None, {"some.lora_up.weight": torch.ones(2, 2)}, 1.0, 1.0),
        "a LoRA",
    ),
    "merge": (lambda m: m.get_key_patches("diffusion_model."), "a merge"),
    "save": (lambda m: m.state_dict_for_saving(), "saves the model"),
    "compile": (lambda m: set_torch_compile_wrapper(m.clone(), "inductor"), "torch.compile"),
    "compute type": (lambda m: m.clone().set_model_compute_dtype(torch.float16), "weight_dtype"),
    "attention": (lambda m: m.clone().set_model_optimized_attention(print), "attention in Parallel Config"),
    "part": (lambda m: m.clone().add_object_patch("diffusion_model.img_in", None), "diffusion_model.img_in"),
    "cached references": (kv_cached, r"Flux KV Cache .* \(index_timestep_zero\)"),
}


@pytest.mark.parametrize("change, says", REFUSED.values(), ids=REFUSED)
def test_what_would_change_weights_is_refused_at_once(flux, change, says):
    with pytest.raises(RefusedError, match=says) as error:
        change(flux.ours)
    assert "\n" not in str(error.value)


def with_patch(model, name, value):
    model = model.clone()
    model.model_options["transformer_options"][name] = value
    return model


class Control:
    """Stands for a ControlNet in a CONDITIONING."""

    def get_control(self, *args):
        return {"input": [torch.ones(1)]}

    get_models = pre_run = cleanup = get_extra_hooks = lambda self, *args: []

    def inference_memory_requirements(self, *args):
        return 0

    extra_hooks = previous_controlnet = None
    multigpu_clones = {}


STEPS_REFUSED = {
    "attention patch": (
        lambda m: with_patch(m, "patches", {"attn1_patch": [print]}),
        None,
        "'patches': attn1_patch",
    ),
    "replaced block": (
        lambda m: with_patch(m, "patches_replace", {"dit": {("double_block", 0): print}}),
        None,
        "'patches_replace': dit",
    ),
    "attention": (
        lambda m: with_patch(m, "optimized_attention_override", print),
        None,
        "another attention function .* set attention in Parallel Config",
    ),
    "a tensor": (
        lambda m: with_patch(m, "model_patch_data", {"image": torch.ones(2, 2), "nothing": []}),
        None,
        "a model patch .'model_patch_data': image.,",
    ),
    "severed video": (
        lambda m: with_patch(m, "v2a_cross_attn", False),
        None,
        "attention to video .LTXV Modality Guidance",
    ),
    "rounded keys": (
        lambda m: with_patch(m, "qwen_image21_cache", {"device": "auto", "dtype": "int8"}),
        None,
        "as int8 .Qwen Image 2.1 Cache.",
    ),
    "ControlNet": (lambda m: m, {"control": Control()}, "ControlNet"),
    "style model's mask": (
        lambda m: m,
        {"attention_mask": torch.ones(1, 76, 76), "attention_mask_img_shape": (8, 8)},
        "'attention_mask'",
    ),
    "NaN": (lambda m: m, {"pooled_output": torch.full((1, 32), float("nan"))}, "cond.y holds NaN"),
    "other encoder": (lambda m: m, {"pooled_output": torch.zeros(1, 31)}, "encoded for another model"),
}


@pytest.mark.parametrize("change, conditioning, says", STEPS_REFUSED.values(), ids=STEPS_REFUSED)
def test_what_cannot_reach_the_ranks_is_refused_by_name(flux, change, conditioning, says):
    pids = pool.backend_for(CONFIG).welcome.pids
    positive = [[flux.positive[0][0], {**flux.positive[0][1], **(conditioning or {})}]]
    with pytest.raises(RefusedError, match=says) as error:
        ksampler(flux, positive=positive)(change(flux.ours))
    assert "\n" not in str(error.value)
    assert pool.backend_for(CONFIG).welcome.pids == pids


@pytest.mark.parametrize("family", ["minimax-h3", "minimax-h3-curves"])
def test_a_noise_mask_finer_than_a_patch_is_refused_on_the_ranks_alone(pairs, family):
    """MiniMax-H3's arguments say nothing of it, and Parallel Sampler put noise back where ComfyUI's loop
    leaves x as it is. That loop runs it on Parallel Model; a mask that keeps nothing is none."""
    pair = pairs(family)
    whole = torch.ones(1, 1, *pair.noise.unbind()[0].shape[2:])
    fine = whole.clone()
    fine[..., ::2, ::2] = 0.0
    noise, sigmas = nodes_custom_sampler.RandomNoise.execute(7).result[0], torch.tensor([0.9, 0.4])

    def sample(mask):
        latent = {"samples": pair.latent, "noise_mask": mask}
        prompts = {"positive": pair.positive, "negative": pair.negative}
        return ParallelSamplerCustom.execute(
            pair.dit, noise, 3.0, "euler", sigmas, **prompts, latent_image=latent
        )

    with pytest.raises(RefusedError, match="noise mask, with which MiniMax-H3") as error:
        sample(fine)
    assert "\n" not in str(error.value)
    sample(whole)
    assert pair.error(ksampler(pair, steps=1, noise_mask=fine)) <= 1e-4


def test_where_keys_are_stored_is_the_ranks_own_matter(flux, caplog):
    """Qwen Image 2.1 Cache, which by itself changes no number."""
    assert (
        flux.error(
            lambda model: ksampler(flux, steps=1)(
                with_patch(model, "qwen_image21_cache", {"device": "cpu", "dtype": "default"})
            )
        )
        <= 1e-4
    )
    assert "stays here" not in caplog.text


def test_an_unknown_option_may_hold_tensors(flux, caplog):
    option = {"mask": torch.ones(2, 2)}
    assert flux.error(lambda model: ksampler(flux, steps=1)(with_patch(model, "mine", option))) <= 1e-4
    assert "transformer_options has 'mine', which stays here" in caplog.text


def test_an_unknown_option_is_said_under_the_node_that_samples(flux, caplog, monkeypatch):
    """Some node has set it for a reason; the log alone said that nothing came of it."""
    shown = []
    monkeypatch.setattr(progress, "node_text", lambda: shown.append)
    ksampler(flux, steps=2)(with_patch(flux.ours, "foo", 1))
    (said,) = [text for text in shown if "'foo'" in text]
    assert said.startswith("transformer_options has 'foo', which stays here: the ranks")
    assert caplog.text.count(said) == 1 and shown[-1] == said


def test_hooks_on_weights_are_refused(flux):
    hooks = comfy.hooks.create_hook_lora({"some.lora_up.weight": torch.ones(2, 2)}, 1.0, 1.0)
    with pytest.raises(RefusedError, match="LoRA hook"):
        ksampler(flux, positive=[[flux.positive[0][0], {**flux.positive[0][1], "hooks": hooks}]])(flux.ours)


def test_a_node_that_reads_the_transformer_is_told_why_it_cannot(flux):
    assert not hasattr(flux.ours.model.diffusion_model, "double_blocks")
    with pytest.raises(AttributeError, match="Parallel Model, .* diffusion_model.double_blocks"):
        _ = flux.ours.model.diffusion_model.double_blocks
