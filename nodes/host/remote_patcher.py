"""The ModelPatcher of Parallel Model: takes LoRAs of ComfyUI's loaders, refuses other changes of weights."""

import functools
import os
import uuid
from collections.abc import Callable
from typing import NoReturn

import comfy.model_patcher
import comfy.sd
from safetensors import SafetensorError, safe_open

from ...backend.protocol import RefusedError
from . import stock_loras
from .handle import ParallelDiT, with_lora
from .progress import node_text
from .report import lora_line

#: Attachment of a MODEL: its handle, with the LoRAs that ComfyUI's own loaders have added, and the patches of
#: each one's file. Not an entry of transformer_options, which a guider of two models hands to both.
HANDLE = "parallel_dit"
#: Where ComfyUI's LoRA loaders put the metadata of a file, as Get IC-LoRA Parameters reads it.
LORA_METADATA = "lora_metadata"


def _refuse(what: str) -> NoReturn:
    raise RefusedError(
        f"{what} cannot be used with the MODEL of Parallel Model, whose weights are on the ranks; remove "
        f"that node or use ComfyUI's own loader."
    )


def _refusing(what: str) -> Callable[..., NoReturn]:
    """Return a method of RemotePatcher that refuses ``what``."""

    def method(self, *args, **kwargs) -> NoReturn:
        _refuse(what)

    return method


def _write(patches: dict, dit: ParallelDiT, files: dict) -> str | None:
    info = dit.loaded.info
    return stock_loras.write(patches, info["weights"], info["parts"], files.keys())


class RemotePatcher(comfy.model_patcher.ModelPatcher):
    """A ModelPatcher that refuses what would change, read or copy the weights, which are elsewhere."""

    @property
    def dit(self) -> ParallelDiT:
        """The transformer with this MODEL's LoRAs; files of them that were removed are written again."""
        dit, files = self._attached
        for path, patches in files.items():
            if not os.path.exists(path):
                _write(patches, dit, files)
        return dit

    @property
    def _attached(self) -> tuple[ParallelDiT, dict[str, dict]]:
        return self.get_attachment(HANDLE) or (self.model.diffusion_model.dit, {})

    def pre_run(self):
        """Have the transformer compute with this MODEL's LoRAs. A guider's second MODEL is sampled under the
        options of the first, and without its wrappers."""
        self.model.diffusion_model.sampled = self.dit
        super().pre_run()

    def cleanup(self):
        """Take back what ``pre_run`` has done."""
        super().cleanup()
        self.model.diffusion_model.sampled = None

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        """Hand a plain LoRA to the ranks, as Parallel LoRA would; RefusedError for other patches. At strength
        0, as where a LoRA is for the text encoder alone, nothing is looked at. Each call puts a line under
        the node: the page keeps the one before where it is given none."""
        if strength_model != 1.0:
            _refuse("a patch that scales the weights")
        if not strength_patch:
            node_text()("strength 0: nothing is added to the transformer")
            return list(patches)
        dit = self.dit
        _, files = self._attached
        path = _write(patches, dit, files)
        if path and dit.config.address:
            _refuse("a LoRA file of ComfyUI's own loaders (a backend with an address may not see it)")
        if not patches:
            _refuse("a LoRA without a weight of this transformer")
        if path:
            patched = with_lora(dit, path, strength_patch)
            info = patched.loaded.info
            said = (lora_line(dit.loaded.info, info, patched.config), info["warnings"][-1])
            node_text()("\n".join(filter(None, said)))
            self.set_attachments(HANDLE, (patched, files | {path: patches}))
            self.patches_uuid = uuid.uuid4()
        else:
            node_text()("nothing of it is for the transformer")
        return list(patches)

    add_hook_patches = _refusing("a LoRA hook or another hook on weights")
    add_weight_wrapper = _refusing("a wrapper of weights")
    get_key_patches = _refusing("a merge of models")
    state_dict_for_saving = _refusing("a node that saves the model")
    deepclone_multigpu = _refusing("MultiGPU work units")
    set_model_compute_dtype = _refusing("another compute type (set weight_dtype in Load Parallel DiT)")
    set_model_optimized_attention = _refusing("another attention function (set attention in Parallel Config)")

    def add_object_patch(self, name, obj):
        """Refuse patches of the transformer's parts, which is on the ranks. Raises RefusedError."""
        if name.endswith(".default_ref_method"):
            raise RefusedError(
                "Flux KV Cache cannot be used with the MODEL of Parallel Model; take it out, and put Edit "
                "Model Reference Method (index_timestep_zero) after each prompt with references: the ranks "
                "compute them at every step."
            )
        if name.startswith("diffusion_model"):
            _refuse(f"a patch of the transformer's own parts ({name})")
        super().add_object_patch(name, obj)

    def add_wrapper_with_key(self, wrapper_type, key, wrapper):
        """Refuse torch.compile, which compiles no rank. Raises RefusedError."""
        if key == "torch.compile":
            _refuse("torch.compile")
        super().add_wrapper_with_key(wrapper_type, key, wrapper)


def attach_lora_metadata(patcher: comfy.model_patcher.ModelPatcher, loras: tuple[tuple[str, float], ...]):
    """Attach the metadata of the last of ``loras`` (path, strength) that has some, as ComfyUI's loaders do:
    without it an IC-LoRA's guides would be encoded at another size."""
    for path, _ in loras:
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata()
        except (OSError, SafetensorError):
            continue  # a load names the file, and what is wrong with it
        if metadata:
            patcher.set_attachments(LORA_METADATA, metadata)


def take_bypass_loras():
    """Let Load LoRA (Bypass) add a LoRA to the MODEL of Parallel Model as Load LoRA does: ComfyUI hangs it on
    the transformer's modules, finds none here, and would go on without the LoRA."""
    name = "load_bypass_lora_for_models"
    bypass = getattr(comfy.sd, name, None)
    if bypass is None:  # an older ComfyUI
        return

    @functools.wraps(bypass)
    def load(model, *arguments, **options):
        found = comfy.sd.load_lora_for_models if isinstance(model, RemotePatcher) else bypass
        return found(model, *arguments, **options)

    setattr(comfy.sd, name, load)
