"""Load -> parallelize -> sample, on one rank. Every rank calls the same methods in the same order."""

from .runtime import lean_imports  # noqa: F401  # before all that imports diffusers

# isort: split
import gc
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from .config import ParallelConfig
from .errors import UnsupportedError
from .hardware.device_memory import DeviceMemory, is_unified
from .hardware.gpu_kernels import Capability
from .hardware.host_memory import PAGE_LOCKED
from .loading import parking
from .loading.checkpoint import Checkpoint
from .loading.compute_dtype import chosen_dtype
from .loading.files.allowed_folders import ANYWHERE, Folders
from .loading.load_report import LoadReport, forget_peak, peak_bytes
from .loading.lora.lora_fusion import FusedWeights
from .loading.lora.lora_keys import LoraUse, stack_digest
from .loading.recognition import open_checkpoint
from .loading.staging import upload_parameters
from .loading.weight_loading import CheckedLoad, matrices
from .models.family import Family
from .parallel import fsdp, tensor_parallel
from .parallel.mesh import Mesh
from .parallel.modulation import token_scales
from .parallel.modulation.cached_layers import cache_layers
from .parallel.modulation.modulation_cache import LayerCache
from .parallel.pipeline_stage import Stage
from .parallel.stage_split import Stages
from .protocol import LORAS, Describe, ModelCall, Sample
from .quantization.kernels import AUTO, MatmulChoice
from .quantization.matmul import Product, capability_of, choose_all, summary, wanted
from .quantization.packed_weight import free_scratch, read_factors
from .rank_plan import describe
from .rank_plan.request_size import described_size
from .runtime import callbacks
from .sampling.describe_validation import check_workload
from .sampling.model_call import build_call, check_call, samples_of_replicas
from .sampling.model_inputs import ModelInputs
from .sampling.model_runner import LoadedModel
from .sampling.request import build
from .sampling.runs import Prepared, call_model, run_request
from .sampling.step_loop import Callbacks
from .sampling.tensor_validation import check_numbers, check_result
from .sampling.validation import RequestTarget, check_degrees, check_sample, refusing
from .serving.argument_cache import ArgumentCache

#: Names of models with LoRAs that are known at once; one more takes the place of the oldest.
MAX_STACKS = 256


class Engine:
    """Loads and runs the models of this rank on ``mesh``."""

    def __init__(self, config: ParallelConfig, mesh: Mesh, folders: Folders = ANYWHERE):
        """``folders``: below which a client's paths lie; the leader checks them (rank/leader.py)."""
        self.config = config
        self.mesh = mesh
        self.folders = folders
        self.models: dict[str, LoadedModel] = {}
        #: Name of a model with LoRAs -> what they are; ``models`` has the model under that name and its own.
        self.lora_stacks: dict[str, tuple[LoraUse, ...]] = {}
        self.argument_cache = ArgumentCache(mesh.device)
        self.capabilities: set[Capability] = {*filter(None, [capability_of(mesh.device)])}
        self.memory = DeviceMemory(mesh.device)
        #: Whether weights may wait in host memory: not where that is the GPU's own, on no rank if on one.
        self.parks = not is_unified(mesh.device)
        #: What any rank does not multiply natively, and why: the same on all ranks.
        self.refused: dict[Product, str] = {}

    # ------------------------------------------------------------------ loading
    @refusing("the model")
    def check_load(
        self, path: str, weight_dtype: str, matmul: str = AUTO, autodetected: Mapping | None = None
    ) -> CheckedLoad:
        """Open a checkpoint by its headers, and refuse what cannot run. Raises UnsupportedError."""
        checkpoint = open_checkpoint(path, self.folders, autodetected)
        check_degrees(checkpoint, self.config)
        dtype = chosen_dtype(weight_dtype, checkpoint, *self._where)
        cuts = checkpoint.cut_plan(self.config).shards(self.mesh)
        checked = CheckedLoad(checkpoint, dtype, cuts, matrices(checkpoint, cuts, dtype))
        self._choices(checked, matmul)
        return checked

    @property
    def _where(self) -> tuple[torch.device, Capability | None]:
        return self.mesh.device, min(self.capabilities, default=None)

    def products(self, checked: CheckedLoad, matmul: str) -> list[Product]:
        """Return what ranks try before they load a checkpoint (native_trial.agree)."""
        return wanted(checked.matrices.values(), matmul, *self._where)

    def _choices(self, checked: CheckedLoad, matmul: str) -> dict[str, MatmulChoice]:
        """Return quantized parameter -> how it multiplies. Raises UnsupportedError."""
        name = checked.checkpoint.name
        return choose_all(name, checked.matrices, matmul, *self._where, self.refused)

    def load(
        self,
        key: str,
        path: str,
        weight_dtype: str,
        matmul: str = AUTO,
        autodetected: Mapping | None = None,
        on_progress: Callable[[int, int], None] = callbacks.nothing,
        checked: CheckedLoad | None = None,
    ):
        """Load the transformer at ``path`` under the name ``key``, in this order: place the blocks on stages,
        cut matrices (tensor parallel), read what is left for this rank, shard it (FSDP), wrap the blocks.
        ``matmul``: how quantized layers multiply (quantization/matmul.py). ``autodetected`` as in
        open_checkpoint, ``on_progress`` as in Checkpoint.load. ``checked``: by check_load, whose checkpoint
        stays as it is."""
        started = time.perf_counter()
        forget_peak(self.mesh.device)
        if checked is None:
            checked = self.check_load(path, weight_dtype, matmul, autodetected)
        else:
            checked = replace(checked, checkpoint=open_checkpoint(path, self.folders, autodetected))
        checkpoint, dtype, cuts = checked.checkpoint, checked.dtype, checked.cuts
        transformer = checkpoint.transformer
        stages = checkpoint.stages(self.config)
        own = self.mesh.pp.rank
        blocks = stages.blocks[own]
        held = {name: holder == own for name, holder in stages.holders.items()}
        choices = self._choices(checked, matmul)
        if self.mesh.tp.size > 1:
            scheme = self.config.split_scheme
            tensor_parallel.apply(transformer, cuts, checkpoint.family, scheme, self.mesh.tp)
        sharded = self.config.shard_weights
        device = torch.device("cpu") if sharded else self.mesh.device
        on_block = partial(self._place, checkpoint)
        bytes_read = checkpoint.load(blocks, dtype, device, cuts, held, choices, on_progress, on_block)
        read_factors(transformer)
        weights = FusedWeights(checkpoint, cuts, self.mesh.device, device)
        cache = self._cache_layers(checkpoint, stages, dtype)
        if sharded:
            fsdp.shard_rest(transformer, checkpoint.family.blocks.lists, self.mesh, upload_parameters)
        weight_bytes = fsdp.bytes_on(transformer, self.mesh.device)
        staged = self._is_staged(checkpoint.family)
        stage = Stage(transformer, checkpoint.family, self.mesh, blocks) if staged else None
        cost = (weight_bytes, peak_bytes(self.mesh.device), time.perf_counter() - started)
        quantized = summary(transformer, fsdp.held_bytes)
        place = (self.mesh.rank, own, (blocks.start, blocks.stop))
        report = LoadReport(*place, bytes_read, checkpoint.files.size, *cost, quantized)
        model = LoadedModel(transformer, dtype, stage, report, sharded, cache, weights, choices)
        token_scales.regroup(model.modules, self.mesh.sp)
        self.models[key] = model

    def _place(self, checkpoint: Checkpoint, block: str):
        """Offload and shard a loaded block: a rank never holds more than its share and a block."""
        modulation = checkpoint.modulation[block]
        if self.config.offload_modulation:
            parking.to_host(map(checkpoint.transformer.get_submodule, modulation), pinned=False)
        if self.config.shard_weights:
            fsdp.shard_block(checkpoint.transformer, block, modulation, self.mesh, upload_parameters)

    def _cache_layers(self, checkpoint: Checkpoint, stages: Stages, dtype: torch.dtype) -> LayerCache:
        own = stages.blocks[self.mesh.pp.rank]
        blocks = [name for i, name in enumerate(checkpoint.block_names) if i in own]
        where = torch.device("cpu") if self.config.offload_modulation else self.mesh.device
        family = checkpoint.family
        cache = cache_layers(checkpoint.transformer, blocks, family, where, dtype, stages, self.mesh)
        cache.offload(parking.may_page_lock(cache.offloaded))
        return cache

    def _is_staged(self, family: Family) -> bool:
        # patches without a pipeline simulate it in one process, for measuring drift; clients are refused that
        divided = self.mesh.pp.size > 1 or self.mesh.sp.size > 1 or self.config.patches > 1
        return divided or family.cache.static_text

    def drop_for(self, config: ParallelConfig):
        """Unload the models of which not every rank would hold the same under ``config``, and sharded ones,
        which FSDP gathers over the groups of now."""
        same = self.config.same_weights(config) and not config.shard_weights
        self.argument_cache.clear()
        for key in self.models.keys() - self.lora_stacks.keys():
            if not (same and self._fits(self.models[key], config)):
                self.unload(key)

    def rearrange(self, config: ParallelConfig, mesh: Mesh):
        """Run on other process groups of the same ranks; what ``drop_for`` leaves keeps its weights."""
        self.drop_for(config)  # which compares with self.config: before that is another
        old, self.config, self.mesh = self.mesh, config, mesh
        for key in self.models.keys() - self.lora_stacks.keys():
            self._regroup(self.models[key], old)

    def _fits(self, model: LoadedModel, config: ParallelConfig) -> bool:
        with suppress(UnsupportedError):
            check_degrees(model.checkpoint, config)
            return True
        return False

    def _regroup(self, model: LoadedModel, old: Mesh):
        started = time.perf_counter()
        for module in model.modules:
            tensor_parallel.regroup(module, old, self.mesh)
        token_scales.regroup(model.modules, self.mesh.sp)
        model.cache.mesh = self.mesh
        staged = self._is_staged(model.family)
        if model.stage and staged:
            model.stage.join(self.mesh)
        elif model.stage:
            model.stage.leave()
            model.stage = None
        elif staged:
            model.stage = Stage(model.transformer, model.family, self.mesh, range(*model.report.blocks))
        model.report = replace(model.report, bytes_read=0, seconds=time.perf_counter() - started)

    @refusing("a LoRA")
    def check_loras(self, key: str, stack: tuple[LoraUse, ...]) -> list[str]:
        """Refuse LoRAs that do not fit the loaded model ``key``, or hold what is no number; for each a
        warning, empty where it fits in full and costs little. Raises UnsupportedError."""
        return self.models[key].weights.check(stack)

    def add_lora_stack(self, key: str, stack: tuple[LoraUse, ...], digest: str = "") -> str:
        """Return a name of the loaded model ``key`` with the LoRAs of ``stack``, fused when it is sampled.
        ``digest``: rank 0's, where this rank's machine may have the files with other times."""
        if not stack:
            return key
        name = f"{key}{LORAS}{digest or stack_digest(stack)}"
        self.models[name] = self.models[key]
        self.lora_stacks.pop(name, None)
        self.lora_stacks[name] = stack
        for oldest in list(self.lora_stacks)[:-MAX_STACKS]:
            del self.lora_stacks[oldest], self.models[oldest]
        return name

    def fused(self, name: str) -> LoadedModel:
        """Return the model of that name, with its LoRAs and no others in the weights."""
        model = self.models[name]
        model.unpark(self.mesh.device)
        model.weights.fuse(self.lora_stacks.get(name, ()))
        return model

    def park(self, model: LoadedModel, ranks: Set[int]):
        """Move a model's weights to host memory on ``ranks``, until it is ``fused`` again. The process groups
        stay. Every rank calls it: those whose weights stay forget clients' arguments too."""
        if model.park(ranks):
            self._free_leftovers()
        else:
            self.argument_cache.clear()

    def unload(self, key: str):
        """Free a model under all its names; no error where it is not loaded."""
        model = self.models.get(key)
        self.models = {name: other for name, other in self.models.items() if other is not model}
        self.lora_stacks = {name: stack for name, stack in self.lora_stacks.items() if name in self.models}
        del model
        self._free_leftovers()
        PAGE_LOCKED.give_back()

    def _free_leftovers(self):
        self.argument_cache.clear()
        gc.collect()  # a stage and its blocks know each other
        free_scratch()
        self.memory.release()

    def facts(self, key: str) -> dict:
        """Return what a client needs to know of a loaded model (Loaded.info)."""
        return self.models[key].facts(self.config, self.mesh.device, self.capabilities)

    @refusing("what is to be described")
    def describe(self, message: Describe, checkpoint: Checkpoint) -> list[dict]:
        """Return one dict for each rank (RankPlan.as_dict), for a loaded model; ``checkpoint``: of the same
        file, itself not loaded. Raises UnsupportedError or ConfigError."""
        model = self.loaded(message.model)
        asked = ("num_pipeline_patch", "stale_kv", "wire")
        config = replace(self.config, **{name: getattr(message, name) for name in asked})
        if message.drained:
            config = replace(config, num_pipeline_patch=1)
        tokens = check_workload(message, config, checkpoint)
        request = described_size(message, tokens, config)
        plans = describe(config, checkpoint, request, model.dtype, model.choices)
        return [plan.as_dict() for plan in plans]

    # ------------------------------------------------------------------ sampling
    def _target(self, name: str) -> RequestTarget:
        model = self.loaded(name)
        device = self.mesh.device.type
        return RequestTarget(model.checkpoint, model.dtype, device, self.capabilities)

    @refusing("the request")
    def check_sample(self, sample: Sample) -> ModelInputs:
        """Refuse a request that cannot run, before any collective. Raises UnsupportedError or ConfigError."""
        return check_sample(sample, self.config, self._target(sample.model))

    @torch.inference_mode()
    def prepare_sample(self, sample: Sample, inputs: ModelInputs | None = None) -> Prepared:
        """Fuse the model's LoRAs and place a checked request's tensors on this rank. No collective."""
        model = self.fused(sample.model)
        settings = (self.config, model.checkpoint, model.dtype, self.mesh.device)
        return Prepared(model, build(sample, *settings, self.mesh.dp.rank, inputs))

    @torch.inference_mode()
    def sample(
        self, sample: Sample, callbacks: Callbacks, prepared: Prepared | None = None
    ) -> tuple[Tensor, dict]:
        """Denoise; return (B, C, [T,] H, W) in float32 on the first stage, and statistics. Raises
        RequestCancelled. ``callbacks`` as with_downloads says; ``prepared``: by prepare_sample."""
        prepared = prepared or self.prepare_sample(sample)
        return run_request(self.mesh, prepared, sample, callbacks)

    @refusing("the call")
    def check_forward(self, call: ModelCall) -> ModelInputs:
        """Refuse a call that cannot run, before any collective. Raises UnsupportedError or ConfigError."""
        target = self._target(call.model)
        check_numbers(call.tensors)
        return check_call(self.argument_cache.filled(call), self.config, target)

    @torch.inference_mode()
    def prepare_call(self, call: ModelCall, inputs: ModelInputs | None = None) -> Prepared:
        """Fuse the model's LoRAs and place one call's tensors on this rank, as prepare_sample."""
        model = self.fused(call.model)
        mesh = self.mesh
        replicas = samples_of_replicas(call.tensors["x"].shape[0], mesh)
        samples = replicas[mesh.dp.rank * mesh.cfg.size + mesh.cfg.rank]
        filled = self.argument_cache.filled(call)
        where = (mesh.device, samples, inputs)
        return Prepared(model, build_call(filled, model.checkpoint, model.dtype, *where))

    @torch.inference_mode()
    def forward(self, call: ModelCall, prepared: Prepared | None = None) -> tuple[Tensor, dict]:
        """Call the model once; return its output as ``sample`` does its latent, and statistics."""
        prepared = prepared or self.prepare_call(call)
        self.argument_cache.update(call)
        return call_model(self.mesh, prepared, call.tensors["x"].shape[0])

    def check_result(self, result: Tensor, message: Sample | ModelCall):
        """Refuse what was computed for ``message`` where no value is a number. Raises UnsupportedError."""
        model = self.models[message.model]
        check_result(result, model.checkpoint.name, model.dtype, message.attention)

    def loaded(self, name: str) -> LoadedModel:
        """Return the model of that name, whose LoRAs fit it still. Raises UnsupportedError."""
        if name not in self.models:
            raise UnsupportedError(
                f"the model {name!r:.100} is not loaded in this backend; run LoadParallelDiT again."
            )
        if self.lora_stacks.get(name, ()) != self.models[name].weights.stack:
            self.check_loras(name, self.lora_stacks.get(name, ()))
        return self.models[name]
