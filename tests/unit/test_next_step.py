"""What a failure cause says that helps."""

import pytest

from backend.client.exit_report import RankFailure
from backend.client.next_step import failure_sentence
from backend.client.silence import RUNS, STATES

AGAIN = "run it again, and where it ends so again, report it with the log"
STOPPED = f"rank 0 has been silent for 10 s ({STATES['T']})"
#: Failure -> what helps; empty where the error says it itself.
AFTER = [
    (RankFailure(1, -9), "close what else takes host memory"),
    (RankFailure(1, -7), "--shm-size=8g"),
    (RankFailure(1, -15), "unless it was ended on purpose"),
    (RankFailure(1, -11), "set attention of Parallel Config to sdpa and compile to off"),
    (RankFailure(1, -6), "set attention of Parallel Config to sdpa and compile to off"),
    (RankFailure(1, 7), AGAIN),
    (RankFailure(1, 1, "ValueError: broken"), AGAIN),
    (RankFailure(1, 1, "OutOfMemoryError: CUDA out of memory."), "use a smaller latent or batch"),
    (RankFailure(1, 1, "RuntimeError: DefaultCPUAllocator: can't allocate memory"), "use a smaller latent"),
    (RankFailure(1, 1, "ModuleNotFoundError: No module named 'diffusers'"), "names packages"),
    (RankFailure(1, -6, "CUDA error: an illegal memory access"), "scripts/doctor.py --full"),
]
SAYING = [
    "FatalOutOfMemory: rank 1 ran out of memory in the middle of a request, with 1 GB free on its device "
    "(...); use a smaller latent or batch, or more ranks",
    "ConfigError: gpus is '3' while this process sees 2 GPUs; clear it.",
    "DistBackendError: NCCL error in: ...: Cuda failure 217 'peer access is not supported'",
]


@pytest.mark.parametrize("failure, says", AFTER, ids=str)
def test_a_failed_rank_has_a_next_step(failure, says):
    text = failure_sentence("", failure, 1, "", "")
    first, step = text.split(f"{failure}; ")
    assert first == "The backend ended because " and says in step


@pytest.mark.parametrize("error", SAYING)
def test_an_error_with_a_remedy_has_no_other(error):
    failure = RankFailure(1, 1, error)
    assert failure_sentence("", failure, 1, "", "") == f"The backend ended because {failure}"


@pytest.mark.parametrize(
    "silence, says",
    [
        (STOPPED, "PARALLEL_DIT_SILENT_SECONDS"),
        (f"rank 0 has been silent for 10 s ({STATES['t']})", "PARALLEL_DIT_SILENT_SECONDS"),
        (f"rank 0 has been silent for 120 s ({STATES['D']})", "sudo dmesg"),
        (f"rank 0 has been silent for 120 s ({RUNS})", "says where its threads were"),
        ("machine 1 has been silent for 10 s (its link is cut, or it has stopped)", "see to the network"),
        ("machine 1 is lost (reset): its launcher has ended", "start the backend on each machine again"),
        ("machine 1 has left: it was told to end", "start the backend on each machine again"),
    ],
)
def test_silence_has_a_next_step_and_comes_before_what_followed(silence, says):
    text = failure_sentence(silence, RankFailure(1, -9), -9, "", "")
    first, step = text.split(f"{silence}; ")
    assert first == "The backend ended because " and says in step and "host memory" not in step


def test_a_launcher_that_ended_has_a_next_step():
    text = failure_sentence("", None, 1, " (OSError: no space)", "")
    assert text == f"The backend ended because its launcher exited with code 1 (OSError: no space); {AGAIN}"
    assert "close what else takes host memory" in failure_sentence("", None, -9, "", "")
    full = " The disk of /tmp is full: make room there."
    assert failure_sentence("", None, 1, "", full).endswith("exited with code 1")
    assert "host memory" in failure_sentence("", RankFailure(1, -9), 1, "", full)


def test_a_lost_connection_has_a_next_step():
    text = failure_sentence("", None, None, "", "")
    assert text.startswith("The backend's connection was lost while its processes still run; run it again")
