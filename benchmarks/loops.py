"""A diffusers transformer in the plainest sampling loop there is: what the engine is compared with."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
from diffusers.models._modeling_parallel import ContextParallelConfig
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel

from backend.protocol import Sample


class PlainLoop:
    """Euler steps of a flow model over diffusers' own Flux; ``ulysses`` > 1 runs it with diffusers' own
    context parallelism."""

    def __init__(self, model: str, device: str, ulysses: int = 1):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.transformer = FluxTransformer2DModel.from_pretrained(model, torch_dtype=dtype)
        self.transformer.eval().requires_grad_(False)
        torch.nn.Module.to(self.transformer, device)  # whose signature diffusers' own method hides
        self.device = device
        if ulysses > 1:
            with _one_accelerator(device):
                self.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=ulysses))
        self.compiled = {}

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
