"""Records what a transformer of any diffusers class does, in runs of a shallow copy with random weights."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from diffusers.models.modeling_utils import no_init_weights
from torch import Tensor, nn

#: Blocks of each list that a shallow copy keeps: one hands its output to the other.
DEPTH = 2
#: Random numbers that all weights repeat (a prime, so that no two rows are alike): drawing each anew takes a
#: minute for a large model.
POOL = 1_000_003


@dataclass
class RecordedBlock:
    """One block's arguments and outputs, the tokens (queries, keys) of its attention calls, and the tokens
    that its layers were given (1: a vector a sample)."""

    list_name: str
    arguments: dict
    outputs: tuple
    attention: list[tuple[int, int]] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)
    layers: dict[str, list[int]] = field(default_factory=dict)


@dataclass
class Trace:
    """One forward: blocks in call order, the first attention's keys (B, H, tokens, D), the timestep."""

    blocks: list[RecordedBlock]
    keys: Tensor | None
    heads: int
    head_size: int
    timestep: float | None


def shallow(cls: type, config: dict) -> nn.Module:
    """Make a transformer of ``cls`` with DEPTH blocks in each list and random float32 weights, on the CPU."""
    with no_init_weights(), init_empty_weights(include_buffers=False):
        transformer = cls(**config)
    for name, modules in transformer.named_children():
        if isinstance(modules, nn.ModuleList) and len({type(module) for module in modules}) == 1:
            setattr(transformer, name, modules[:DEPTH])
    numbers = torch.randn(POOL, generator=torch.Generator().manual_seed(0))
    for module in transformer.modules():
        for name, parameter in module.named_parameters(recurse=False):
            value = numbers.repeat(-(-parameter.numel() // POOL))[: parameter.numel()].view(parameter.shape)
            value = value / max(1, parameter[0].numel() if parameter.ndim > 1 else 10) ** 0.5
            value = value + float(parameter.ndim == 1 and name == "weight")
            setattr(module, name, nn.Parameter(value, requires_grad=False))
    return transformer.eval()


def trace(transformer: nn.Module, arguments: dict) -> Trace:
    """Run a forward and record the arguments and results of its blocks."""
    calls: list[RecordedBlock] = []
    trace_of_run = Trace(blocks=calls, keys=None, heads=0, head_size=0, timestep=None)
    hooks = []
    for name, modules in transformer.named_children():
        for block in modules if isinstance(modules, nn.ModuleList) else ():
            hooks += _watch(name, block, calls)
    for module in transformer.modules():
        if type(module).__name__.endswith("Timesteps"):
            hooks.append(module.register_forward_pre_hook(partial(_note_timestep, trace_of_run)))
    attend = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = _watched(attend, calls, trace_of_run)
    try:
        with torch.inference_mode():
            transformer(**arguments, return_dict=False)
    finally:
        F.scaled_dot_product_attention = attend
        for hook in hooks:
            hook.remove()
    return trace_of_run


def _watch(name: str, block: nn.Module, calls: list[RecordedBlock]):
    signature = inspect.signature(block.forward)

    def before(module, args, kwargs):
        calls.append(RecordedBlock(name, dict(signature.bind(*args, **kwargs).arguments), ()))

    def after(module, args, output):
        calls[-1].outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)

    def note(layer, module, args):
        calls[-1].layers.setdefault(layer, []).append(args[0].shape[1] if args[0].ndim == 3 else 1)

    hooks = [block.register_forward_pre_hook(before, with_kwargs=True), block.register_forward_hook(after)]
    for layer, module in block.named_modules():
        if isinstance(module, nn.Linear):
            hooks.append(module.register_forward_pre_hook(partial(note, layer)))
    return hooks


def _note_timestep(record: Trace, module: nn.Module, args: tuple):
    """Note the timestep, times the layer's own scale: some classes take 0..1 and multiply there."""
    if record.timestep is None:
        record.timestep = args[0].flatten()[0].item() * getattr(module, "scale", 1)


def _watched(attend: Callable, calls: list[RecordedBlock], record: Trace) -> Callable:
    def watched(query, key, value, attn_mask=None, *args, **kwargs):
        if calls and not calls[-1].outputs:  # inside a block
            calls[-1].attention.append((query.shape[2], key.shape[2]))
            calls[-1].masks += [] if attn_mask is None else [attn_mask]
            if record.keys is None:
                record.heads = query.shape[1]
                record.head_size = query.shape[3]
                record.keys = key.clone()
        return attend(query, key, value, attn_mask, *args, **kwargs)

    return watched
