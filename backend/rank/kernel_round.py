"""Attention kernels, tried on every rank before their first request. All ranks make the same rounds."""

from collections.abc import Callable

import torch

from ..loading.load_report import by_rank
from ..parallel.attention import kernel_table, kernel_trial
from ..sampling.model_runner import LoadedModel

#: Sizes with which kernels are tried for models whose heads are of unknown size.
UNKNOWN_HEADS = (64, 128)


def refusal(
    name: str,
    model: LoadedModel,
    merges: bool,
    device: torch.device,
    tried: dict[tuple, str],
    all_gather_object: Callable[[str], list[str]],
) -> str:
    """Return why requests with the attention kernel ``name`` are refused; empty where they run. The kernel is
    tried with the model's heads, once (``tried``), and again where memory ran out for that on some rank;
    where their size is unknown, it has to fail with all of UNKNOWN_HEADS that it has. No collective for
    torch's own, which only GPUs have several of. ``merges``: a ring does, which needs the log-sum-exp."""
    kernel = kernel_table.kernel_of(name)
    lse = kernel.lse and merges
    case = (name, model.dtype, model.head_size, lse)
    if case in tried:
        return tried[case]
    sizes = [model.head_size] if model.head_size else list(filter(kernel.has_head, UNKNOWN_HEADS))
    refused = ""
    is_known = True
    if kernel.call is not None and sizes:
        found = [kernel_trial.failure(name, model.dtype, size, lse, device) for size in sizes]
        own = kernel_trial.NO_MEMORY if kernel_trial.NO_MEMORY in found else found[0]
        gathered = all_gather_object(own if all(found) else "")
        failures = ["" if each == kernel_trial.NO_MEMORY else each for each in gathered]
        refused = kernel_trial.refusal(name, by_rank(failures))
        is_known = bool(refused) or kernel_trial.NO_MEMORY not in gathered
    elif device.type == "cuda":
        known = [kernel_trial.settle(model.dtype, size, lse, device) for size in sizes]
        is_known = all(known)
    if is_known:
        tried[case] = refused
    return refused
