"""Which GPUs scripts/doctor.py judges: those that CUDA_VISIBLE_DEVICES leaves."""

from dataclasses import replace

import pytest
from doctor_findings import OK, PROBLEM
from doctor_stubs import GPU, MODE, machine, said

#: A GPU for a screen, which is exclusive, in the slot before one that computes.
ROWS = [
    {**MODE, "index": "0", "uuid": "GPU-aa11", "compute_mode": "Exclusive_Process"},
    {**MODE, "index": "1", "uuid": "GPU-bb22"},
]


@pytest.mark.parametrize(
    "listed, uuids, judged",
    [
        (None, ["bb22", "aa11"], True),
        ("1", [""], False),
        ("0", [""], True),
        ("0", ["bb22"], False),  # CUDA numbers the fastest GPU first
        ("GPU-bb", [""], False),
        ("GPU-aa", [""], True),
        ("MIG-aa11", ["cc33"], True),
        ("", [], False),
    ],
)
def test_a_gpu_that_is_hidden_is_not_judged(listed, uuids, judged):
    gpus = [replace(GPU, index=index, uuid=uuid) for index, uuid in enumerate(uuids)]
    variables = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    found = said(machine(driver=ROWS, gpus=gpus, variables=variables), "GPU modes")
    assert [status for status, _ in found] == ([PROBLEM, OK] if judged else [OK])
