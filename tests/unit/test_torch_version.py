"""What older versions of torch lack."""

import subprocess
import sys

import pytest

from backend.runtime import torch_version


@pytest.mark.parametrize(
    "installed, least, is_later",
    [
        ("2.13.0+cpu", (2, 12), True),
        ("2.6.0", (2, 12), False),
        ("2.12.0a0+git1", (2, 12), True),
        ("3.0", (2, 12), True),
    ],
)
def test_versions(monkeypatch, installed, least, is_later):
    monkeypatch.setattr(torch_version, "torch_version", lambda: installed)
    assert torch_version.has_torch(*least) == is_later


def test_the_backend_is_imported_without_types_that_torch_2_6_lacks():
    code = """
import torch
import torch._inductor.utils  # which names it, in this version
assert "float8_e8m0fnu" in vars(torch)
del torch.float8_e8m0fnu
import backend.worker, backend.preflight
from backend.loading.mapped_file import DTYPES
assert DTYPES["F8_E8M0"] == torch.uint8
"""
    subprocess.run([sys.executable, "-c", code], check=True)
