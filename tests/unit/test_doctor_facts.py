"""What scripts/doctor.py reads of a machine, from packages and drivers that are not here."""

import pytest
from doctor_facts import is_installed


@pytest.mark.parametrize("installed, other", [("flash-attn", "flash-attn-4"), ("flash-attn-4", "flash-attn")])
def test_one_flash_attention_does_not_stand_for_another(monkeypatch, tmp_path, installed, other):
    """FlashAttention 2 and 4 share the folder flash_attn."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    info = tmp_path / f"{installed.replace('-', '_')}-2.8.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {installed}\nVersion: 2.8.3\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed(installed) and not is_installed(other)
