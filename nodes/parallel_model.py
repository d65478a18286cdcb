"""The ParallelModel node: a PARALLEL_DIT as a MODEL, which every sampler, guider and scheduler of ComfyUI can
use. It is ComfyUI's own model object without weights; in the place of its transformer is a module that sends
each call to the ranks: one round trip a step. What would reach into the transformer is refused by name, at
the node that does it where that can be."""

import logging
from collections import OrderedDict
from functools import partial
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.model_sampling
import comfy.utils
import torch
from comfy.patcher_extension import WrapperExecutor, WrappersMP, add_wrapper, get_all_wrappers
from comfy_api.latest import io

from ..backend.client.argument_cache import ArgumentCache
from ..backend.client.pool import Backend
from ..backend.config import ParallelConfig
from ..backend.protocol import ModelCall, RefusedError, Result
from .comfy_models.registry import ElsewhereModule, family_named, weightless_patcher
from .host.auto_plan import as_running, one_plan
from .host.conditioning import as_tensors, fill_zeros
from .host.handle import OnRanks, ParallelDiT, ensure_loaded, release
from .host.models_on_ranks import keep_rank_weights, rank_weights_stay, run_evicting_models
from .host.progress import CANCELLING, NodeStatus, interrupt, tolerate_preview_oom
from .host.refusals import errors_on_node, note_success
from .host.remote_patcher import RemotePatcher, attach_lora_metadata
from .host.schema import ALIASES, ParallelDiTType, schema

#: Entries of transformer_options that ComfyUI's transformers read, and what sets them.
REFUSED_OPTIONS = {
    "patches": "patches of the transformer's blocks",
    "patches_replace": "replacements of the transformer's blocks or attention",
    "optimized_attention_override": "another attention function",
    "rope_options": "other positions (Scale ROPE)",
    "model_patch_data": "a model patch",
    "stg_self_attn_blocks": "skipped attention (STG)",
    "stg_skip_self_attn": "skipped attention (STG)",
    "chroma_radiance_options": "options of Chroma Radiance",
    "audio_embeds": "audio",
    "ar_state": "an autoregressive state",
    "run_vx": "a switch of LTX's video part",
    "run_ax": "a switch of LTX's audio part",
    "a2v_cross_attn": "a switch of LTX's attention to audio (LTXV Modality Guidance)",
    "v2a_cross_attn": "a switch of LTX's attention to video (LTXV Modality Guidance)",
    "minimax_h3_sigma_shift_video": "other noise schedules (ModelSampling MiniMax H3)",
    "minimax_h3_sigma_shift_audio": "other noise schedules (ModelSampling MiniMax H3)",
}
#: Entry -> what to do instead, where these nodes have it too.
REMEDIES = {
    "optimized_attention_override": "remove the node that sets it and set attention in Parallel Config, or "
    "use ComfyUI's own loader"
}
#: Entries that ComfyUI's samplers, wrappers and context windows write for each other.
HARMLESS_OPTIONS = set(
    "cond_or_uncond uuids sigmas sample_sigmas wrappers callbacks prefetch_dynamic_vbars easycache lazycache "
    "context_window qwen_image21_cache".split()
)


def _step_end(options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the noise level at which the step under way ends, as models of MeanFlow read it; nothing where a
    sampler calls the model within a step."""
    levels = options.get("sample_sigmas")
    if levels is None or "sigmas" not in options:
        return {}
    begins = (levels[:-1] == options["sigmas"][0]).nonzero()
    return {"step_end": levels[1:][begins[0]]} if len(begins) else {}


def _named_entries(option: Any) -> list[str]:
    """Name the entries of an option that hold something, if it is a dict. Tensors have no truth value."""
    known = (dict, list, tuple, str, bool, int, float, type(None))
    entries = option.items() if isinstance(option, dict) else ()
    return [str(name) for name, entry in entries if not isinstance(entry, known) or entry]


class ParallelModel(io.ComfyNode):
    """PARALLEL_DIT -> MODEL."""

    @classmethod
    def define_schema(cls):
        return schema(
            *ALIASES,
            node_id="ParallelModel",
            display_name="Parallel Model",
            description="A Parallel DiT as a MODEL: ComfyUI's own samplers, guiders and schedulers, with "
            "each call of the model on several GPUs. PipeFusion runs drained here: its stages "
            "wait for each other at every step, so Parallel Sampler is faster with it.",
            inputs=[
                ParallelDiTType.Input(
                    "dit",
                    tooltip="The transformer, from Load Parallel DiT. All methods are exact here. "
                    "PipeFusion is drained at every step, which costs its speed (not its memory "
                    "saving); Ulysses, ring, tensor, data parallelism and CFG keep theirs.",
                ),
            ],
            outputs=[
                io.Model.Output(
                    display_name="model",
                    tooltip="For KSampler, SamplerCustom, guiders, ModelSampling nodes and so on. LoRA "
                    "loaders too. Nodes that change weights otherwise (merges) or reach into the "
                    "transformer (ControlNet, attention patches) are refused.",
                )
            ],
        )

    @classmethod
    @errors_on_node()
    def execute(cls, dit) -> io.NodeOutput:
        return io.NodeOutput(remote_model(dit))


def remote_model(dit: ParallelDiT) -> comfy.model_patcher.ModelPatcher:
    """Return a MODEL whose transformer is the one that ``dit`` names."""
    patcher = weightless_patcher(dit.loaded, partial(RemoteTransformer, dit), RemotePatcher)
    attach_lora_metadata(patcher, dit.loras)
    # nothing is computed here; ComfyUI would call for prompts one by one where it sees little memory
    patcher.model.memory_usage_factor = 0.0
    # the ranks make those of frames and tokens from the mask, which comes with the arguments
    patcher.model.process_timestep = lambda timestep, **arguments: timestep
    transformer = patcher.model.diffusion_model
    sampling = patcher.model.model_sampling
    if isinstance(sampling, comfy.model_sampling.CONST):
        transformer.time_scale = float(sampling.timestep(torch.ones(1)))
    patcher.add_wrapper(WrappersMP.OUTER_SAMPLE, transformer.hold_backend)
    add_wrapper(WrappersMP.PREPARE_SAMPLING, keep_rank_weights, patcher.model_options, is_model_options=True)
    return patcher


class RemoteTransformer(ElsewhereModule):
    """Called by ComfyUI in place of a transformer; the ranks compute its output."""

    def __init__(self, dit: ParallelDiT, dtype: torch.dtype, attributes: dict):
        super().__init__(dtype, attributes)
        self.dit = dit
        #: What the sampling that runs holds; None outside of one.
        self.sampling: OnRanks | None = None
        #: The handle of the MODEL that samples, with its LoRAs; None outside of a sampling.
        self.sampled: ParallelDiT | None = None
        self.cached_arguments = ArgumentCache()
        #: Where these arguments are.
        self.called: Backend | None = None
        #: A flow model's timestep, as ComfyUI makes it, over its noise level.
        self.time_scale = 1.0
        self._said = set()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"this MODEL comes from Parallel Model, whose transformer is on the ranks: a node that "
                f"reads diffusion_model.{name} cannot be used with it."
            ) from None

    def state_dict(self, *, destination=None, prefix="", keep_vars=False):
        """Name the weights as ComfyUI's model does, without values: its LoRA loaders look for the names."""
        names = OrderedDict() if destination is None else destination
        names.update(
            (prefix + name, torch.empty(0, device="meta")) for name in self.dit.loaded.info["weights"]
        )
        return names

    def hold_backend(
        self,
        executor,
        noise,
        latent_image,
        sampler,
        sigmas,
        denoise_mask=None,
        callback=None,
        *args,
        **kwargs,
    ):
        """Hold one live backend, and its plan, for a whole sampling; if it ends, so does the sampling."""
        guider = executor.class_obj
        size = (kwargs.get("latent_shapes") or [noise.shape])[0]
        before = self.sampling
        if callback:
            callback = tolerate_preview_oom(callback, NodeStatus())
        with errors_on_node(), one_plan(guider.model_patcher.dit, guider, size, len(sigmas) - 1) as dit:
            backend, loaded = ensure_loaded(dit)
            second = getattr(guider, "uncond_model_patcher", None)
            models = (guider.model_patcher, *([second] if second is not None else []))
            self.sampling = OnRanks(backend, loaded, dit, models=models)
            try:
                # between two calls it may pause, and a preview's VAE may want room
                with backend.in_use(), rank_weights_stay():
                    samples = executor(
                        noise, latent_image, sampler, sigmas, denoise_mask, callback, *args, **kwargs
                    )
                note_success()
                return samples
            finally:
                self.sampling = before
                release(backend, _caches(models, backend))

    def forward(self, x, timestep, context=None, control=None, transformer_options=None, **arguments):
        """Compute the output on the ranks: x (B, C, [T,] H, W), or a list of several latents, timestep (B,)
        and what else ComfyUI's model of the family gives its transformer -> the output of x's form in
        float32."""
        options = transformer_options or {}
        with errors_on_node():
            self._check_options(control, options)
            wrappers = get_all_wrappers(WrappersMP.DIFFUSION_MODEL, options)
            executor = WrapperExecutor.new_class_executor(self._call, self, wrappers)
            return executor.execute(x, timestep, context, transformer_options=options, **arguments)

    def _call(self, x, timestep, context=None, transformer_options=None, **arguments):
        nested = not isinstance(x, torch.Tensor)
        x, shapes = comfy.utils.pack_latents(x) if nested else (x, [])
        on_ranks = self.sampling or self._as_running()
        loaded = on_ranks.loaded
        config = on_ranks.dit.config
        arguments = {"c_crossattn": context, **arguments}
        values = {name: value for name, value in arguments.items() if value is not None}
        family = family_named(loaded)
        if "step_end" in loaded.info["conditioning"]:
            values |= _step_end(transformer_options or {})
        given = as_tensors("the graph", family.translate(values), loaded.info["conditioning"])
        given = fill_zeros(given, x.shape[0], family, loaded.info["config"])
        self._warn_of_idle_ranks(x.shape[0], config)
        tensors = {"x": x, "time": timestep / self.time_scale}
        tensors |= {f"cond.{name}": value for name, value in given.items()}
        call = ModelCall(
            loaded.model,
            attention=config.attention,
            compile=config.compile,
            wire=config.wire,
            latent_shapes=[list(shape[1:]) for shape in shapes],
            tensors=tensors,
        )
        output = self._output(on_ranks, call).to(x.device)
        return comfy.utils.unpack_latents(output, shapes) if nested else output

    def _as_running(self) -> OnRanks:
        """Return what a sampling holds, for a call without one or in that of another MODEL."""
        dit = as_running(self.sampled or self.dit)
        return OnRanks(*ensure_loaded(dit, make_room=False), dit)

    def _output(self, on_ranks: OnRanks, call: ModelCall) -> torch.Tensor:
        result = None
        with NodeStatus() as status:
            try:
                result, holds = self._ask(on_ranks, call, status)
                # the ranks are others, or have served others; or a prompt has changed a little
                if result is not None and ("missing" in result.stats or not holds):
                    self.cached_arguments.reset()
                    result, _ = self._ask(on_ranks, call, status)
            finally:
                if result is None:
                    self.cached_arguments.reset()
            if result is None:
                raise interrupt()
            for note in result.stats.get("notes", []):
                self._say_once(note)
            return result.tensors["output"]

    def _ask(self, on_ranks: OnRanks, call: ModelCall, status: NodeStatus) -> tuple[Result | None, bool]:
        """Return the result of the shortened call, and whether the ranks cache what it left out. The
        first call of a size in a sampling asks ComfyUI for room: areas and longer prompts may come later."""
        holds = []
        backend = self.called = on_ranks.backend
        shapes = sorted((name, value.shape) for name, value in call.tensors.items())
        size = str((*call.latent_shapes, *shapes))
        sample = partial(
            backend.sample,
            self.cached_arguments.shortened(call),
            should_cancel=partial(status.interrupted, backend=backend),
            meanwhile=lambda: holds.append(self.cached_arguments.holds()),
            leaves=True,
        )
        check = partial(status.check, CANCELLING, backend)
        looks = self.sampling is not None and size not in on_ranks.sizes
        result = run_evicting_models(backend, on_ranks.dit.choice, sample, check, looks, on_ranks.models)
        # ranks that miss cached arguments have not looked at their memory
        if result is not None and "missing" not in result.stats:
            on_ranks.sizes.add(size)
        return result, all(holds)

    def _check_options(self, control, options: dict[str, Any]):
        if control is not None:
            raise RefusedError(
                "the conditioning has a ControlNet ('control'), whose residuals go into the transformer's "
                "blocks, which are on the ranks of Parallel Model; remove it or use ComfyUI's own loader."
            )
        for name, value in options.items():
            inner = _named_entries(value)
            if name in REFUSED_OPTIONS and (inner or not isinstance(value, (dict, type(None)))):
                where = f"{name!r}: {', '.join(inner)}" if inner else repr(name)
                remedy = REMEDIES.get(name, "remove the node that sets them or use ComfyUI's own loader")
                raise RefusedError(
                    f"the MODEL has {REFUSED_OPTIONS[name]} ({where}), which cannot reach the transformer "
                    f"on the ranks of Parallel Model; {remedy}."
                )
            if name == "qwen_image21_cache" and value and value.get("dtype", "default") != "default":
                raise RefusedError(
                    f"the MODEL caches a prompt's keys and values as {value['dtype']} (Qwen Image 2.1 "
                    f"Cache), but the ranks of Parallel Model cache them as they are; set dtype to default "
                    f"or remove that node."
                )
            if name not in HARMLESS_OPTIONS and name not in REFUSED_OPTIONS:
                self._say_once(
                    f"transformer_options has {name!r}, which stays here: the ranks of Parallel Model do "
                    f"not see it."
                )

    def _warn_of_idle_ranks(self, batch: int, config: ParallelConfig):
        groups = config.cfg_degree * config.data_parallel_degree
        if batch % groups:
            self._say_once(
                f"a call of the model has {batch} sample(s) (prompts x latents), which cfg_degree "
                f"{config.cfg_degree} x data_parallel_degree {config.data_parallel_degree} cannot share "
                "evenly, so some ranks compute what others compute too: exact, but no faster. At cfg 1.0, "
                "or where prompts of different lengths are called one by one, use ulysses_degree instead."
            )

    def _say_once(self, text: str):
        if text not in self._said:
            self._said.add(text)
            logging.warning("parallel-dit: %s", text)
            NodeStatus().warn(text)


def _caches(models: tuple, backend: Backend) -> list[ArgumentCache]:
    """Return the caches of the MODELs of a guider that have called the model on this backend."""
    transformers = (each.model.diffusion_model for each in models)
    ours = {id(each): each for each in transformers if isinstance(each, RemoteTransformer)}
    return [each.cached_arguments for each in ours.values() if each.called is backend]
