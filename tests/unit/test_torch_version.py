"""Which version of torch is installed; test_lean_imports.py imports the backend under an older one."""

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
