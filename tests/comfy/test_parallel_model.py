"""The MODEL of ParallelModel against ComfyUI's own model of the same tiny checkpoint, in ComfyUI's own
samplers and guiders."""

import os
import signal
import threading
import time

import pytest
import torch
from comfy_modules import comfy_modules
from families import LATENT_FORMATS
from pairs import CONFIG, Pair, ksampler
from parallel_dit.backend.client import pool
from parallel_dit.backend.protocol import BackendError, Ping
from tiny import facts

with comfy_modules():
    import comfy.model_management
    import comfy.model_sampling
    import comfy.samplers
    from comfy.patcher_extension import WrappersMP
    from comfy_extras import nodes_custom_sampler
    from comfy_extras.nodes_custom_sampler import Guider_Basic, Guider_DualCFG
    from comfy_extras.nodes_easycache import EasyCacheNode
    from parallel_dit.backend.client import argument_cache
    from parallel_dit.nodes.comfy_models.registry import OURS
    from parallel_dit.nodes.parallel_model import remote_model

#: Families whose timesteps are noise levels times 1000 (Wan, SD3), or of a discrete schedule (PixArt,
#: HunyuanDiT), and those of several latents.
OTHERS = ["wan21-t2v", "pixart-sigma", "sd3", "hunyuan-dit", "ltx2", "minimax-h3"]


@pytest.mark.parametrize(
    "sampler, scheduler",
    [
        ("euler", "simple"),
        ("dpmpp_2m", "beta"),
        ("heun", "simple"),
        ("euler_ancestral", "simple"),
        ("uni_pc", "simple"),
        ("dpmpp_sde", "simple"),
        ("dpm_fast", "simple"),
        ("res_multistep_cfg_pp", "kl_optimal"),
    ],
)
def test_flux_in_ksampler(flux, sampler, scheduler):
    """The last two are solvers that the backend does not have."""
    assert flux.error(ksampler(flux, sampler, scheduler)) <= 1e-4


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m_sde"])
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_in_ksampler(pairs, family, sampler):
    pair = pairs(family)
    assert pair.error(ksampler(pair, sampler, steps=3)) <= 1e-4


@pytest.mark.parametrize(
    "family",
    [
        family
        for family in LATENT_FORMATS
        if family not in ("flux-dev", *OTHERS) and facts(family)["comfy_class"] not in OURS
    ],
)
def test_every_other_family_in_one_step(pairs, family):
    pair = pairs(family)
    assert pair.error(ksampler(pair, steps=1, denoise=0.5)) <= 1e-4


def regional(kind: str, prompts) -> list:
    """Two prompts for parts of the image or of the sampling, as ConditioningSetArea, SetMask and
    SetTimestepRange leave them."""
    (whole, values), (other, others) = prompts
    if kind == "area":
        return [[whole, values], [other, {**others, "area": (8, 10, 4, 2), "strength": 0.8}]]
    if kind == "mask":
        mask = torch.zeros(1, 128, 128)
        mask[:, :, 64:] = 1.0
        return [
            [whole, {**values, "mask": 1.0 - mask, "mask_strength": 1.0}],
            [other, {**others, "mask": mask, "mask_strength": 0.7}],
        ]
    return [
        [whole, {**values, "start_percent": 0.0, "end_percent": 0.5}],
        [other, {**others, "start_percent": 0.5, "end_percent": 1.0}],
    ]


@pytest.mark.parametrize("kind", ["area", "mask", "range"])
def test_regional_prompts(flux, kind):
    prompts = regional(kind, [flux.positive[0], flux.negative[0]])
    assert flux.error(ksampler(flux, positive=prompts)) <= 1e-4


def test_inpainting_a_batch_from_a_later_step(flux):
    """noise_mask, three latents, KSampler (Advanced)'s start and end, leftover noise."""
    generator = torch.Generator().manual_seed(3)
    noise, latent = (torch.randn(3, *flux.noise.shape[1:], generator=generator) for _ in range(2))
    mask = torch.zeros(1, 1, *noise.shape[2:])
    mask[..., 5:] = 1.0
    assert (
        flux.error(
            ksampler(
                flux,
                "dpmpp_2m",
                steps=6,
                noise=noise,
                latent_image=latent,
                noise_mask=mask,
                start_step=2,
                last_step=5,
            )
        )
        <= 1e-4
    )


def guided(guider, pair: Pair, scheduler="simple", sampler="euler"):
    """MODEL -> what SamplerCustomAdvanced returns: ``guider`` makes one of it."""

    def run(model):
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), scheduler, 4)
        return guider(model).sample(
            pair.noise, pair.latent, comfy.samplers.sampler_object(sampler), sigmas, disable_pbar=True, seed=7
        )

    return run


def basic(pair):
    def make(model):
        guider = Guider_Basic(model)
        guider.set_conds(pair.positive)
        return guider

    return make


def dual(pair):
    def make(model):
        guider = Guider_DualCFG(model)
        guider.set_conds(pair.positive, [[pair.positive[0][0] * 0.5, pair.positive[0][1]]], pair.negative)
        guider.set_cfg(3.0, 1.5)
        return guider

    return make


@pytest.mark.parametrize("guider", [basic, dual])
def test_sampler_custom_advanced(flux, guider):
    assert flux.error(guided(guider(flux), flux)) <= 1e-4


@pytest.mark.skipif(
    not hasattr(nodes_custom_sampler, "DualModelGuider"), reason="this ComfyUI has no DualModelGuider"
)
@pytest.mark.parametrize("models", [1, 2])
def test_no_negative_prompt_is_an_image_alone(pairs, models):
    """Ideogram 4 is guided so by a model of its own, where the guider's negative is not connected."""
    pair = pairs("ideogram4")

    def guider(model):
        negative = {"model_negative": model} if models == 2 else {}
        return nodes_custom_sampler.DualModelGuider.execute(model, pair.positive, 3.0, **negative).result[0]

    assert pair.error(guided(guider, pair)) <= 1e-4


class Shifted(comfy.model_sampling.ModelSamplingFlux, comfy.model_sampling.CONST):
    """As ModelSamplingFlux patches it in."""


def test_patched_model_sampling_and_easy_cache(flux):
    """Patches around the transformer work as on any MODEL, and a wrapper of its forward sees what it sees
    there."""

    def patched(model):
        model = model.clone()
        sampling = Shifted(model.model.model_config)
        sampling.set_parameters(shift=2.0)
        model.add_object_patch("model_sampling", sampling)
        model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * 0.99)
        return EasyCacheNode.execute(model, 0.0, 0.0, 1.0, False).result[0]

    assert flux.error(lambda model: guided(basic(flux), flux)(patched(model))) <= 1e-4
    assert flux.error(guided(basic(flux), flux)) <= 1e-4  # and the MODEL that was cloned is as it was


def test_loading_is_free_and_prompts_are_called_together(flux):
    assert flux.ours.model_size() < 1e5 and flux.ours.model_dtype() == torch.float32
    assert flux.ours.model.memory_required([1000, 16, 1000, 1000]) == 0
    batches = []
    model = flux.ours.clone()
    model.add_wrapper(
        WrappersMP.DIFFUSION_MODEL,
        lambda executor, x, *args, **kwargs: batches.append(len(x)) or executor(x, *args, **kwargs),
    )
    ksampler(flux, steps=2)(model)
    assert batches == [2, 2]


def test_room_is_asked_for_once_for_each_size_of_a_call(flux, monkeypatch):
    """A small area may come first: what it needs is not what the whole image does."""
    backend, asked = pool.backend_for(CONFIG), []
    sample = backend.sample

    def ask(message, room=None, **rest):
        asked.append((tuple(message.tensors["x"].shape[-2:]), room is not None))
        return sample(message, room=room, **rest)

    monkeypatch.setattr(backend, "sample", ask)
    whole, area = regional("area", [flux.positive[0], flux.negative[0]])
    run = ksampler(flux, steps=2, positive=[area, whole])
    run(flux.ours)
    small, large = sorted({size for size, _ in asked})
    assert [size for size, asks in asked if asks] == [small, large] and len(asked) > 2
    asked.clear()
    run(flux.ours)
    assert len([size for size, asks in asked if asks]) == 2, "the next sampling asks again"


def test_a_preview_without_room_does_not_end_a_sampling(flux):
    """The ranks' GPUs are full by then, as ComfyUI's first one."""
    seen = []

    def preview(*arguments):
        seen.append(arguments)
        raise comfy.model_management.OOM_EXCEPTION("of a preview")

    with torch.inference_mode():
        found = ksampler(flux, steps=2, callback=preview)(flux.ours)
        assert found.equal(ksampler(flux, steps=2)(flux.ours)) and len(seen) == 2


def test_prompts_are_sent_once(flux, monkeypatch):
    """Regions call the model several times a step, with other prompts; after an unload the ranks are told
    again."""
    monkeypatch.setattr(argument_cache, "MIN_BYTES", 1)
    backend, messages = pool.backend_for(CONFIG), []
    sample = backend.sample
    monkeypatch.setattr(
        backend, "sample", lambda message, **rest: messages.append(message) or sample(message, **rest)
    )
    run = ksampler(flux, steps=3, positive=regional("area", [flux.positive[0], flux.negative[0]]))
    assert flux.error(run) <= 1e-4
    prompts = ["cond.c_crossattn" in message.tensors for message in messages]
    assert len(prompts) == 6 and prompts == [True, True, False, False, False, False]
    comfy.model_management.unload_all_models()
    assert flux.error(run) <= 1e-4
    assert ["cond.c_crossattn" in message.tensors for message in messages[6:]] == [
        False,
        True,
        True,
        False,
        False,
        False,
        False,
    ]


def test_a_prompt_that_changes_a_little_between_two_steps_is_sent_again(flux, monkeypatch):
    """One number of it, at a place where values are not told apart."""
    monkeypatch.setattr(argument_cache, "MIN_BYTES", 1)
    monkeypatch.setattr(argument_cache, "FINGERPRINT_WORDS", 1)

    def changing(model):
        model, calls = model.clone(), []

        def change(executor, x, timestep, context, *args, **options):
            calls.append(None)
            context = context.clone()
            context[0, 0, 3] += 5.0 * len(calls)
            return executor(x, timestep, context, *args, **options)

        model.add_wrapper(WrappersMP.DIFFUSION_MODEL, change)
        return ksampler(flux, steps=3)(model)

    assert flux.error(changing) <= 1e-4


def test_uneven_work_is_told_once(flux, caplog):
    model = remote_model(flux.dit)
    for _ in range(2):
        ksampler(flux, steps=2, cfg=1.0)(model)
    assert len([record for record in caplog.records if "cfg_degree 2" in record.message]) == 1


def test_unload_models_frees_the_ranks_and_the_next_sampling_loads_again(flux):
    backend = pool.backend_for(CONFIG)
    assert flux.error(ksampler(flux)) <= 1e-4
    comfy.model_management.unload_all_models()
    assert flux.error(ksampler(flux)) <= 1e-4
    assert pool.backend_for(CONFIG) is backend
    comfy.model_management.unload_all_models()
    assert flux.dit.loaded.model not in backend.client.request(Ping()).models


def test_interrupt_within_a_call_keeps_the_weights(flux):
    """A large latent: the first call lasts longer than the wait."""
    backend, noise = (
        pool.backend_for(CONFIG),
        torch.randn(1, 16, 96, 96, generator=torch.Generator().manual_seed(5)),
    )
    ksampler(flux, steps=1)(flux.ours)
    threading.Timer(0.2, comfy.model_management.interrupt_current_processing).start()
    began = time.monotonic()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        ksampler(flux, steps=200, noise=noise, latent_image=torch.zeros_like(noise))(flux.ours)
    assert time.monotonic() - began < 20
    assert pool.backend_for(CONFIG) is backend  # which waits for the call's end
    assert flux.dit.loaded.model in backend.client.request(Ping()).models
    assert flux.error(ksampler(flux)) <= 1e-4


def test_killed_rank_is_named_and_the_next_sampling_starts_another(flux):
    pids = pool.backend_for(CONFIG).welcome.pids

    def kill(step, *_):
        if step == 1:
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(BackendError, match="rank 1 was killed by SIGKILL"):
        ksampler(flux, steps=50, callback=kill)(flux.ours)
    assert flux.error(ksampler(flux)) <= 1e-4
    assert pool.backend_for(CONFIG).welcome.pids != pids
