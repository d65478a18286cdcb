"""The sampler nodes against ComfyUI's own, in one process on the tiny checkpoints: the same latent for the
same seed, whatever the inputs."""

import math
from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules
from versions import skip_without

with comfy_modules():
    import comfy.samplers
    from comfy_extras import nodes_cfg
    from comfy_extras import nodes_custom_sampler as custom
    from parallel_dit.backend.protocol import RefusedError
    from parallel_dit.nodes.host.sampling_checks import check_inputs
    from parallel_dit.nodes.host.shift import apply_shift
    from parallel_dit.nodes.parallel_sampler import ParallelSampler

from sampler_cases import MIXES, SCHEDULES, SHIFTS, SIZE, prompt
from sampler_pairs import SEED, STEPS, Pair, custom_both, error, shifted


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """pairs(family) -> its Pair, made once."""
    folder, made, patch = tmp_path_factory.mktemp("models"), {}, pytest.MonkeyPatch()

    def pair(family):
        if family not in made:
            made[family] = Pair(family, folder, patch)
        patch.setattr(
            "parallel_dit.nodes.host.remote_solver.ensure_loaded",
            lambda handle: (made[family].rank, made[family].dit.loaded),
        )
        return made[family]

    yield pair
    patch.undo()


@pytest.mark.parametrize("node, inputs", [("CFGNorm", (1.0,)), ("CFGZeroStar", ())])
def test_guidance_nodes_that_change_nothing_without_cfg(pairs, node, inputs):
    """The documents say so of cfg 1.0: Parallel Sampler, which has no input for them, gives their latent."""
    pair = pairs("qwen-image")
    patched = getattr(nodes_cfg, node).execute(pair.model, *inputs).result[0]
    plain = pair.both("KSampler", seed=SEED, denoise=1.0, cfg=1.0)[0]["samples"]
    native, found = pair.both("KSampler", model=patched, seed=SEED, denoise=1.0, cfg=1.0)
    assert torch.equal(native["samples"], plain) and error(native, found) <= 1e-4
    guided, _ = pair.both("KSampler", model=patched, seed=SEED, denoise=1.0)
    assert error(*pair.both("KSampler", seed=SEED, denoise=1.0)) <= 1e-4 < error(guided, found)


@pytest.mark.parametrize(
    "family, inputs",
    [
        ("flux-dev", {}),
        ("flux-dev", {"denoise": 0.5}),
        ("flux-dev", {"denoise": 0.0}),
        ("flux-dev", {"cfg": 1.0}),
        ("flux-dev", {"sampler_name": "dpmpp_sde", "scheduler": "karras"}),
        ("pixart-sigma", {"denoise": 0.5}),
        ("pixart-sigma", {"sampler_name": "uni_pc"}),
        ("pixart-sigma", {"sampler_name": "euler_cfg_pp", "cfg": 1.0}),
        ("flux-dev", {"sampler_name": "euler_ancestral_cfg_pp", "cfg": 1.0}),
    ],
    ids=str,
)
def test_ksampler(pairs, family, inputs):
    assert error(*pairs(family).both("KSampler", seed=SEED, **{"denoise": 1.0, **inputs})) <= 1e-4


ADVANCED = {
    "add_noise": "enable",
    "noise_seed": SEED,
    "start_at_step": 0,
    "end_at_step": 10000,
    "return_with_leftover_noise": "disable",
}


@pytest.mark.parametrize(
    "family, inputs",
    [
        ("flux-dev", {}),
        ("flux-dev", {"start_at_step": 2}),
        ("pixart-sigma", {"end_at_step": 2}),
        ("flux-dev", {"end_at_step": 2, "return_with_leftover_noise": "enable"}),
        ("pixart-sigma", {"end_at_step": 2, "return_with_leftover_noise": "enable"}),
        ("pixart-sigma", {"add_noise": "disable", "start_at_step": 2}),
        ("flux-dev", {"add_noise": "disable"}),
        (
            "wan21-t2v",
            {
                "start_at_step": 1,
                "end_at_step": 3,
                "return_with_leftover_noise": "enable",
                "sampler_name": "dpmpp_2m_sde",
            },
        ),
        ("flux-dev", {"start_at_step": 3, "end_at_step": 2}),
        ("wan21-t2v", {"end_at_step": 0}),
        ("flux-dev", {"start_at_step": 9}),
    ],
    ids=str,
)
def test_ksampler_advanced(pairs, family, inputs):
    assert error(*pairs(family).both("KSamplerAdvanced", **{**ADVANCED, **inputs})) <= 1e-4


def test_two_stages_are_the_whole(pairs):
    """Steps 0 to 2 with the noise left in, then 2 to 4: what one run of 4 steps gives."""
    pair = pairs("wan21-t2v")
    _, whole = pair.both("KSamplerAdvanced", **ADVANCED)
    _, half = pair.both(
        "KSamplerAdvanced", **{**ADVANCED, "end_at_step": 2, "return_with_leftover_noise": "enable"}
    )
    _, rest = pair.both(
        "KSamplerAdvanced", **{**ADVANCED, "add_noise": "disable", "start_at_step": 2, "latent_image": half}
    )
    assert error(whole, rest) <= 1e-4


def test_batch_index_and_mask(pairs):
    pair = pairs("flux-dev")
    latent = {"samples": pair.latent_image["samples"].repeat(2, 1, 1, 1), "batch_index": [3, 1]}
    latent["noise_mask"] = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(2)).round()
    native, found = pair.both("KSamplerAdvanced", **{**ADVANCED, "latent_image": latent, "start_at_step": 1})
    assert error(native, found) <= 1e-4 and native.keys() == found.keys()
    assert not torch.equal(found["samples"][0], found["samples"][1])


# ------------------------------------------------------------------ custom
@pytest.mark.parametrize(
    "family, schedule",
    [
        *(("flux-dev", schedule) for schedule in SCHEDULES),
        ("pixart-sigma", "part of one"),
        ("pixart-sigma", "karras"),
        ("pixart-sigma", "first half"),
        ("pixart-sigma", "one level"),
    ],
)
def test_custom_takes_any_sigmas(pairs, family, schedule):
    pair = pairs(family)
    native, found = custom_both(pair, custom.Noise_RandomNoise(SEED), SCHEDULES[schedule](pair.model)[0])
    assert error(native[0], found[0]) <= 1e-4
    assert error(native[1], found[1]) <= 1e-4


def test_custom_without_noise(pairs):
    native, found = custom_both(pairs("flux-dev"), custom.Noise_EmptyNoise(), torch.tensor([0.6, 0.3, 0.0]))
    assert error(native[0], found[0]) <= 1e-4


@pytest.mark.parametrize(
    "solver",
    [
        "heun",
        "dpm_2",
        "dpmpp_2s_ancestral",
        "dpmpp_sde",
        "seeds_2",
        "seeds_3",
        "uni_pc",
        "er_sde",
        "sa_solver",
        "res_multistep",
        "euler_cfg_pp",
        "euler_ancestral_cfg_pp",
        "lcm",
    ],
)
def test_denoised_output_is_comfyuis(pairs, solver):
    """A schedule that ends early, where a solver's last step has all its model calls."""
    native, found = custom_both(
        pairs("flux-dev"), custom.Noise_RandomNoise(SEED), torch.tensor([1.0, 0.8, 0.5, 0.2]), solver
    )
    assert error(native[0], found[0]) <= 1e-4 and error(native[1], found[1]) <= 1e-4
    assert error(found[0], found[1]) > 1e-2


# ------------------------------------------------------------------ shift
@pytest.mark.parametrize("family", SHIFTS)
def test_shift_is_that_of_the_model_sampling_node(pairs, family):
    pair, (node, shift, inputs) = pairs(family), SHIFTS[family]
    _, own = pair.both("KSampler", seed=SEED, denoise=1.0)
    native, found = pair.both(
        "KSampler",
        shifted(pair.model, node, **inputs),
        shift,
        seed=SEED,
        denoise=1.0,
        sampler_name="dpmpp_2m_sde",
    )
    assert error(native, found) <= 1e-4
    native, found = pair.both("KSampler", seed=SEED, denoise=1.0)  # nothing of it stays
    assert error(native, found) <= 1e-4 and torch.equal(own["samples"], found["samples"])


def test_shift_of_custom_is_that_of_its_sigmas(pairs):
    pair = pairs("wan21-t2v")
    model = shifted(pair.model, "ModelSamplingSD3", shift=5.0)
    (sigmas,) = custom.BasicScheduler.execute(model, "simple", STEPS, 1.0)
    native, found = custom_both(
        pair, custom.Noise_RandomNoise(SEED), sigmas, "dpmpp_sde", model=model, shift=5.0
    )
    assert error(native[0], found[0]) <= 1e-4


def test_shift_is_refused_where_there_are_two_schedules():
    skip_without({"ModelSamplingAV"} - vars(comfy.model_sampling).keys())

    class Sampling(comfy.model_sampling.ModelSamplingAV, comfy.model_sampling.CONST):
        """As MiniMax-H3's."""

    model = SimpleNamespace(get_model_object=lambda name: Sampling())
    with pytest.raises(
        RefusedError, match="shift is 3, but the audio of minimax-h3 has a schedule of its own"
    ):
        apply_shift(model, 3.0, "minimax-h3", None)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"cfg": math.nan}, "cfg is nan, which is no number; use one from 0"),
        (
            {"latent_image": {"samples": torch.zeros(0, 16, 8, 8)}},
            "latent_image is a batch of 0 latents; use",
        ),
    ],
    ids=["cfg", "batch"],
)
def test_inputs_without_a_number_or_a_latent_are_named(pairs, change, says):
    pair = pairs("flux-dev")
    inputs = {
        "cfg": 1.0,
        "sampler_name": "euler",
        "positive": pair.positive,
        "negative": pair.positive,
        "latent_image": {"samples": torch.zeros(1, 16, 8, 8)},
    }
    with pytest.raises(RefusedError, match=says):
        check_inputs(pair.dit, *{**inputs, **change}.values())


def test_shift_that_is_no_number_is_named():
    with pytest.raises(RefusedError, match="shift is nan, which is no number; use one from 0"):
        apply_shift(None, math.nan, "flux", None)


def test_shift_is_refused_where_noise_levels_are_fixed(pairs):
    with pytest.raises(RefusedError, match="shift is 3, but pixart is not a flow model"):
        pairs("pixart-sigma").both("KSampler", None, 3.0, seed=SEED, denoise=1.0)


# ------------------------------------------------------------------ several prompts, ranges and masks
@pytest.mark.parametrize(
    "family, mix",
    [
        *(("flux-dev", mix) for mix in MIXES),
        ("wan21-t2v", "region on a ground"),
        ("wan21-t2v", "one after the other"),
        ("pixart-sigma", "one after the other"),
    ],
)
def test_mixed_prompts(pairs, family, mix):
    pair = pairs(family)
    positive, negative = MIXES[mix](pair, SIZE[family])
    inputs = {"positive": positive, "negative": negative, "seed": SEED, "denoise": 1.0}
    native, found = pair.both(
        "KSampler", **inputs, sampler_name="heun" if mix == "one after the other" else "euler"
    )
    assert error(native, found) <= 1e-4
    if pair.plain is None:
        pair.plain, _ = pair.both("KSampler", seed=SEED, denoise=1.0)
    assert error(pair.plain, found) > 1e-3  # it does something


def test_ranges_follow_the_shift(pairs):
    pair = pairs("wan21-t2v")
    inputs = {
        "positive": prompt(pair, 1.0, start_percent=0.0, end_percent=0.3)
        + prompt(pair, -0.7, start_percent=0.3, end_percent=1.0),
        "seed": SEED,
        "denoise": 1.0,
        "steps": 8,
    }
    assert (
        error(*pair.both("KSampler", shifted(pair.model, "ModelSamplingSD3", shift=3.0), 3.0, **inputs))
        <= 1e-4
    )


def test_what_inpainting_sets_is_ignored_where_comfyui_does(pairs):
    """A model without channels for an image takes the latent and its noise mask alone."""
    pair = pairs("pixart-sigma")
    image, mask = torch.ones(1, 4, 8, 8), torch.ones(1, 1, 64, 64)
    given = {"concat_latent_image": image, "concat_mask": mask}
    prompts = {name: prompt(pair, 1.0, **given) for name in ("positive", "negative")}
    assert error(*pair.both("KSampler", seed=SEED, denoise=1.0, **prompts)) <= 1e-4


@pytest.mark.parametrize(
    "values, what",
    [
        ({"area": (8, 8, 0, 0)}, "an area.*on the MODEL of Parallel Model"),
        (
            {"set_area_to_bounds": True, "mask": torch.ones(1, 8, 8)},
            "bounds are an area.*on the MODEL of Parallel Model",
        ),
        ({"default": True}, "a default.*on the MODEL of Parallel Model"),
        ({"control": object()}, "a ControlNet.*ordinary MODEL"),
        ({"hooks": object()}, "hooks.*ordinary MODEL"),
        ({"gligen": object()}, "GLIGEN.*ordinary MODEL"),
        ({"noise_concat": torch.ones(1, 4, 8, 8)}, "extra channels.*ordinary MODEL"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_mixed_is_refused_by_name(pairs, values, what):
    pair = pairs("pixart-sigma")
    for inputs in (
        {"positive": prompt(pair, 1.0, **values)},
        {"negative": pair.negative + prompt(pair, 1.0, **values)},
    ):
        with pytest.raises(RefusedError, match=what) as refusal:
            with torch.inference_mode():
                ParallelSampler.execute(
                    dit=pair.dit,
                    seed=SEED,
                    steps=STEPS,
                    cfg=2.5,
                    sampler_name="euler",
                    scheduler="simple",
                    **{"positive": pair.positive, "negative": pair.negative, **inputs},
                    latent_image=pair.empty,
                    denoise=1.0,
                )
        assert "\n" not in str(refusal.value)
