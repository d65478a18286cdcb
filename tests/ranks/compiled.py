"""A request with compiled blocks after the same without: what is traced, and what of the latent changes."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from cropping import cropped
from tiny import relative
from torch import nn

from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.parallel import compiled_blocks, pipeline_stage
from backend.parallel.block_streams import block_list
from backend.protocol import Sample
from backend.runtime import opaque_ops
from backend.sampling.model_runner import LoadedModel
from backend.sampling.step_loop import Callbacks

torch.compile(nn.Identity(), backend="eager")(torch.zeros(1))  # imports the compiler, before ranks are forked

#: Kinds of sequences: whole, a patch with the text, and patches without; of several latents, patches may lack
#: tokens of one.
OF_PATCHES = 3
#: Rows and columns that the latent of a second request lacks: few, so that no patch is text alone.
SMALLER = 2
#: Rows that its prompts lack.
LACKING = 6
#: Why a rank does not compile, where its peers trace for it.
PEERS_TRACE = "other ranks trace for this one"


def kinds(model: LoadedModel) -> int:
    """How many kinds of blocks this rank has: of one class, and with the same layers."""
    found = [each for name in model.family.blocks.lists for each in block_list(model.transformer, name)]
    blocks: list[nn.Module] = model.stage.own_blocks if model.stage else found
    return len({(type(block), tuple(name for name, _ in block.named_modules())) for block in blocks})


def kinds_of_prompts(sample: Sample) -> int:
    """How many kinds of prompts there are: guides that are attended to by their weights are one."""
    prompts = {name.partition(".")[0] for name in sample.tensors if "." in name}
    return len({f"{prompt}.guide_weights" in sample.tensors for prompt in prompts})


def another(engine: Engine, sample: Sample) -> Sample:
    """A request of another seed, more steps, a smaller latent if it is a single one, and other prompts,
    shorter ones if the family takes any."""
    sigmas = sample.tensors["sigmas"]
    longer = torch.linspace(float(sigmas[0]), float(sigmas[-1]), len(sigmas) + 1)
    side = max(sample.tensors["noise"].shape[-2:]) - SMALLER
    tensors = cropped({**sample.tensors, "sigmas": longer}, side)
    sample = replace(sample, seed=sample.seed + 1, tensors=tensors)
    shorter = replace(sample, tensors={name: _shorter(name, x) for name, x in tensors.items()})
    try:
        engine.check_sample(shorter)
    except UnsupportedError:
        return sample
    return shorter


def _shorter(name: str, value: torch.Tensor) -> torch.Tensor:
    is_text = name.endswith((".c_crossattn", ".attention_mask")) and value.ndim > 1
    return value[:, :-LACKING].contiguous() if is_text else value


@contextmanager
def _receiving(stage: pipeline_stage.Stage | None) -> Iterator[dict[torch.Size, set[int]]]:
    """Shape -> addresses at which activations of it arrive meanwhile."""
    found = defaultdict(set)
    if stage is None or stage.pipe is None:
        yield found
        return
    take = stage.pipe.take

    def taken():
        buffer = take()
        found[buffer.shape].add(buffer.data_ptr())
        return buffer

    with mock.patch.object(stage.pipe, "take", taken):
        yield found


def compare(engine: Engine, sample: Sample, samples: torch.Tensor, traces: bool = True) -> dict:
    """What a compiled run of ``sample`` is judged by, of the worst rank; ``samples``: of the run without. A
    rank that does not trace runs its blocks as one without a compiler."""
    if traces:
        return _compared(engine, sample, samples)
    with mock.patch.object(compiled_blocks, "unavailable", lambda: PEERS_TRACE):
        return _compared(engine, sample, samples)


def _compared(engine: Engine, sample: Sample, samples: torch.Tensor) -> dict:
    torch._dynamo.reset()
    compiler = compiled_blocks.COMPILER
    compiler.compiled.clear()
    sample = replace(sample, compile="blocks")
    model = engine.models[sample.model]
    sequences = OF_PATCHES * (2 if model.family.latent.nested else 1)
    before = compiler.graphs
    counts = mock.patch.object(pipeline_stage, "text_count_tensor", wraps=opaque_ops.text_count_tensor)
    with counts as counted, _receiving(model.stage) as received:
        compiled, stats = engine.sample(sample, Callbacks())
    if engine.config.patches == 1:  # a prompt may be so short that this rank's tokens are all of the image
        sequences = len({bool(call.args[0]) for call in counted.call_args_list}) or 1
    if engine.config.cfg_degree == 1:  # else a rank has one prompt of the two
        sequences *= kinds_of_prompts(sample)
    first = compiler.graphs - before
    further = another(engine, sample)
    second, _ = engine.sample(further, Callbacks())
    plain, _ = engine.sample(replace(further, compile="off"), Callbacks())
    of_rank = {
        "graphs": first,
        "expected": kinds(model) * sequences,
        "recompiled": compiler.graphs - before - first,
        "receive buffers": max(map(len, received.values()), default=0),
        "relative": _largest((compiled, samples), (second, plain)) if dist.get_rank() == 0 else 0.0,
        "notes": [note for note in stats["notes"] if "uncompiled" in note and PEERS_TRACE not in note],
    }
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, of_rank)
    return {
        "graphs": max(each["graphs"] for each in everyone),
        "too many": max(each["graphs"] - each["expected"] for each in everyone),
        "recompiled": max(each["recompiled"] for each in everyone),
        "receive buffers": max(each["receive buffers"] for each in everyone),
        "relative": everyone[0]["relative"],
        "notes": [note for each in everyone for note in each["notes"]],
    }


def _largest(*pairs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The largest difference of a pair."""
    errors = [relative(ours, theirs) for ours, theirs in pairs]
    return max(errors, key=lambda error: (error != error, error))  # NaN before any number
