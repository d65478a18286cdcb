"""Compiled blocks in one process: latents, the operators, a compiler that fails, and addresses that stay.
tests/ranks/compiled.py has every family and method."""

import errno
import os
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._inductor.config
from quantized import write_scaled
from safetensors.torch import load_file
from tiny import batch_request, golden_request, relative, write_checkpoint, write_shallow_flux

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import compiled_blocks, mesh, static_addresses
from backend.parallel.attention.attention_kernels import SDPA
from backend.parallel.attention.kv_buffers import KVBuffers
from backend.parallel.staged_block import StagedBlock
from backend.quantization.packed_weight import PackedWeight
from backend.runtime import opaque_ops
from backend.sampling.step_loop import Callbacks

#: Double and single blocks of Flux.
FLUX_KINDS = 2


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """A compiler that has compiled nothing."""
    torch._dynamo.reset()
    fresh = compiled_blocks.Compiler()
    monkeypatch.setattr(compiled_blocks, "COMPILER", fresh)
    return fresh


def loaded(folder, family: str = "", patches: int = 0) -> Engine:
    """``family``: Flux with few blocks, unless another is named."""
    config = ParallelConfig(num_pipeline_patch=patches) if patches else ParallelConfig()
    engine = Engine(config, mesh.single())
    path = folder / "m.safetensors"
    engine.load(
        "tiny", str(write_checkpoint(path, family) if family else write_shallow_flux(path)), "default"
    )
    return engine


class Adds(torch.nn.Module):
    def forward(self, x):
        return x + 1


class Doubles(torch.nn.Module):
    def forward(self, x):
        return 2 * x


#: Kinds of toys: what the compiler makes of errors needs no transformer.
TOY_KINDS = 2


def run_toys() -> compiled_blocks.Outcome:
    """Run two blocks of each kind of toys, as a request does; return its outcome. The result is exact."""
    blocks = [kind() for kind in (Adds, Doubles) for _ in range(2)]
    with compiled_blocks.compiled(blocks) as outcome:
        x = torch.ones(2, 3)
        for block in blocks:
            x = block(x)
        assert x.eq(12).all()
        return outcome()


def steps(sample, count: int, **changes):
    sigmas = sample.tensors["sigmas"][: count + 1]
    return replace(sample, tensors={**sample.tensors, "sigmas": sigmas}, **changes)


def test_one_graph_for_each_kind_of_block(tmp_path, monkeypatch, compiler):
    """4 blocks, 2 graphs; another seed, more steps and a shorter prompt need no other ones, nor does a
    request that was not compiled in between."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    engine = loaded(tmp_path)
    sample = steps(golden_request("euler_simple")[0], 2)
    plain, _ = engine.sample(sample, Callbacks())
    compiled, _ = engine.sample(replace(sample, compile="blocks"), Callbacks())
    assert relative(compiled, plain) <= 1e-5
    assert compiler.graphs == FLUX_KINDS and not compiler.failed
    shorter = {**sample.tensors, "sigmas": torch.linspace(1, 0, 4)}
    for name in ("positive.c_crossattn", "negative.c_crossattn"):
        if name in shorter:
            shorter[name] = shorter[name][:, 3:]
    again = replace(sample, seed=7, compile="blocks", tensors=shorter)
    _, stats = engine.sample(again, Callbacks())
    assert compiler.graphs == FLUX_KINDS and stats["notes"] == []


def test_without_a_compiler_blocks_run_as_they_are(monkeypatch, compiler):
    """One line for all kinds of blocks, the same numbers, and no second attempt."""
    tried = []
    lookup = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: tried.append(name) or lookup(name))
    for _ in range(2):
        # not by monkeypatch, after which Inductor has no such settings
        with torch._inductor.config.patch({"force_disable_caches": True, "cpp.cxx": ("/nowhere/g++",)}):
            found = run_toys()
        [line] = compiled_blocks.failure_lines([found.failures])
        assert not found.made and "\n" not in line and line.startswith("Adds, Doubles run uncompiled: ")
    assert compiler.graphs == 0 and tried.count("inductor") == TOY_KINDS


def test_a_reason_has_one_line_for_all_ranks():
    """Stages have different kinds of blocks, and each of them names its own."""
    lines = compiled_blocks.failure_lines
    full, other = lines([{"full": ["Double"]}, {"full": ["Double", "Single"], "old": ["Other"]}, {}])
    assert full == "ranks 0, 1: Double, Single run uncompiled: full"
    assert other == "rank 1: Other runs uncompiled: old" and lines([{}, {}]) == []
    assert lines([{"old torch": [compiled_blocks.ALL_BLOCKS]}]) == ["blocks run uncompiled: old torch"]


def test_a_block_of_too_many_graphs_runs_uncompiled(monkeypatch, compiler):
    """From the first inputs on that no graph is left for; it ended the rank."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    monkeypatch.setattr(compiled_blocks, "MAX_GRAPHS", 2)
    block = Adds()
    with compiled_blocks.compiled([block]) as outcome:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.float32):
            assert block(torch.ones(2, 3, dtype=dtype)).eq(2).all()
        assert compiler.graphs == 2
        assert compiled_blocks.failure_lines([outcome().failures]) == [
            "Adds runs uncompiled: its inputs differ in more ways than the 2 graphs that are compiled "
            "of it, until the ranks are stopped"
        ]


def test_what_inductor_leaves_to_eager_frames_runs_uncompiled_from_its_start(monkeypatch, compiler):
    """It begins a frame again, as for bfloat16 on GPUs that emulate it: a rank would send twice."""

    def skips(graph, inputs):
        raise torch._dynamo.exc.SkipFrame("BF16 is not supported")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: skips)
    [failure] = compiled_blocks.failure_lines([run_toys().failures])
    assert compiler.graphs == 0 and len(compiler.failed) == TOY_KINDS
    assert failure.startswith("Adds, Doubles run uncompiled: ") and "BF16 is not supported" in failure


def test_errors_in_the_compiler_that_torch_does_not_wrap_are_its_own(monkeypatch, compiler):
    """Of any class, before the graph begins: they ended the ranks, in every request."""

    def fails(*_):
        raise AssertionError("bug")

    monkeypatch.setattr(torch._dynamo.output_graph.OutputGraph, "compile_and_call_fx_graph", fails)
    [failure] = compiled_blocks.failure_lines([run_toys().failures])
    assert compiler.graphs == 0 and len(compiler.failed) == TOY_KINDS
    assert failure == "Adds, Doubles run uncompiled: bug, until the ranks are stopped"


def test_a_request_runs_and_says_why_its_blocks_are_not_compiled(tmp_path, monkeypatch, compiler):
    """For an error that torch does not wrap either, before it traces: the same latent."""

    def knows_no_python(*_, **__):
        raise RuntimeError("torch.compile is not supported on Python 3.15")

    engine = loaded(tmp_path)
    sample = steps(golden_request("euler_simple")[0], 1)
    plain, _ = engine.sample(sample, Callbacks())
    monkeypatch.setattr(torch, "compile", knows_no_python)
    uncompiled, stats = engine.sample(replace(sample, compile="blocks"), Callbacks())
    assert uncompiled.equal(plain) and compiler.graphs == 0
    [note] = stats["notes"]
    assert note.startswith("FluxBlock, FluxSingleBlock run uncompiled: torch.compile")
    assert note.endswith(", until the ranks are stopped")


def test_a_full_disk_is_no_verdict_on_later_requests(monkeypatch, compiler):
    """Each kind of block fails once in a request, and compiles in the next one."""
    tried = []

    def full(graph, inputs):
        tried.append(graph)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    with monkeypatch.context() as within:
        within.setattr(torch._dynamo, "lookup_backend", lambda name: full)
        [failure] = compiled_blocks.failure_lines([run_toys().failures])
    assert len(tried) == TOY_KINDS
    assert "No space left" in failure and "until the ranks" not in failure
    found = run_toys()
    assert found.made.startswith(f"compiled {TOY_KINDS} graphs") and not found.failures
    assert compiler.graphs == TOY_KINDS and not compiler.failed


def test_an_older_torch_is_said(tmp_path, monkeypatch):
    """And attention overlaps what it sends, as without compiled blocks."""
    monkeypatch.setattr(opaque_ops, "_ordered", None)
    engine = loaded(tmp_path, patches=2)
    stage = engine.models["tiny"].stage
    assert stage is not None
    seen = []
    stage.own_blocks[0].register_forward_pre_hook(lambda *_: seen.append(stage.attention.compiled))
    sample = steps(golden_request("euler_simple")[0], 1, compile="blocks")
    _, stats = engine.sample(sample, Callbacks())
    assert len(stats["notes"]) == 1 and "ordered effects" in stats["notes"][0]
    assert set(seen) == {False}


def test_a_torch_that_registers_no_effects_is_an_older_one(monkeypatch):
    """One with their type alone: operators without the method failed while the engine was imported."""
    monkeypatch.delattr(type(opaque_ops.layer), "register_effect")
    assert opaque_ops._register() is None


def test_errors_of_a_run_are_not_taken_for_the_compilers(compiler):
    class Block(torch.nn.Module):
        def forward(self, x):
            return torch.ops.parallel_dit.layer(x, "gone", 0)

    compiled_blocks.BACKEND, before = "eager", compiled_blocks.BACKEND
    block = Block()
    try:
        with compiled_blocks.compiled([block]), pytest.raises(KeyError):
            block(torch.ones(2, 3))
    finally:
        compiled_blocks.BACKEND = before
    assert not compiler.failed and "forward" not in vars(block)


def test_operators_are_what_the_compiler_is_told(monkeypatch):
    """Shapes, strides, types, no aliases: torch's own checks."""

    def attention(q, k, v, mask, dropout_p, is_causal, scale, gqa):
        return SDPA(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa)

    layers = {"linear": torch.nn.Linear(8, 6), "same": torch.nn.Identity()}
    monkeypatch.setattr(opaque_ops.RUNNING, "attention", attention)
    monkeypatch.setattr(opaque_ops.RUNNING, "linear_state", lambda k, v: k.transpose(2, 3) @ v)
    monkeypatch.setattr(opaque_ops.RUNNING, "layers", layers)
    q, k, v = (torch.randn(2, 4, tokens, 8) for tokens in (5, 7, 7))
    check = partial(torch.library.opcheck, test_utils=("test_schema", "test_faketensor"))
    with torch.no_grad():
        check(torch.ops.parallel_dit.attend.default, (q, k, v, None, None, False))
        check(
            torch.ops.parallel_dit.attend.default, (q, k[:, :2], v[:, :2], torch.ones(5, 7).bool(), 0.5, True)
        )
        check(torch.ops.parallel_dit.attend.default, (q[:, :, :0], k, v, None, None, False))
        check(torch.ops.parallel_dit.linear_state.default, (k, v))
        check(torch.ops.parallel_dit.layer.default, (q, "linear", 6))
        check(torch.ops.parallel_dit.layer.default, (q, "same", 0))


@pytest.mark.parametrize("stale_kv", ["reuse", "extrapolate"])
def test_addresses_of_a_steady_micro_step_stay(stale_kv, tmp_path, monkeypatch):
    """What blocks are given, and keys and values; extrapolation has two buffers, which take turns."""
    monkeypatch.setattr("backend.parallel.pipeline_stage.ENABLED", True)
    engine = loaded(tmp_path, patches=2)
    stage = engine.models["tiny"].stage
    assert stage is not None and not static_addresses.ENABLED
    inputs, buffers = defaultdict(list), defaultdict(list)
    names = {stage.family.blocks.image, stage.family.blocks.text}

    def given(index: int, block, args, kwargs):
        forward = stage.current
        if forward is None or forward.context.image is None:
            return
        own = {name: x for name, x in kwargs.items() if index == stage.blocks.start or name not in names}
        for leaf, x in enumerate(torch.utils._pytree.tree_leaves(own)):
            if isinstance(x, torch.Tensor) and x.numel():
                inputs[forward.context.prompt, forward.context.image, index, leaf].append(x.data_ptr())

    refresh = KVBuffers.refresh

    def refreshed(self, where, kv, positions, total, context):
        found = refresh(self, where, kv, positions, total, context)
        buffers[where].append(found[0].data_ptr())
        return found

    monkeypatch.setattr(KVBuffers, "refresh", refreshed)
    for index, block in enumerate(stage.own_blocks):
        block.register_forward_pre_hook(partial(given, index), with_kwargs=True)
    sample = steps(golden_request("euler_simple")[0], 5, num_pipeline_patch=2, stale_kv=stale_kv)
    samples, _ = engine.sample(sample, Callbacks())
    static = dict(inputs)
    cached = dict(buffers)
    monkeypatch.setattr("backend.parallel.pipeline_stage.ENABLED", False)
    inputs, buffers = defaultdict(list), defaultdict(list)
    plain, _ = engine.sample(sample, Callbacks())
    assert samples.equal(plain)
    assert static and all(len(found) == 4 and len(set(found)) == 1 for found in static.values())
    most = 1 if stale_kv == "reuse" else 2
    assert cached and all(len(set(found)) <= most for found in cached.values())


def test_staged_blocks_are_told_apart_from_compiled_ones(tmp_path, monkeypatch):
    """A request leaves a stage's blocks as they were, and no weights where graphs look for them. A compiler
    that returns what it is given is enough for that: tracing costs six seconds."""
    given = []
    monkeypatch.setattr(torch, "compile", lambda forward, **_: given.append(forward) or forward)
    engine = loaded(tmp_path, patches=2)
    model = engine.models["tiny"]
    engine.sample(steps(golden_request("euler_simple")[0], 1, compile="blocks"), Callbacks())
    assert len(given) == FLUX_KINDS
    staged = [module for module in model.transformer.modules() if isinstance(module, StagedBlock)]
    assert staged and not any("forward" in vars(each.block) for each in staged)
    assert vars(opaque_ops.RUNNING) == vars(opaque_ops.Running())


#: Quantized formats whose layers dequantize, or multiply float8 as it is stored.
STORED = ("float8_e4m3fn", "int8_tensorwise", "plain float8")


@pytest.mark.parametrize("kind", STORED)
def test_quantized_layers_are_one_node_of_a_graph(kind, tmp_path, monkeypatch, compiler):
    """As many graphs as plain layers have, the same latent, and none more for a second request."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    state = load_file(write_shallow_flux(tmp_path / "plain.safetensors"))
    path = write_scaled(tmp_path / f"{kind.replace(' ', '_')}.safetensors", state, kind)
    engine = Engine(ParallelConfig(), mesh.single())
    engine.load("tiny", str(path), "fp32", "weight only")
    packed = [each for each in engine.models["tiny"].transformer.modules() if isinstance(each, PackedWeight)]
    assert len(packed) > 10
    sample = steps(golden_request("euler_simple")[0], 2)
    plain, _ = engine.sample(sample, Callbacks())
    compiled, stats = engine.sample(replace(sample, compile="blocks"), Callbacks())
    assert relative(compiled, plain) <= 1e-5
    assert compiler.graphs == FLUX_KINDS and not compiler.failed
    assert not [note for note in stats["notes"] if "uncompiled" in note]
    engine.sample(replace(sample, seed=7, compile="blocks"), Callbacks())
    assert compiler.graphs == FLUX_KINDS


def test_batches_have_graphs_of_their_own_at_most_once(tmp_path, monkeypatch, compiler):
    """A batch of one is a constant of a graph; two and three samples share the next. Flux's first
    single block is given text that lies by itself, the others text joined with the image: a graph more."""
    monkeypatch.setattr(compiled_blocks, "BACKEND", "eager")
    engine = loaded(tmp_path)
    found = []
    for batch in (1, 2, 3):
        sample = steps(batch_request(batch), 2, sampler="euler")
        plain, _ = engine.sample(sample, Callbacks())
        compiled, _ = engine.sample(replace(sample, compile="blocks"), Callbacks())
        assert relative(compiled, plain) <= 1e-5 and compiled.shape[0] == batch
        found.append(compiler.graphs)
    assert found == [FLUX_KINDS, 2 * FLUX_KINDS + 1, 2 * FLUX_KINDS + 1] and not compiler.failed
