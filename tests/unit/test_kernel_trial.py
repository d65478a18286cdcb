"""Attention kernels are tried before a request: what fails is refused by all ranks, and these stay."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from attention_packages import VERSION_1, package
from attention_stubs import right

from backend.config import ParallelConfig
from backend.parallel.attention import kernel_trial
from backend.parallel.attention.attention_kernels import SDPA
from backend.parallel.attention.kernel_table import KERNELS
from backend.protocol import Sample
from backend.rank.admission import RefusedByAllRanks
from backend.rank.worker import Worker
from backend.sampling.step_loop import Callbacks

CPU = torch.device("cpu")


def missing(q, k, v, scale, lse):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")


def without_lse(q, k, v, scale, lse):
    if lse:
        raise RuntimeError("No execution plans support the graph.")
    return SDPA(q, k, v, scale=scale), None


def without_sums(q, k, v, scale, lse):
    return SDPA(q, k, v, scale=scale), None


def wrong(q, k, v, scale, lse):
    return torch.full_like(q, float("nan")), None


def wrong_with_lse(q, k, v, scale, lse):
    return (wrong if lse else right)(q, k, v, scale, lse)


@pytest.fixture
def kernel(monkeypatch):
    """Put a call in the place of SageAttention's."""

    def use(call):
        monkeypatch.setitem(KERNELS, "sage", replace(KERNELS["sage"], call=call))

    return use


class Rank(Worker):
    """A rank of ``ranks`` whose peers find ``others``; counts collectives and requests."""

    def __init__(self, others: list[str], ring: int = 1, head_size: int = 64):
        self.mesh = SimpleNamespace(device=CPU, rank=0, world_size=2)
        self.tried = {}
        self.gathers = self.requests = 0
        self.others = others
        self.control = SimpleNamespace(all_gather_object=self.gather)
        self.clock = SimpleNamespace(new_request=print, begin=print)
        model = SimpleNamespace(dtype=torch.bfloat16, head_size=head_size, parked_on=frozenset())
        config = ParallelConfig(ring_degree=ring)
        named = dict(prepare_sample=print, sample=self.sample, lora_stacks={})
        self.engine = SimpleNamespace(models={"m": model}, config=config, **named)
        self.admission = SimpleNamespace(
            prepare=lambda *_: SimpleNamespace(model=SimpleNamespace(dequantized_bytes=0))
        )

    def gather(self, own: str) -> list[str]:
        self.gathers += 1
        return [own, *self.others]

    def sample(self, *_):
        self.requests += 1

    def ask(self, attention="sage"):
        self.run_sample(Sample("m", "euler", 1.0, 7, attention=attention), Callbacks())


def test_a_kernel_that_raises_is_refused_each_time_and_tried_once(kernel):
    kernel(missing)
    rank = Rank(["", "RuntimeError: another"])
    for _ in range(2):
        with pytest.raises(RefusedByAllRanks) as refused:
            rank.ask()
    text = str(refused.value)
    assert text.startswith(
        "attention is sage, which was tried and fails (rank 0: RuntimeError: CUDA error: no kernel"
    )
    assert "; rank 2: RuntimeError: another); install a sageattention" in text
    assert text.endswith("or set attention to auto.") and text.count(". ") == 0
    assert (rank.gathers, rank.requests) == (1, 0)
    rank.ask("auto")
    assert (rank.gathers, rank.requests) == (1, 1)  # it stays up


def small_heads_alone(q, k, v, scale, lse):
    return (right if q.shape[3] == 64 else missing)(q, k, v, scale, lse)


@pytest.mark.parametrize("call, fails", [(missing, True), (small_heads_alone, False), (right, False)])
def test_a_kernel_is_tried_for_heads_of_unknown_size(kernel, call, fails):
    """Of models that run whole. It is refused where it attends with none of the usual sizes."""
    kernel(call)
    rank = Rank([""], head_size=0)
    if fails:
        with pytest.raises(RefusedByAllRanks, match="no kernel image"):
            rank.ask()
    else:
        rank.ask()
    assert (rank.gathers, rank.requests) == (1, not fails)


def test_a_kernel_that_fails_on_another_rank_alone_is_refused(kernel):
    kernel(right)
    with pytest.raises(RefusedByAllRanks, match=r"fails \(rank 1: it has none\)"):
        Rank(["it has none"]).ask()


def test_a_kernel_that_works_runs(kernel):
    kernel(right)
    rank = Rank([""])
    rank.ask()
    rank.ask()
    assert (rank.gathers, rank.requests) == (1, 2)


@pytest.mark.parametrize("ring, fails", [(1, False), (2, True)])
def test_the_log_sum_exp_is_tried_where_a_ring_wants_it(kernel, ring, fails):
    kernel(without_lse)
    rank = Rank([""], ring)
    if fails:
        with pytest.raises(RefusedByAllRanks, match="No execution plans"):
            rank.ask()
    else:
        rank.ask()


@pytest.mark.parametrize("call, lse", [(wrong, False), (wrong_with_lse, True)])
def test_a_kernel_that_is_wrong_is_refused(kernel, call, lse):
    kernel(call)
    assert "off by nan" in kernel_trial.failure("sage", torch.bfloat16, 64, lse, CPU)


def one_tensor(q, k, v, scale, lse):
    return SDPA(q, k, v, scale=scale) if lse else right(q, k, v, scale, lse)


def one_head(q, k, v, scale, lse):
    return SDPA(q, k, v, scale=scale)[0], None


def sums_of_one_sample(q, k, v, scale, lse):
    return SDPA(q, k, v, scale=scale), torch.zeros(q.shape[1:3])


def in_place(q, k, v, scale, lse):
    k -= k.mean(dim=2, keepdim=True)
    return right(q, k, v, scale, lse)


def scaled_in_place(q, k, v, scale, lse):
    """Wrong with the log-sum-exp: when it is called again."""
    q *= 8
    return right(q, k, v, scale / 8, lse)


@pytest.mark.parametrize(
    "call, lse, says",
    [
        (one_tensor, True, "it returns a tensor, not a pair of output and log-sum-exp"),
        (one_head, False, "output has the shape (3, 200, 64), not (2, 3, 200, 64)"),
        (without_sums, True, "log-sum-exp has the shape None, which is not (2, 3, 200)"),
        (sums_of_one_sample, True, "log-sum-exp has the shape (3, 200), which is not (2, 3, 200)"),
        *((call, lse, "it changes the") for call in (in_place, scaled_in_place) for lse in (False, True)),
    ],
)
def test_what_would_broadcast_or_change_a_buffer_is_refused(kernel, call, lse, says):
    kernel(call)
    assert says in kernel_trial.failure("sage", torch.bfloat16, 64, lse, CPU)


@pytest.mark.parametrize("lse", [False, True])
def test_version_1_of_sageattention_fails_its_trial(monkeypatch, lse):
    """Its function swallows return_lse, and takes the mean off the keys in place."""
    monkeypatch.setitem(sys.modules, "sageattention", package(VERSION_1))
    assert kernel_trial.failure("sage", torch.bfloat16, 64, lse, CPU)


def of_values_in_float16(accumulator):
    """Stands for SageAttention's kernels of 8.6: softmax's weights, not yet divided, times V in float16."""

    def call(q, k, v, scale, lse):
        scores = (q.float() @ k.float().transpose(2, 3)) * scale
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        products = (weights @ v.half().float()).to(accumulator).float()
        return (products / weights.sum(-1, keepdim=True)).to(q.dtype), None

    return call


@pytest.mark.parametrize("accumulator, fails", [(torch.float16, True), (torch.float32, False)])
def test_a_kernel_that_adds_large_values_in_float16_is_refused(kernel, accumulator, fails):
    """Which is right with small ones: black images of Qwen-Image."""
    kernel(of_values_in_float16(accumulator))
    why = kernel_trial.failure("sage", torch.bfloat16, 64, False, CPU)
    assert why == ("it is off by inf of values near 65,504" if fails else "")


def test_memory_that_runs_out_is_no_verdict(kernel):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernel(full)
    assert kernel_trial.failure("sage", torch.bfloat16, 64, False, CPU) == kernel_trial.NO_MEMORY


@pytest.mark.parametrize("lse", [False, True])
def test_memory_that_runs_out_for_the_inputs_is_no_verdict(kernel, monkeypatch, lse, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    kernel(right)
    changed = []
    monkeypatch.setattr(kernel_trial, "_numbers", full)
    monkeypatch.setattr(kernel_trial, "has_flash", lambda device: True)
    monkeypatch.setattr(kernel_trial, "give_up_flash", changed.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", changed.append)
    assert kernel_trial.failure("sage", torch.bfloat16, 64, lse, CPU) == kernel_trial.NO_MEMORY
    assert not kernel_trial.settle(torch.bfloat16, 64, lse, CPU)
    assert not changed and not capsys.readouterr().out


def test_a_wrong_kernel_is_named_though_memory_runs_out_later(kernel):
    """In the trial with large values, which comes after."""
    outcomes = [float("nan")]

    def call(q, *_):
        if not outcomes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.full_like(q, outcomes.pop()), None

    kernel(call)
    assert kernel_trial.failure("sage", torch.bfloat16, 64, False, CPU) == "it is off by nan of its values"


@pytest.mark.parametrize("free, is_full", [(10**8, True), (2 * 10**9, False)])
@pytest.mark.parametrize("library", ["CUBLAS", "CUDNN"])
def test_a_library_that_is_not_initialized_fails_its_trial(
    kernel, library, free, is_full, monkeypatch, capsys
):
    """But where the GPU is full, which is no verdict: once models have left, it may have room."""

    def broken(*_):
        raise RuntimeError(f"error: {library}_STATUS_NOT_INITIALIZED")

    switched = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free, 24 * 10**9))
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    kernel(broken)
    why = kernel_trial.failure("sage", torch.bfloat16, 64, False, CPU)
    assert why == kernel_trial.NO_MEMORY if is_full else "NOT_INITIALIZED" in why
    monkeypatch.setattr(kernel_trial, "SDPA", broken)
    assert kernel_trial.settle(torch.bfloat16, 64, False, CPU) == (not is_full)
    assert switched == [False] * (not is_full)
    assert ("NOT_INITIALIZED" in capsys.readouterr().out) == (not is_full)


def test_a_kernel_that_loses_the_gpu_is_named(kernel, monkeypatch):
    """Nothing runs on it afterwards, and torchrun keeps the last error alone."""
    kernel(missing)

    def lost(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch, "ones", lost)
    with pytest.raises(
        RuntimeError, match="^attention is sage, whose trial lost the GPU; set it to auto .*no kernel image"
    ):
        kernel_trial.failure("sage", torch.bfloat16, 64, False, CPU)
