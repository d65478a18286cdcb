"""The MODEL of ParallelModel against ComfyUI's own model of the same tiny checkpoint, in ComfyUI's own samplers and guiders."""

import functools
import os
import signal
import threading
import time

import pytest
import torch
from comfy_modules import comfy_modules
from families import LATENT_FORMATS
from parallel_dit.backend.config import ParallelConfig
from parallel_dit.backend.protocol import BackendError, Ping, RefusedError
from parallel_dit.nodes import backends
from safetensors.torch import load_file
from tiny import GOLDEN, facts, weights_module, write_checkpoint
from versions import skip_without, skip_without_class

with comfy_modules():
    import comfy.hooks
    import comfy.model_detection
    import comfy.model_management
    import comfy.model_patcher
    import comfy.model_sampling
    import comfy.sample
    import comfy.samplers
    import comfy.sd
    import comfy.supported_models
    from comfy.nested_tensor import NestedTensor
    from comfy.patcher_extension import WrappersMP
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_custom_sampler import Guider_Basic, Guider_DualCFG
    from comfy_extras.nodes_easycache import EasyCacheNode
    from parallel_dit.nodes import handle, kept
    from parallel_dit.nodes.families import OURS
    from parallel_dit.nodes.parallel_model import remote_model

CONFIG = ParallelConfig(cfg_degree=2, device="cpu")
CPU = torch.device("cpu")
#: Families whose timesteps are noise levels times 1000 (Wan, SD3), or of a discrete schedule (PixArt, HunyuanDiT), and those of several latents.
OTHERS = ["wan21-t2v", "pixart-sigma", "sd3", "hunyuan-dit", "ltx2", "minimax-h3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    yield tmp_path_factory.mktemp("models")
    backends.close_all()


class Pair:
    """A family's tiny checkpoint as ComfyUI's own MODEL and as ours, and a golden case's inputs."""

    def __init__(self, name: str, folder):
        wanted = facts(name)
        skip_without_class(wanted["comfy_class"])
        skip_without(["LTX-2 with its connectors, nor 2.3"] if name.startswith("ltx2") else [])
        state = weights_module().state_dict(wanted["shapes"])
        # ComfyUI detects what it can, and takes some widths for those of the released sizes
        config = getattr(comfy.supported_models, wanted["comfy_class"])({**comfy.model_detection.detect_unet_config(state, ""), **wanted["unet_config"]})
        config.unet_config.update(wanted["unet_config"])         # some classes put the released widths over what they are given
        config.set_inference_dtype(torch.float32, None)
        native = config.get_model(state)
        native.load_model_weights(state, "")
        self.native = comfy.model_patcher.ModelPatcher(native, CPU, CPU)
        self.dit = handle.load(CONFIG, str(write_checkpoint(folder / f"{name}.safetensors", name)), "default")
        self.ours = remote_model(self.dit)
        stored = load_file(GOLDEN / f"{name}__euler_simple.safetensors")
        self.positive, self.negative = (_conditioning(stored, branch) for branch in ("positive", "negative"))
        self.noise = stored["noise"] if "noise" in stored else NestedTensor([stored["noise.0"], stored["noise.1"]])
        self.latent = self.noise * 0.0

    def error(self, run) -> float:
        """Largest difference of run(MODEL)'s latents, in standard deviations."""
        with torch.inference_mode():
            wanted, found = _parts(run(self.native)), _parts(run(self.ours))
        assert all(torch.isfinite(want).all() for want in wanted)
        return max(((a - b).abs().max() / b.std()).item() for a, b in zip(found, wanted, strict=True))


def _parts(latent) -> list:
    return latent.unbind() if latent.is_nested else [latent]


def _conditioning(stored, branch):
    values = {key.split(".")[1]: value.item() if value.ndim == 0 else value for key, value in stored.items() if key.startswith(branch + ".")}
    return [[values.pop("cross_attn"), {"pooled_output": None, **values}]]


@pytest.fixture(scope="module")
def pairs(folder):
    return functools.cache(lambda name: Pair(name, folder))


@pytest.fixture
def flux(pairs):
    return pairs("flux-dev")


def ksampler(pair: Pair, sampler="euler", scheduler="simple", steps=4, cfg=3.0, **changes):
    """MODEL -> what KSampler's node would return for it."""
    inputs = {"noise": pair.noise, "positive": pair.positive, "negative": pair.negative, "latent_image": pair.latent, "disable_pbar": True, "seed": 7, **changes}
    return lambda model: comfy.sample.sample(model, steps=steps, cfg=cfg, sampler_name=sampler, scheduler=scheduler, **inputs)


@pytest.mark.parametrize("sampler, scheduler", [
    ("euler", "simple"), ("dpmpp_2m", "beta"), ("heun", "simple"), ("euler_ancestral", "simple"), ("uni_pc", "simple"), ("dpmpp_sde", "simple"), ("dpm_fast", "simple"), ("res_multistep_cfg_pp", "kl_optimal")])
def test_flux_in_ksampler(flux, sampler, scheduler):
    """The last two are solvers that the backend does not have."""
    assert flux.error(ksampler(flux, sampler, scheduler)) <= 1e-4


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m_sde"])
@pytest.mark.parametrize("family", OTHERS)
def test_other_families_in_ksampler(pairs, family, sampler):
    pair = pairs(family)
    assert pair.error(ksampler(pair, sampler, steps=3)) <= 1e-4


@pytest.mark.parametrize("family", [family for family in LATENT_FORMATS if family not in ("flux-dev", *OTHERS) and facts(family)["comfy_class"] not in OURS])
def test_every_other_family_in_one_step(pairs, family):
    pair = pairs(family)
    assert pair.error(ksampler(pair, steps=1, denoise=0.5)) <= 1e-4


def regional(kind: str, prompts) -> list:
    """Two prompts for parts of the picture or of the sampling, as ConditioningSetArea, SetMask and SetTimestepRange leave them."""
    (whole, values), (other, others) = prompts
    if kind == "area":
        return [[whole, values], [other, {**others, "area": (8, 10, 4, 2), "strength": 0.8}]]
    if kind == "mask":
        mask = torch.zeros(1, 128, 128)
        mask[:, :, 64:] = 1.0
        return [[whole, {**values, "mask": 1.0 - mask, "mask_strength": 1.0}], [other, {**others, "mask": mask, "mask_strength": 0.7}]]
    return [[whole, {**values, "start_percent": 0.0, "end_percent": 0.5}], [other, {**others, "start_percent": 0.5, "end_percent": 1.0}]]


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
    assert flux.error(ksampler(flux, "dpmpp_2m", steps=6, noise=noise, latent_image=latent, noise_mask=mask, start_step=2, last_step=5)) <= 1e-4


def guided(guider, pair: Pair, scheduler="simple", sampler="euler"):
    """MODEL -> what SamplerCustomAdvanced returns: ``guider`` makes one of it."""
    def run(model):
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), scheduler, 4)
        return guider(model).sample(pair.noise, pair.latent, comfy.samplers.sampler_object(sampler), sigmas, disable_pbar=True, seed=7)
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


class Shifted(comfy.model_sampling.ModelSamplingFlux, comfy.model_sampling.CONST):
    """As ModelSamplingFlux patches it in."""


def test_patched_model_sampling_and_easy_cache(flux):
    """Patches around the transformer work as on any MODEL, and a wrapper of its forward sees what it sees there."""
    def patched(model):
        model = model.clone()
        sampling = Shifted(model.model.model_config)
        sampling.set_parameters(shift=2.0)
        model.add_object_patch("model_sampling", sampling)
        model.set_model_sampler_post_cfg_function(lambda args: args["denoised"] * 0.99)
        return EasyCacheNode.execute(model, 0.0, 0.0, 1.0, False).result[0]

    assert flux.error(lambda model: guided(basic(flux), flux)(patched(model))) <= 1e-4
    assert flux.error(guided(basic(flux), flux)) <= 1e-4        # and the MODEL that was cloned is as it was


REFUSED = {
    "LoRA": (lambda m: comfy.sd.load_lora_for_models(m, None, {"some.lora_up.weight": torch.ones(2, 2)}, 1.0, 1.0), "a LoRA"),
    "merge": (lambda m: m.get_key_patches("diffusion_model."), "a merge"),
    "save": (lambda m: m.state_dict_for_saving(), "saves the model"),
    "compile": (lambda m: set_torch_compile_wrapper(m.clone(), "inductor"), "torch.compile"),
    "compute type": (lambda m: m.clone().set_model_compute_dtype(torch.float16), "weight_dtype"),
    "part": (lambda m: m.clone().add_object_patch("diffusion_model.img_in", None), "diffusion_model.img_in"),
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
    inference_memory_requirements = lambda self, *args: 0
    extra_hooks = previous_controlnet = None
    multigpu_clones = {}


STEPS_REFUSED = {
    "attention patch": (lambda m: with_patch(m, "patches", {"attn1_patch": [print]}), None, "'patches': attn1_patch"),
    "replaced block": (lambda m: with_patch(m, "patches_replace", {"dit": {("double_block", 0): print}}), None, "'patches_replace': dit"),
    "attention": (lambda m: with_patch(m, "optimized_attention_override", print), None, "another attention function"),
    "ControlNet": (lambda m: m, {"control": Control()}, "ControlNet"),
    "style model's mask": (lambda m: m, {"attention_mask": torch.ones(1, 76, 76), "attention_mask_img_shape": (8, 8)}, "'attention_mask'"),
    "NaN": (lambda m: m, {"pooled_output": torch.full((1, 32), float("nan"))}, "cond.y holds NaN"),
    "other encoder": (lambda m: m, {"pooled_output": torch.zeros(1, 31)}, "encoded for another model"),
}


@pytest.mark.parametrize("change, conditioning, says", STEPS_REFUSED.values(), ids=STEPS_REFUSED)
def test_what_cannot_reach_the_ranks_is_refused_by_name(flux, change, conditioning, says):
    pids = backends.backend_for(CONFIG).welcome.pids
    positive = [[flux.positive[0][0], {**flux.positive[0][1], **(conditioning or {})}]]
    with pytest.raises(RefusedError, match=says) as error:
        ksampler(flux, positive=positive)(change(flux.ours))
    assert "\n" not in str(error.value)
    assert backends.backend_for(CONFIG).welcome.pids == pids


def test_hooks_on_weights_are_refused(flux):
    hooks = comfy.hooks.create_hook_lora({"some.lora_up.weight": torch.ones(2, 2)}, 1.0, 1.0)
    with pytest.raises(RefusedError, match="LoRA hook"):
        ksampler(flux, positive=[[flux.positive[0][0], {**flux.positive[0][1], "hooks": hooks}]])(flux.ours)


def test_a_node_that_reads_the_transformer_is_told_why_it_cannot(flux):
    assert not hasattr(flux.ours.model.diffusion_model, "double_blocks")
    with pytest.raises(AttributeError, match="Parallel Model, .* diffusion_model.double_blocks"):
        flux.ours.model.diffusion_model.double_blocks


def test_loading_is_free_and_prompts_are_called_together(flux):
    assert flux.ours.model_size() < 1e5 and flux.ours.model_dtype() == torch.float32
    assert flux.ours.model.memory_required([1000, 16, 1000, 1000]) == 0
    batches = []
    model = flux.ours.clone()
    model.add_wrapper(WrappersMP.DIFFUSION_MODEL, lambda executor, x, *args, **kwargs: batches.append(len(x)) or executor(x, *args, **kwargs))
    ksampler(flux, steps=2)(model)
    assert batches == [2, 2]


def test_prompts_are_sent_once(flux, monkeypatch):
    """Regions call the model several times a step, with other prompts; after an unload the ranks are told again."""
    monkeypatch.setattr(kept, "LEAST_BYTES", 1)
    backend, messages = backends.backend_for(CONFIG), []
    sample = backend.sample
    monkeypatch.setattr(backend, "sample", lambda message, **rest: messages.append(message) or sample(message, **rest))
    run = ksampler(flux, steps=3, positive=regional("area", [flux.positive[0], flux.negative[0]]))
    assert flux.error(run) <= 1e-4
    prompts = ["cond.c_crossattn" in message.tensors for message in messages]
    assert len(prompts) == 6 and prompts == [True, True, False, False, False, False]
    comfy.model_management.unload_all_models()
    assert flux.error(run) <= 1e-4
    assert ["cond.c_crossattn" in message.tensors for message in messages[6:]] == [False, True, True, False, False, False, False]


def test_a_prompt_that_changes_a_little_between_two_steps_is_sent_again(flux, monkeypatch):
    """One number of it, at a place where values are not told apart."""
    monkeypatch.setattr(kept, "LEAST_BYTES", 1)
    monkeypatch.setattr(kept, "PROBES", 1)

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
    backend = backends.backend_for(CONFIG)
    assert flux.error(ksampler(flux)) <= 1e-4
    comfy.model_management.unload_all_models()
    assert flux.error(ksampler(flux)) <= 1e-4
    assert backends.backend_for(CONFIG) is backend
    comfy.model_management.unload_all_models()
    assert flux.dit.loaded.model not in backend.client.request(Ping()).models


def test_interrupt_within_a_call_keeps_the_weights(flux):
    """A large latent: the first call lasts longer than the wait."""
    backend, noise = backends.backend_for(CONFIG), torch.randn(1, 16, 96, 96, generator=torch.Generator().manual_seed(5))
    ksampler(flux, steps=1)(flux.ours)
    threading.Timer(0.2, comfy.model_management.interrupt_current_processing).start()
    began = time.monotonic()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        ksampler(flux, steps=200, noise=noise, latent_image=torch.zeros_like(noise))(flux.ours)
    assert time.monotonic() - began < 20
    assert flux.dit.loaded.model in backend.client.request(Ping()).models
    assert flux.error(ksampler(flux)) <= 1e-4
    assert backends.backend_for(CONFIG) is backend


def test_killed_rank_is_named_and_the_next_sampling_starts_another(flux):
    pids = backends.backend_for(CONFIG).welcome.pids

    def kill(step, *_):
        if step == 1:
            os.kill(pids[1], signal.SIGKILL)

    with pytest.raises(BackendError, match="rank 1 was killed by SIGKILL"):
        ksampler(flux, steps=50, callback=kill)(flux.ours)
    assert flux.error(ksampler(flux)) <= 1e-4
    assert backends.backend_for(CONFIG).welcome.pids != pids
