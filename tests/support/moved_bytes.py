"""The bytes that operators read and write, counted by their tensors, and how many operators."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators that move nothing.
VIEWS = {
    *(
        "alias",
        "as_strided",
        "detach",
        "expand",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
    ),
    *("t", "transpose", "unbind", "unsqueeze", "view", "view_as_complex", "view_as_real"),
    *("_reshape_alias", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty"),
}


class MovedBytes(TorchDispatchMode):
    """Counts in ``bytes``: every input read once, every output written once; in ``kernels`` what did so."""

    def __init__(self):
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        out = func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if name in VIEWS:
            return out
        self.kernels += 1
        kwargs.pop("out", None)
        read = args[1:] if name == "copy_" else (args, kwargs)
        tensors = [x for x in tree_leaves((read, out)) if isinstance(x, torch.Tensor)]
        self.bytes += sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)
        return out
