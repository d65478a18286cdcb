"""Stages post no receive ahead where their allocator may wait for it."""

from launch import run_ranks
from tiny import write_shallow_flux


def test_stages_with_fixed_segments_receive_when_they_need_it(tmp_path):
    """The same bits; on the last stage, which receives activations."""
    path = write_shallow_flux(tmp_path / "m.safetensors")
    found = run_ranks("ranks.fixed_segments", 2, tmp_path, str(path))
    growing, fixed = found["ahead"]
    assert growing > 0 and fixed == 0
    assert found["relative"] == 0.0
