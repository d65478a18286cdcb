"""The last module of models that denoise several latents."""

from collections.abc import Sequence

from torch import Tensor, nn

from .shape_only import join_latents


class NestedOutput(nn.Module):
    """What Blocks.output_layer names of a model that denoises several latents, each with a last layer: after
    it the outputs of a rank's own tokens are filled up to those of all latents, in one tensor. It has no
    weights."""

    def __init__(self, order: tuple[int, ...]):
        super().__init__()
        self.order = order

    def forward(self, latents: Sequence[Tensor]) -> Tensor:
        """Join the outputs (B, n, F) of each latent."""
        return join_latents(latents, self.order)
