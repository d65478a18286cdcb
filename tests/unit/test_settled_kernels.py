"""Torch's own attention kernels are tried before a request: requests go on without one that fails."""

import math

import pytest
import torch
from attention_stubs import right

from backend.parallel.attention import kernel_trial
from backend.parallel.attention.attention_kernels import SDPA

CPU = torch.device("cpu")


def missing(*_, **__):
    raise RuntimeError("CUDA error: no kernel image is available for execution on the device")


def last_rows_lost(*given, **options):
    """Beyond a kernel's tiles of 128."""
    out, sums = right(*given, **options)
    out[..., 128:, :] = float("nan")
    return out, sums


def sums_in_base_two(*given, **options):
    out, sums = right(*given, **options)
    return out, sums / math.log(2)


@pytest.mark.parametrize("fails", [False, True])
def test_torch_goes_on_without_cudnn_where_its_choice_fails(monkeypatch, fails, capsys):
    switched = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    if fails:
        monkeypatch.setattr(kernel_trial, "SDPA", missing)
    kernel_trial.settle(torch.bfloat16, 64, False, CPU)
    assert switched == [False] * fails and ("no kernel image" in capsys.readouterr().out) == fails


def last_head_lost(q, k, v):
    """What cuDNN's kernel, which has no float32, might do."""
    out = SDPA(q, k, v)
    if q.dtype != torch.float32:
        out[-1, -1] = 0
    return out


def no_numbers(q, k, v):
    return SDPA(q, k, v) * (1.0 if q.dtype == torch.float32 else float("nan"))


@pytest.mark.parametrize("attention, off", [(last_head_lost, "1"), (no_numbers, "nan")])
def test_torch_goes_on_without_cudnn_where_its_choice_is_wrong(monkeypatch, attention, off, capsys):
    """No error says so: on GPUs of 9.x and 10.x torch's first choice is cuDNN."""
    switched = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    monkeypatch.setattr(kernel_trial, "SDPA", attention)
    kernel_trial.settle(torch.bfloat16, 64, False, CPU)
    assert switched == [False]
    said = f"torch's attention failed (it is off by {off} of its values), and goes on without cuDNN's\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("flash", [right, missing, last_rows_lost, sums_in_base_two])
@pytest.mark.parametrize("lse", [False, True])
def test_rings_go_on_without_a_flash_kernel_that_fails_or_is_wrong(monkeypatch, lse, flash, capsys):
    """Torch's own choice of kernels passes over what was not built; rings call flash themselves."""
    given_up = []
    monkeypatch.setattr(kernel_trial, "has_flash", lambda device: True)
    monkeypatch.setattr(kernel_trial, "give_up_flash", given_up.append)
    monkeypatch.setattr(kernel_trial, "flash_of_torch", flash)
    assert kernel_trial.settle(torch.bfloat16, 64, lse, CPU)
    fails = lse and flash is not right
    assert given_up == [CPU] * fails
    assert ("rings go on without it" in capsys.readouterr().out) == fails
