"""What a failure cause says that helps."""

import pytest

from backend.client.exit_report import RankFailure
from backend.client.next_step import failure_sentence
from backend.client.silence import RUNS, STATES

AGAIN = "Run it again, and where it ends so again, report it with the log"
STOPPED = f"rank 0 has been silent for 10 s ({STATES['T']})"
#: Failure -> what helps; empty where the error says it itself.
AFTER = [
    (RankFailure(1, -9), "memory runs out. Close what else takes host memory"),
    (RankFailure(1, -7), "--shm-size=8g"),
    (RankFailure(1, -15), "unless it was ended on purpose"),
    *((RankFailure(1, -code), "Run it again, unless it was ended on purpose") for code in (1, 2, 3)),
    *((RankFailure(1, -code), "set attention of Parallel Config to sdpa") for code in (11, 6, 4, 8)),
    *((RankFailure(1, -code), AGAIN) for code in (10, 35, 99)),
    (RankFailure(1, 7), AGAIN),
    (RankFailure(1, 1, "ValueError: broken"), AGAIN),
    (RankFailure(1, 1, "OutOfMemoryError: CUDA out of memory."), "memory. Use a smaller latent or batch"),
    (RankFailure(1, 1, "RuntimeError: DefaultCPUAllocator: can't allocate memory"), "Use a smaller latent"),
    (RankFailure(1, 1, "ModuleNotFoundError: No module named 'diffusers'"), "names packages"),
    (RankFailure(1, -6, "CUDA error: an illegal memory access"), "scripts/doctor.py --full"),
]
SAYING = [
    "FatalOutOfMemory: rank 1 ran out of memory in the middle of a request, with 1 GB free on its device "
    "(...); use a smaller latent or batch, or more ranks",
    "UnsupportedError: steps is 0; it has to be 1 or more",
    "backend.loading.lora.lora_keys.MisfitError: no key of the LoRA fits; choose another",
    "RefusedByAllRanks: rank 0 lacks memory; use more ranks",
    "ConfigError: gpus is '3' while this process sees 2 GPUs; clear it.",
    "DistBackendError: NCCL error in: ...: Cuda failure 217 'peer access is not supported'",
]


@pytest.mark.parametrize("failure, says", AFTER, ids=str)
def test_a_failed_rank_has_a_next_step(failure, says):
    text = failure_sentence("", failure, 1, "", "")
    cause = f"The backend ended because {failure}".removesuffix(".")
    assert text.startswith(f"{cause}. ") and text[len(cause) + 2].isupper() and says in text


@pytest.mark.parametrize("error", SAYING)
def test_an_error_with_a_remedy_has_no_other(error):
    failure = RankFailure(1, 1, error)
    cause = f"The backend ended because {failure}".removesuffix(".")
    assert failure_sentence("", failure, 1, "", "") == cause


@pytest.mark.parametrize(
    "silence, says",
    [
        (STOPPED, "PARALLEL_DIT_SILENT_SECONDS"),
        (f"rank 0 has been silent for 10 s ({STATES['t']})", "PARALLEL_DIT_SILENT_SECONDS"),
        (f"rank 0 has been silent for 120 s ({STATES['D']})", "sudo dmesg"),
        (f"rank 0 has been silent for 120 s ({RUNS})", "says where its threads were"),
        ("machine 1 has been silent for 10 s (its link is cut, or it has stopped)", "See to the network"),
        (
            "machine 1 is lost (reset): its launcher has ended",
            "says why; start the backend on each machine again",
        ),
        ("machine 1 has left: it was told to end", "machine again, unless it was ended on purpose"),
        (f"machine 1 has left: {STOPPED}", "Put that right there"),
        (f"rank 1 has been silent for 120 s ({RUNS}) and {STOPPED}", "says where its threads were"),
    ],
)
def test_silence_has_a_next_step_and_comes_before_what_followed(silence, says):
    text = failure_sentence(silence, RankFailure(1, -9), -9, "", "")
    first, step = text.split(f"{silence}. ")
    assert first == "The backend ended because " and says in step and "host memory" not in step


def test_a_launcher_that_ended_has_a_next_step():
    text = failure_sentence("", None, 1, " (OSError: no space)", "")
    assert text == f"The backend ended because its launcher exited with code 1 (OSError: no space). {AGAIN}"
    assert "Close what else takes host memory" in failure_sentence("", None, -9, "", "")
    full = " The disk of /tmp is full: make room there."
    assert failure_sentence("", None, 1, "", full).endswith("exited with code 1")
    assert "host memory" in failure_sentence("", RankFailure(1, -9), 1, "", full)


@pytest.mark.parametrize(
    "error, says",
    [
        ("ModuleNotFoundError: No module named 'torch'", "names packages"),
        ("torch.distributed.DistBackendError: NCCL error in: x", "scripts/doctor.py --full"),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", "Use a smaller latent"),
        ("ConfigError: gpus is '3'; clear it.", ""),
    ],
)
def test_an_error_of_the_launcher_has_the_step_of_a_ranks(error, says):
    text = failure_sentence("", None, 1, f" ({error})", "")
    cause = f"The backend ended because its launcher exited with code 1 ({error})"
    assert text.startswith(cause) and says in text and (says or text == cause)


FULL = " The disk of /tmp is full (0 bytes free): make room there."


@pytest.mark.parametrize(
    "failure, status",
    [
        (RankFailure(1, 1, "OSError: [Errno 28] No space left on device"), 1),
        (RankFailure(1, 7), 1),
        (None, None),
        (None, 1),
    ],
)
def test_a_full_disk_is_not_reported(failure, status):
    assert "report it" in failure_sentence("", failure, status, "", "")
    assert "report it" not in (text := failure_sentence("", failure, status, "", FULL)) and ". " not in text


@pytest.mark.parametrize(
    "silence, code, keeps",
    [
        ("", -9, "Close what else takes host memory"),
        ("", -7, ""),
        ("", -11, ""),
        ("", -15, ""),
        (STOPPED, 1, "Who stops ranks in a debugger sets PARALLEL_DIT_SILENT_SECONDS"),
        (f"rank 0 has been silent for 120 s ({STATES['D']})", 1, "(sudo dmesg)"),
    ],
)
def test_nobody_is_told_to_start_the_run_that_starts(silence, code, keeps):
    text = failure_sentence(silence, RankFailure(1, code), 1, "", "", starts_anew=True)
    assert "run it again" not in text.lower() and keeps in text and (". " in text) == bool(keeps)


def test_a_lost_connection_has_a_next_step():
    text = failure_sentence("", None, None, "", "")
    assert text.startswith("The backend's connection was lost while its processes still run. Run it again")
