"""One scale for a layer's inputs where the ranks of sequence parallelism each have some of its tokens.

nvfp4 without a stored input_scale quantizes inputs under the largest value of all of them. Ranks agree on it
in the layers that all of them call equally often: those of LayerTokens.divided. What the modulation and the
prompt's keys and values are made of is the same on each.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from ...quantization.packed_weight import PackedWeight
from ...runtime.opaque_ops import local_text_tokens
from .. import comm
from ..mesh import Axis


def regroup(modules: Iterable[nn.Module], sp: Axis):
    """Have the quantized weights of ``modules`` compare largest values over ``sp``, where they need it."""
    for weight in (each for module in modules for each in module.modules()):
        if isinstance(weight, PackedWeight):
            agrees = sp.size > 1 and weight.has_one_scale and weight.divided
            of_text = weight.divided == "text"
            weight.max_over_token_ranks = (
                partial(_amax_over_tokens, axis=sp, of_text=of_text) if agrees else None
            )


def _amax_over_tokens(amax: Tensor, axis: Axis, of_text: bool) -> Tensor:
    """Return the largest of every rank's ``amax``; a rank that has a dummy token for its text has none."""
    own = torch.zeros_like(amax) if of_text and not local_text_tokens(1) else amax
    return comm.all_reduce_max(own, axis, "scales")
