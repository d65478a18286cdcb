"""A diffusers transformer in the plainest sampling loop there is: what the engine is compared with."""

from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
from diffusers.models._modeling_parallel import ContextParallelConfig
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from backend.protocol import Sample

#: The backend of diffusers by which its ring attends: "native", which Ulysses takes, returns no log-sum-exp.
RING_BACKEND = "_native_flash"


class PlainLoop:
    """Euler steps of a flow model over diffusers' own Flux; ``parallel`` runs it with diffusers' own context
    parallelism."""

    def __init__(self, model: str, device: str, parallel: ContextParallelConfig | None = None):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.transformer = FluxTransformer2DModel.from_pretrained(model, torch_dtype=dtype)
        self.transformer.eval().requires_grad_(False)
        torch.nn.Module.to(self.transformer, device)  # whose signature diffusers' own method hides
        self.device = device
        if parallel:
            if (parallel.ring_degree or 1) > 1:
                self._attend_with_lse()
            with _one_accelerator(device):
                self.transformer.enable_parallelism(config=parallel)
        self.compiled = {}

    def _attend_with_lse(self):
        """Have attention return its log-sum-exp, by which a ring merges; in this transformer alone."""
        flash_on_cpu()
        with attention_backend("native"):  # setting a model's backend sets that of the process, too
            self.transformer.set_attention_backend(RING_BACKEND)

    def compile(self, fullgraph: bool):
        """Compile the blocks as diffusers does; ``compiled`` runs use them, others do not."""
        self.transformer.compile_repeated_blocks(fullgraph=fullgraph)
        for module in self.transformer.modules():
            if module._compiled_call_impl is not None:
                self.compiled[module] = module._compiled_call_impl
        assert self.compiled, "Flux names its repeated blocks"

    @torch.inference_mode()
    def __call__(self, sample: Sample, compiled: bool = False) -> torch.Tensor:
        """The latent (B, C, H, W) of the request's positive prompt in float32, on the CPU."""
        for module, call in self.compiled.items():
            module._compiled_call_impl = call if compiled else None
        noise, dtype = sample.tensors["noise"], self.transformer.dtype
        conditioning = {
            name.removeprefix("positive."): value.to(self.device, dtype)
            for name, value in sample.tensors.items()
            if name.startswith("positive.")
        }
        batch, channels, height, width = noise.shape
        rows, columns = height // 2, width // 2
        x = (
            noise.reshape(batch, channels, rows, 2, columns, 2)
            .permute(0, 2, 4, 1, 3, 5)
            .reshape(batch, rows * columns, -1)
            .to(self.device)
        )
        fixed = dict(
            encoder_hidden_states=conditioning["c_crossattn"],
            pooled_projections=conditioning["y"],
            guidance=conditioning.get("guidance"),
            return_dict=False,
            img_ids=_image_ids(rows, columns).to(self.device, dtype),
            txt_ids=torch.zeros(conditioning["c_crossattn"].shape[1], 3, device=self.device, dtype=dtype),
        )
        for sigma, sigma_next in sample.tensors["sigmas"].to(self.device).unfold(0, 2, 1):
            velocity = self.transformer(hidden_states=x.to(dtype), timestep=sigma.expand(batch), **fixed)[0]
            x = x + (sigma_next - sigma) * velocity.float()
        return (
            x.reshape(batch, rows, columns, channels, 2, 2)
            .permute(0, 3, 1, 4, 2, 5)
            .reshape(noise.shape)
            .cpu()
        )


def _image_ids(rows: int, columns: int) -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(y), y, x], dim=-1).reshape(-1, 3)


@contextmanager
def _one_accelerator(device: str):
    """diffusers divides by the number of accelerators when it places a rank: without any, one must be
    claimed."""
    if device != "cpu":
        yield
        return
    with patch("torch.accelerator.device_count", lambda: 1):
        yield


@cache
def flash_on_cpu() -> torch.library.Library:
    """Give the operator of torch's flash attention, which has kernels on GPUs alone, torch's kernel of the
    same on the CPU: diffusers' backend calls the operator by name. Nothing else calls it with CPU tensors."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", _flash, "CPU")
    return library  # whose end would take the kernel away


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
):
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = on_cpu(query, key, value, dropout_p, is_causal, scale=scale)
    # lengths and random states are of sequences of several lengths, and of dropout
    nothing = query.new_empty(0)
    # strides are those of the GPU kernel, which compiled code expects of the operator
    lse = lse.contiguous()
    return out, lse, nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing
