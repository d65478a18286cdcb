"""The ModelPatcher of Parallel Model: takes LoRAs of ComfyUI's own loaders, refuses what else changes weights."""

import uuid

import comfy.model_patcher

from ...backend.protocol import RefusedError
from . import stock_loras
from .handle import with_lora

#: Entry of transformer_options with the handle whose LoRAs ComfyUI's own loaders have added.
HANDLE = "parallel_dit"


def _refused(what: str):
    def method(self, *args, **kwargs):
        raise RefusedError(
            f"{what} cannot be used with the MODEL of Parallel Model, whose weights are on the ranks; "
            f"remove that node or use ComfyUI's own loader."
        )

    return method


class RemotePatcher(comfy.model_patcher.ModelPatcher):
    """A ModelPatcher that refuses what would change, read or copy the weights, which are elsewhere."""

    def add_patches(self, patches, strength_patch=1.0, strength_model=1.0):
        """Hand a plain LoRA to the ranks, as Parallel LoRA would; RefusedError for other patches."""
        transformer = self.model.diffusion_model
        if strength_model != 1.0:
            _refused("a patch that scales the weights")(self)
        options = self.model_options.setdefault("transformer_options", {})
        dit = options.get(HANDLE, transformer.dit)
        if dit.config.address:
            _refused("a LoRA file of ComfyUI's own loaders (a backend with an address may not see it)")(self)
        path = stock_loras.write(patches, dit.loaded.info["weights"])
        if not patches:
            _refused("a LoRA without a weight of this transformer")(self)
        if path and strength_patch:
            options[HANDLE] = with_lora(dit, path, strength_patch)
            self.patches_uuid = uuid.uuid4()
        return list(patches)

    add_hook_patches = _refused("a LoRA hook or another hook on weights")
    add_weight_wrapper = _refused("a wrapper of weights")
    get_key_patches = _refused("a merge of models")
    state_dict_for_saving = _refused("a node that saves the model")
    deepclone_multigpu = _refused("MultiGPU work units")
    set_model_compute_dtype = _refused("another compute type (set weight_dtype in Load Parallel DiT)")

    def add_object_patch(self, name, obj):
        if name.startswith("diffusion_model"):
            _refused(f"a patch of the transformer's own parts ({name})")(self)
        super().add_object_patch(name, obj)

    def add_wrapper_with_key(self, wrapper_type, key, wrapper):
        if key == "torch.compile":
            _refused("torch.compile")(self)
        super().add_wrapper_with_key(wrapper_type, key, wrapper)
