"""What a user is told of ranks that could not measure their machine."""

import pytest

from backend.client.exit_report import RankFailure
from backend.client.probe_process import _unmeasured

ERROR = """[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCL.cpp:94, unhandled error
[rank1]: ncclUnhandledCudaError: Call to CUDA function failed.
[rank1]: Last error:
[rank1]: {}
[rank1]: W1127 closing signal SIGTERM"""


def test_a_full_gpu_is_not_taken_for_a_broken_link():
    """Of five ways between GPUs none makes room, and one that works later would be kept."""
    error = _unmeasured(ERROR.format("Failed to CUDA calloc 4194304 bytes"), 1)
    assert not error.of_links
    assert "unhandled error (Failed to CUDA calloc 4194304 bytes)); close what fills a GPU" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":1154',
    ],
)
def test_memory_is_named_without_nccl(text):
    assert "close what fills a GPU" in str(_unmeasured(text, 1))


def test_the_cause_of_a_broken_link_is_told():
    error = _unmeasured(ERROR.format("Cuda failure 217 'peer access is not supported'"), 1)
    assert error.of_links and "peer access is not supported" in error.why
    assert _unmeasured("nothing", 3).why == "code 3"


def test_a_gpu_that_lets_nobody_in_is_told_with_the_command():
    error = "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    assert "nvidia-smi -c DEFAULT" in str(RankFailure(0, 1, error))


@pytest.mark.parametrize("said", ["operation not supported", "unknown error"])
def test_a_driver_without_segments_that_grow_is_told_with_the_setting(said):
    """That of a vGPU: every rank that allocates fails, with degrees by hand too."""
    error = f"RuntimeError: CUDA driver error: {said}"
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
    unmeasured = _unmeasured(f"[rank0]: {error}", 1)
    assert setting in str(unmeasured) and not unmeasured.of_links
    assert setting in str(RankFailure(0, 1, error))
    assert setting not in str(RankFailure(0, 1, f"RuntimeError: CUDA error: {said}"))
