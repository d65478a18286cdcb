"""diffusers' layer norms that an embedding scales and shifts, in one pass where all tokens share it: torch's
layer norm takes scale and shift as its weight and bias, and moves 4 bytes a value for 12; of several samples
it is two passes. Compiled blocks keep diffusers' form, which a compiler fuses."""

import torch
from diffusers.models import normalization
from torch import Tensor, nn

from .fewer_passes import adapted

#: The modulation of the last norm of most classes, an AdaLayerNormContinuous of this name.
LAST_MODULATION = ("norm_out.silu", "norm_out.linear")


class AdaLayerNormZero(normalization.AdaLayerNormZero):
    """The norm before a block's attention (adaLN-Zero, arXiv 2212.09748)."""

    def forward(self, x, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
        if self.emb is not None or emb is None or not is_bare(self.norm, x, emb):
            return super().forward(x, timestep, class_labels, hidden_dtype, emb)
        shift, scale, *others = self.linear(self.silu(emb)).chunk(6, dim=1)
        return adapted(self.norm, x, shift, scale), *others


class AdaLayerNormZeroSingle(normalization.AdaLayerNormZeroSingle):
    """The norm of a block whose attention and MLP are parallel."""

    def forward(self, x, emb=None):
        if emb is None or not is_bare(self.norm, x, emb):
            return super().forward(x, emb)
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return adapted(self.norm, x, shift, scale), gate


class AdaLayerNormContinuous(normalization.AdaLayerNormContinuous):
    """The norm before the last layer, and of streams that end."""

    def forward(self, x, conditioning_embedding):
        if not is_bare(self.norm, x, conditioning_embedding):
            return super().forward(x, conditioning_embedding)
        scale, shift = self.linear(self.silu(conditioning_embedding).to(x.dtype)).chunk(2, dim=1)
        return adapted(self.norm, x, shift, scale)


#: diffusers' class -> ours.
CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    normalization.AdaLayerNormZero: AdaLayerNormZero,
    normalization.AdaLayerNormZeroSingle: AdaLayerNormZeroSingle,
    normalization.AdaLayerNormContinuous: AdaLayerNormContinuous,
}


def is_bare(norm: nn.Module, x: Tensor, embedding: Tensor) -> bool:
    """Return whether ``adapted`` can stand for ``norm`` and what follows it, for embeddings (B, D)."""
    if torch.compiler.is_compiling() or embedding.ndim != 2:
        return False
    return type(norm) is nn.LayerNorm and norm.weight is None and x.dtype in (embedding.dtype, torch.float32)
