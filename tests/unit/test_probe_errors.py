"""What a user is told of ranks that could not measure their machine, and what is left of a full one."""

from types import SimpleNamespace

import pytest

from backend.client import cache_files, exit_report
from backend.client.auto import probe_process
from backend.client.auto.probe_process import UnmeasuredError, _unmeasured, measured_rates
from backend.client.exit_report import RankFailure
from backend.client.launching import nccl_settings
from backend.config import ParallelConfig
from backend.planner.machine import AGAIN, Machine

ERROR = """[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCL.cpp:94, unhandled error
[rank1]: ncclUnhandledCudaError: Call to CUDA function failed.
[rank1]: Last error:
[rank1]: {}
[rank1]: W1127 closing signal SIGTERM"""


def test_a_full_gpu_is_not_taken_for_a_broken_link():
    """Of five ways between GPUs none makes room, and one that works later would be cached."""
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


def test_lines_of_source_are_not_what_ranks_said():
    """torchrun puts the rank before each line of its traceback, spaces after that."""
    source = '[default1]:    raise LinkError(f"rank {rank} received other bytes than {peers[0]} sent")'
    said = "[default1]:[rank1]: __main__.LinkError: rank 1 received other bytes than rank 0 sent"
    error = _unmeasured(f"{source}\n{said}", 1)
    assert error.why == "__main__.LinkError: rank 1 received other bytes than rank 0 sent" and error.of_links
    assert not _unmeasured(f"{source}\n[default1]:ValueError: another Error", 1).of_links


def test_the_cause_of_a_broken_link_is_told():
    error = _unmeasured(ERROR.format("Cuda failure 217 'peer access is not supported'"), 1)
    assert error.of_links and "peer access is not supported" in error.why
    assert _unmeasured("nothing", 3).why == "code 3"


def test_a_gpu_that_lets_nobody_in_is_told_with_the_command():
    error = "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"
    assert "nvidia-smi -c DEFAULT" in str(RankFailure(0, 1, error))


@pytest.mark.parametrize("said", ["operation not supported", "unknown error"])
def test_a_driver_without_segments_that_grow_is_told_with_the_setting(said, monkeypatch):
    """That of a vGPU: every rank that allocates fails, with degrees by hand too."""
    error = f"RuntimeError: CUDA driver error: {said}"
    setting = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
    unmeasured = _unmeasured(f"[rank0]: {error}", 1)
    assert setting in str(unmeasured) and not unmeasured.of_links
    assert setting in str(RankFailure(0, 1, error))
    assert setting not in str(RankFailure(0, 1, f"RuntimeError: CUDA error: {said}"))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    is_still_said = said == "operation not supported"  # nothing else says that
    assert (setting in str(RankFailure(0, 1, error))) == is_still_said
    assert (setting in str(_unmeasured(f"[rank0]: {error}", 1))) == is_still_said


@pytest.mark.parametrize("file", ["PeerToPeerAccess", "GpuFabricInfo"])
def test_a_broken_nvml_is_no_full_gpu(file):
    """torch asks it for segments that grow."""
    error = f'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/{file}.cpp":60'
    assert "expandable_segments:False" in str(_unmeasured(error, 1))
    assert "expandable_segments:False" in str(RankFailure(0, 1, error))


SOCKETS = nccl_settings.WAYS[-1]
FULL = (
    "NCCL error: unhandled system error (Error while creating /dev/shm/nccl-1a: No space left on device (28))"
)


@pytest.fixture
def links_of(monkeypatch, tmp_path):
    """Measure GPUs 0 and 1, which reach each other in one ``way`` alone: the sentence on it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in nccl_settings.LINK_SETTINGS:
        monkeypatch.delenv(name, raising=False)

    def measure(way: dict, *said: str) -> str:
        errors = iter(said)

        def probed(config, device, tried, *_, **__):
            if tried != way:
                raise UnmeasuredError(next(errors, FULL), of_links=True)
            return {}

        monkeypatch.setattr(probe_process, "_probed", probed)
        return measured_rates(ParallelConfig(ulysses_degree=2), "cuda", print, print)["links"]

    return measure


@pytest.mark.parametrize("size, passes", [(8 << 30, True), (64 << 20, False)])
def test_sockets_count_for_this_process_where_shared_memory_is_full(links_of, monkeypatch, size, passes):
    """Of files that other processes have left, which may go; a container's 64 MB stay as small."""
    room = SimpleNamespace(total=size, free=0)
    monkeypatch.setattr(exit_report.shutil, "disk_usage", lambda place: room)
    links = links_of(SOCKETS)
    assert "through sockets" in links and links.endswith(AGAIN) == passes
    assert ("nccl-* that no process uses" in links) == passes
    assert Machine("GPU", 1e14, 1e14, 1e12, 1e10, {}, links=links).lasts != passes
    assert nccl_settings.saved_way({}, [0, 1]) == SOCKETS
    monkeypatch.setattr(cache_files, "_passing", {})  # as in another process
    assert nccl_settings.saved_way({}, [0, 1]) == ({} if passes else SOCKETS)


@pytest.mark.parametrize("free, passes", [(255 << 20, True), (256 << 20, False)])
def test_what_fails_next_to_little_shared_memory_passes_as_well(links_of, monkeypatch, free, passes):
    """NCCL does not always say that no space was left."""
    room = SimpleNamespace(total=8 << 30, free=free)
    monkeypatch.setattr(exit_report.shutil, "disk_usage", lambda place: room)
    links = links_of(SOCKETS, *["NCCL error: unhandled system error"] * 4)
    assert links.endswith(AGAIN) == passes and links.count("nccl-* that no process uses") == passes


def test_room_that_was_lacking_later_is_named_once(links_of, monkeypatch):
    room = SimpleNamespace(total=8 << 30, free=0)
    monkeypatch.setattr(exit_report.shutil, "disk_usage", lambda place: room)
    links = links_of(SOCKETS, "NCCL error: Cuda failure 217 'peer access is not supported'")
    assert links.endswith(AGAIN) and links.count("nccl-* that no process uses") == 1
    assert links.index("Room was lacking") < links.index("nccl-* that no")


def test_what_the_doctor_finds_later_counts_instead_of_a_way_that_passes(links_of, monkeypatch):
    """It is another process, and may have measured more GPUs."""
    nccl_settings.save_way({}, [0, 1], {})
    nccl_settings.save_way({}, [0, 1], SOCKETS, passes=True)
    here = dict(cache_files._passing)
    assert nccl_settings.saved_way({}, [0, 1]) == SOCKETS
    monkeypatch.setattr(cache_files, "_passing", {})
    nccl_settings.save_way({}, [0, 1, 2], {})
    monkeypatch.setattr(cache_files, "_passing", here)
    assert nccl_settings.saved_way({}, [0, 1]) == {}
    nccl_settings.save_way({}, [0, 1], SOCKETS, passes=True)
    assert nccl_settings.saved_way({}, [0, 1]) == SOCKETS


def test_a_way_that_is_measured_anew_counts_instead_of_that_of_a_full_moment(links_of):
    for gpus in ([0, 1], [2, 3]):
        nccl_settings.save_way({}, gpus, SOCKETS, passes=True)
    assert links_of({}) == "" and nccl_settings.saved_way({}, [0, 1]) == {}
    assert nccl_settings.saved_way({}, [2, 3]) == SOCKETS
