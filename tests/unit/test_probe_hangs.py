"""What backend/client/auto/probe_process.py says of ranks that hang while this machine is measured."""

import os
import sys
from functools import partial

import pytest

from backend.client.auto import probe_process


def hang(device: str, **how) -> probe_process.UnmeasuredError:
    """The error of a process that does not end; ``how``: arguments of run()."""
    code = "import time; print('x' * 9000, 'NCCL WARN connect failed', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code]
    remedy = partial(probe_process.hang_remedy, device)
    with pytest.raises(probe_process.UnmeasuredError) as failure:
        probe_process.run(command, dict(os.environ), lambda: None, longest=1.0, remedy=remedy, **how)
    return failure.value


@pytest.mark.parametrize("device, says", [("cuda", "IOMMU"), ("cpu", "scripts/doctor.py")])
@pytest.mark.parametrize("started", [False, True])
def test_ranks_that_do_not_answer_are_said_to_hang(device, says, started):
    """In one sentence; the doctor, whose probe it is, too, would send to itself."""
    failure = hang(device, is_started=lambda: started)
    assert failure.log.endswith("NCCL WARN connect failed")
    assert len(failure.log) == probe_process.LOG_BYTES
    assert failure.of_links == (started and device == "cuda")  # who still imports says nothing of links
    sentence = str(failure)
    assert "did not answer within 1 s" in sentence and says in sentence and sentence.count(". ") == 0
    assert (failure.remedy == "") == (device == "cpu")
    # degrees by hand would start the same links
    assert ("gpus of Parallel Config to 1" if failure.of_links else "by hand") in sentence


@pytest.mark.parametrize("is_linked", [False, True])
def test_links_that_hang_in_the_last_way_are_said_to(is_linked):
    """As in the only one, which the user has chosen: the doctor's other checks would hang, too."""
    failure = hang("cuda", is_started=lambda: True, is_linked=lambda: is_linked, is_last=True)
    assert failure.of_links == (not is_linked)
