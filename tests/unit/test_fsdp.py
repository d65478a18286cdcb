"""Weight sharding, as far as one process shows it; what it computes is in test_ranks.py."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import fsdp
from backend.parallel.mesh import Axis, single
from backend.parallel.modulation import modulation_cache, modulation_chunks
from backend.parallel.modulation.modulation_cache import CachedLayer, LayerCache
from backend.parallel.pipeline_stage import StageDone
from backend.sampling.model_runner import running
from backend.sampling.request import Request
from backend.shares import shard_sizes

#: Seconds in which a link gathers all blocks, as a part of those in which they compute.
LINKS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)


@pytest.mark.parametrize("shares, samples", [((), (2, 2)), ((3.0, 1.0), (3, 1))])
def test_replicas_gather_modulation_equally_often(monkeypatch, shares, samples):
    """Embeddings of one replica are alike, so more of its evaluations would fit than of the other, whose
    embeddings differ. It has as many samples, or more."""
    evaluations, width = 12, 8
    monkeypatch.setattr(modulation_chunks, "AHEAD", 16 * 4 * width)
    assert shard_sizes(sum(samples), count=2, shares=shares) == [*samples]
    request = SimpleNamespace(config=SimpleNamespace(data_parallel_degree=2), batch=sum(samples))
    request.config.shares_of = lambda axis: shares
    most = Request.most_samples.__get__(request)
    ends = []
    for index, own in enumerate(samples):
        dp = Axis(None, rank=index, size=2, ranks=(0, 1))
        mesh = replace(single(), dp=dp, weights=cast(Any, "of both"))
        cache = LayerCache(mesh.device, torch.float32, mesh, width=width)
        every = torch.randn(evaluations, own, 4) if index else torch.ones(evaluations, own, 4)
        cache.modulate_ahead({"positive": [*every]}, own, most)
        assert cache.plan is not None
        ends.append([])
        for evaluation in range(evaluations):
            cache.begin_evaluation(evaluation)
            ends[index].append(cache.plan.computed)
    assert ends[0] == ends[1] and len({*ends[0]}) == -(-evaluations // (16 // most))


@pytest.mark.parametrize(
    "rows, most_samples, second, shared",
    [(2, 4, False, False), (4, 2, False, False), (2, 2, True, False), (4, 9, False, True)],
    ids=["of another replica", "two of a sample", "second", "shared"],
)
def test_all_embeddings_of_an_evaluation_count(monkeypatch, rows, most_samples, second, shared):
    """Four, on a replica of two samples: as many a sample on that which has most, those of a second timestep
    too, but those that all samples share, as MiniMax-H3's, once."""
    width, samples = 8, 2
    monkeypatch.setattr(modulation_chunks, "AHEAD", 2 * 4 * 4 * width)
    dp = Axis(None, rank=0, size=2, ranks=(0, 1))
    mesh = replace(single(), dp=dp, weights=cast(Any, "of both"))
    cache = LayerCache(mesh.device, torch.float32, mesh, width=width)
    cache.layers.append(CachedLayer(nn.Linear(4, width), "modulation", cache.current, shared))
    embeddings = [torch.randn(rows, 4) for _ in range(5)]
    for embedding in embeddings if second else ():
        cast(Any, embedding).second = torch.randn(rows, 4)
    cache.modulate_ahead({"positive": embeddings}, samples, most_samples)
    assert cache.plan is not None and cache.plan.computed == 2


def test_modulation_is_gathered_apart():
    """Its layers are sharded before their block, which then leaves them out; each is brought to the device
    just before, so that no more than a block is whole there."""
    done = mock.Mock()
    block = nn.ModuleDict({"norm": nn.Linear(2, 6), "out": nn.Linear(2, 2)})
    with mock.patch.object(fsdp, "fully_shard", done.fully_shard):
        whole = nn.ModuleDict({"block": block})
        fsdp.shard_block(
            whole, "block", ["block.norm"], SimpleNamespace(weights="mesh", device="cuda"), done.upload
        )
    assert done.mock_calls == [
        mock.call.upload(block["norm"], "cuda"),
        mock.call.fully_shard(block["norm"], mesh="mesh"),
        mock.call.upload(block, "cuda"),
        mock.call.fully_shard(block, mesh="mesh"),
    ]


def test_the_next_block_is_gathered_while_one_computes():
    """Across the end of a list of blocks too; the last has nothing ahead."""
    blocks = [nn.Identity() for _ in range(5)]
    for block in blocks:
        block.set_modules_to_forward_prefetch = mock.Mock()
    transformer = nn.ModuleDict({"paired": nn.ModuleList(blocks[:2]), "single": nn.ModuleList(blocks[2:])})
    upload = mock.Mock()
    with mock.patch.object(fsdp, "fully_shard") as fully_shard:
        mesh = SimpleNamespace(weights="mesh", device=torch.device("cuda"))
        for name in ("paired.0", "paired.1", "single.0", "single.1", "single.2"):
            fsdp.shard_block(transformer, name, (), mesh, upload)
        fsdp.shard_rest(transformer, ("paired", "single"), mesh, upload)
    assert [call.args[0] for call in upload.call_args_list] == [*blocks, transformer]
    assert [call.args[0] for call in fully_shard.call_args_list] == [*blocks, transformer]
    assert [block.set_modules_to_forward_prefetch.call_args.args[0] for block in blocks] == [
        [block] for block in blocks[1:]
    ] + [[]]


class WholeWeights(TorchDispatchMode):
    """Counts the bytes of what operators make, as FSDP2 grows and empties it; ``peak``: the most at once."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self.before, self.made = weakref.WeakSet(), weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.before.update(self._storages((args, kwargs)) - self.made)
        out = func(*args, **kwargs or {})
        self.made.update(self._storages(out) - self.before)
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.made))
        return out

    def _storages(self, found) -> weakref.WeakSet:
        tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        return weakref.WeakSet(tensor.untyped_storage() for tensor in tensors)


class Chain(nn.Module):
    """A transformer of blocks alone."""

    def __init__(self, blocks: list[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        return reduce(lambda x, block: block(x), self.blocks, x)


@contextmanager
def sharded(transformer: nn.Module, blocks: int, device: str = "cpu") -> Iterator[nn.Module]:
    """The transformer on the first of two ranks, of which the other one never answers; gathered as on a
    device of that type."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = SimpleNamespace(weights=init_device_mesh("cpu", (2,)), device=torch.device(device))
        for index in range(blocks):
            fsdp.shard_block(transformer, f"blocks.{index}", (), mesh, lambda *_: None)
        fsdp.shard_rest(transformer, ("blocks",), mesh, lambda *_: None)
        yield transformer
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("device, times", [("cuda", 3), ("cpu", 2)])
def test_the_block_that_runs_is_there_twice(device, times):
    """As gathered_bytes counts for GPUs: its weights, the buffer that they came in, and that of the next
    block. On the CPU, where no stream reads it later, the first buffer is freed before that."""
    width, linears = 256, 2
    blocks = [nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(linears))) for _ in range(6)]
    transformer = Chain(blocks).requires_grad_(False)
    on_first = sharded(transformer, len(blocks), device)
    with on_first, torch.inference_mode(), WholeWeights() as memory:
        transformer(torch.zeros(1, width))
    block = linears * width * width * torch.float32.itemsize
    assert times * block <= memory.peak < (times + 0.1) * block


def test_a_block_computes_on_the_cpu_while_the_next_one_is_gathered(monkeypatch):
    """Without streams the host would wait for a gather where it begins."""
    events = []
    name = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    gather = getattr(dist, name)

    def begin(*args, async_op=False, **kwargs):
        events.append("begins" if async_op else "whole")
        return gather(*args, async_op=async_op, **kwargs)

    monkeypatch.setattr(dist, name, begin)
    blocks = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    for block in blocks:
        block.register_forward_hook(lambda *_: events.append("computed"))
    with sharded(Chain(list(blocks)).requires_grad_(False), len(blocks)) as chain, torch.inference_mode():
        chain(torch.zeros(1, 4))
    assert events == ["begins", "begins", "computed", "begins", "computed", "computed"]


@pytest.mark.parametrize("height", [7, 6, 2])
def test_the_rows_of_a_rank_are_those_of_its_shard(height, monkeypatch):
    """As torch.chunk cuts them, by which FSDP2 shards: the last ranks have fewer, or none."""
    monkeypatch.setattr(fsdp, "DTensor", SimpleNamespace)
    ranks = 3
    found = []
    for rank in range(ranks):
        place = SimpleNamespace(size=lambda: ranks, get_coordinate=lambda rank=rank: (rank,))
        span = fsdp.own_rows(cast(Any, SimpleNamespace(shape=(height, 4), device_mesh=place)))
        assert span is not None
        found.append([*range(height)[span.indices]])
    chunks = [chunk.tolist() for chunk in torch.arange(height).chunk(ranks)]
    assert found == chunks + [[]] * (ranks - len(chunks))


class Headed(Chain):
    """A chain with a layer in none of the blocks, which may leave its forward before the end."""

    def __init__(self, blocks: list[nn.Module]):
        super().__init__(blocks)
        self.head = nn.Linear(4, 4, bias=False)

    def forward(self, x, leave: bool = False):
        x = self.head(super().forward(x))
        if leave:
            raise StageDone(())
        return x


@pytest.mark.parametrize("resets", [True, False], ids=["torch resets", "an earlier torch"])
def test_weights_are_shards_again_after_a_forward_that_was_left(resets, monkeypatch):
    """Whatever is assigned then, as a LoRA's sum, is what the next forward gathers; and nothing is left of
    forwards for a backward."""
    if not resets:
        for name in ("reset_iter_state", "set_reshard_after_forward"):  # which torch 2.6 lacks
            monkeypatch.delattr(FSDPModule, name)
    with sharded(Headed([nn.Linear(4, 4, bias=False) for _ in range(2)]).requires_grad_(False), 2) as chain:
        fsdp.reshard(chain)  # before any forward
        with torch.inference_mode():
            chain(torch.zeros(1, 4))
            with pytest.raises(StageDone):
                chain(torch.zeros(1, 4), leave=True)
        assert not isinstance(chain.head.weight, DTensor)
        fsdp.reshard(chain)
        assert all(isinstance(parameter, DTensor) for parameter in chain.parameters())
        state = chain._get_fsdp_state()
        assert not state._comm_ctx.post_forward_order and state._state_ctx.iter_forward_root is None
        with torch.inference_mode(False):
            fsdp.assign(chain.head.weight, torch.ones(2, 4))
        with torch.inference_mode(), pytest.raises(StageDone):
            chain(torch.zeros(1, 4), leave=True)
        assert chain.head.weight[:2].eq(1).all()  # the first rank's rows


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "fails"])
def test_weights_are_shards_after_a_request(ends):
    """torch leaves those in none of the blocks whole, where other models and programs want their memory."""
    with sharded(Headed([nn.Linear(4, 4, bias=False) for _ in range(2)]).requires_grad_(False), 2) as chain:
        family = SimpleNamespace(io=SimpleNamespace(prepare=None))
        model: Any = SimpleNamespace(cache=mock.Mock(), transformer=chain, family=family, stage=None)
        request: Any = SimpleNamespace(config=ParallelConfig())
        with nullcontext() if ends else pytest.raises(StageDone), torch.inference_mode():
            with running(model, request):
                chain(torch.zeros(1, 4), leave=not ends)
                assert not isinstance(chain.head.weight, DTensor)
        assert all(isinstance(parameter, DTensor) for parameter in chain.parameters())


def test_sharded_weights_leave_with_their_groups():
    """FSDP would gather over the closed ones; the same degrees are no reason to keep them."""
    config = ParallelConfig(ulysses_degree=2, shard_weights=True)
    engine = Engine(config, single())
    engine.models["sharded"] = mock.MagicMock()
    engine.rearrange(config, single())
    assert not engine.models


def seconds(gathers: list[float], computes: list[float], ahead: int) -> float:
    """Seconds of a forward whose blocks are gathered one after another: each is asked for when the one
    ``ahead`` places before it begins to compute."""
    link = end = 0.0
    starts: list[float] = []
    for index, (gather, compute) in enumerate(zip(gathers, computes, strict=True)):
        asked = starts[max(index - ahead, 0)] if starts else 0.0
        link = max(link, asked) + gather
        starts.append(max(end, link))
        end = starts[-1] + compute
    return end


def test_more_ahead_would_help_blocks_that_differ():
    """The arithmetic can tell: small and large blocks by turns, on a link as fast as they compute."""
    sizes = [1.0, 3.0] * 10
    assert seconds(sizes, sizes, 2) < 0.8 * seconds(sizes, sizes, 1)


@pytest.mark.parametrize(
    "family",
    ["flux-dev", *(pytest.param(name, marks=pytest.mark.full) for name in ("hunyuan-dit", "z-image-turbo"))],
)
def test_one_block_ahead_is_enough_on_any_link(family):
    """Of released models: eight blocks ahead are at most 1 % faster than PREFETCH, whatever the link. Blocks
    after one another are alike, so a link hides behind all of them or behind none."""
    from scaling_page import model  # released sizes, which take seconds

    checkpoint = model(family).checkpoint
    costs = checkpoint.block_costs
    sizes = []
    for name in checkpoint.block_names:
        apart = tuple(f"{layer}." for layer in checkpoint.modulation[name])
        block = checkpoint.transformer.get_submodule(name)
        sizes.append(
            sum(p.numel() for key, p in block.named_parameters() if not f"{name}.{key}".startswith(apart))
        )
    for link in LINKS:
        gathers = [size * link * sum(costs) / sum(sizes) for size in sizes]
        assert seconds(gathers, costs, fsdp.PREFETCH) <= 1.01 * seconds(gathers, costs, 8), link


@pytest.mark.parametrize("weights, axes", [(None, ("tp", "pp")), ("a mesh", ("tp", "pp", "sp"))])
def test_ranks_that_gather_together_count_embeddings_alike(monkeypatch, weights, axes):
    """Each further chunk of embeddings is one more gather, and unlike GPUs may differ in a last bit."""
    asked = []
    monkeypatch.setattr(modulation_cache.comm, "broadcast", lambda x, axes: asked.append(axes) or x)
    mesh = SimpleNamespace(tp="tp", pp="pp", sp="sp", weights=weights)
    different, places = LayerCache._different(
        cast(Any, SimpleNamespace(mesh=mesh)), torch.tensor([[1.0], [2.0], [1.0]])
    )
    assert asked == [axes] and different.tolist() == [[1.0], [2.0]] and places == [0, 1, 0]
