"""What skips a file of tests, and what fails it."""

import sys
from pathlib import Path

import pytest
from comfy_modules import ROOT, comfy_modules

with comfy_modules():
    import comfy.samplers  # noqa: F401  # skips this file where there is no ComfyUI


def test_two_blocks_give_the_same_nodes():
    """Nodes of ComfyUI are executed once, also where COMFYUI_PATH is relative."""
    found = []
    for _ in range(2):
        with comfy_modules():
            import nodes
        found.append(nodes)
    assert found[0] is found[1] and Path(found[0].__file__) == ROOT / "nodes.py"


def test_a_module_that_comfyui_lacks_skips():
    with pytest.raises(pytest.skip.Exception, match="cannot be imported here: No module named 'comfy.gone'"):
        with comfy_modules():
            import comfy.gone  # noqa: F401  # fails


def test_a_module_that_the_pack_lacks_fails():
    with pytest.raises(ImportError, match="gone"), comfy_modules():
        import parallel_dit.nodes.gone  # noqa: F401  # fails


def test_a_name_that_the_pack_lacks_fails():
    with pytest.raises(ImportError, match="gone"), comfy_modules():
        from parallel_dit.backend.config import gone  # noqa: F401  # fails


def test_what_a_node_cannot_import_fails(monkeypatch):
    monkeypatch.delitem(sys.modules, "parallel_dit.nodes.host.conditioning", raising=False)
    monkeypatch.setitem(sys.modules, "comfy.conds", None)
    with pytest.raises(ImportError, match="comfy.conds"), comfy_modules():
        import parallel_dit.nodes.host.conditioning  # noqa: F401  # fails
