"""What the blocks of a model multiply in a step, as torch counts it."""

from dataclasses import replace

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from backend.engine import LoadedModel
from backend.parallel.sequence import SequenceLengths, Span
from backend.parallel.step_context import StepContext
from backend.sampling import model_runner
from backend.sampling.request import Request


def counted(model: LoadedModel, built: Request) -> tuple[list[float], SequenceLengths]:
    """Multiplications of every block in a step with one prompt, and the rows that it had; what the prompt
    alone decides, or all steps share, is not a step's."""
    context, counter, at = StepContext("positive", 0, Span(0, 1)), FlopCounterMode(display=False), []

    def count(*_):
        return at.append(counter.get_total_flops())

    blocks = [block for name in model.family.blocks.lists for block in model.transformer.get_submodule(name)]
    hooks = [
        hook
        for block in blocks
        for hook in (block.register_forward_pre_hook(count), block.register_forward_hook(count))
    ]
    with torch.inference_mode(), model_runner.running(model, built) as calls, sdpa_kernel(SDPBackend.MATH):
        calls.begin_evaluation(0, 0.0)
        calls.plan([built.sigmas[0]])
        calls.modulate_ahead(("positive",))
        calls.run(built.start(), built.sigmas[0], context)
        at.clear()
        with counter:
            calls.run(built.start(), built.sigmas[0], replace(context))  # a forward of its own
    for hook in hooks:
        hook.remove()
    sequence = model.stage.sequences["positive"]
    return [(end - start) / 2 for start, end in zip(at[::2], at[1::2], strict=True)], sequence
