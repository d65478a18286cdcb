"""Importing a ComfyUI checkout's own modules into a test, or skipping the test file with the reason.
What the pack's own modules fail to import is an error."""

import importlib.util
import os
import sys
import traceback
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
import torch

#: Absolute, as modules have their files, by which ComfyUI's are known.
ROOT = Path(os.environ.get("COMFYUI_PATH", Path.home() / "ComfyUI")).absolute()
NODES = Path(__file__).resolve().parents[2] / "nodes"
#: ComfyUI's own module, which this pack's folder would hide.
COMFYS_NODES = ROOT / "nodes.py"


class ComfysNodes(MetaPathFinder):
    """Finds ComfyUI's ``nodes`` before this pack's, which is on the path, too: modules of ComfyUI keep what
    they have imported first."""

    def find_spec(self, fullname, path=None, target=None):
        return importlib.util.spec_from_file_location("nodes", COMFYS_NODES) if fullname == "nodes" else None


def _prefer_comfys_nodes():
    if not any(isinstance(each, ComfysNodes) for each in sys.meta_path):
        sys.meta_path.insert(0, ComfysNodes())
    if getattr(sys.modules.get("nodes"), "__file__", "") != str(COMFYS_NODES):
        sys.modules.pop("nodes", None)


@contextmanager
def comfy_modules():
    """``with comfy_modules(): import comfy...``; ComfyUI runs on the CPU where there is no GPU, with the
    attention of a GPU."""
    if not (ROOT / "comfy").is_dir():
        pytest.skip(f"there is no ComfyUI at {ROOT}; set COMFYUI_PATH", allow_module_level=True)
    try:
        sys.path.append(str(ROOT))
        _prefer_comfys_nodes()
        from comfy.cli_args import args

        args.cpu = args.cpu or not torch.cuda.is_available()
        args.use_pytorch_cross_attention = True  # as in comfy_server.py
        yield
    except ImportError as error:
        if _is_of_the_pack(error):
            raise
        pytest.skip(f"the ComfyUI at {ROOT} cannot be imported here: {error}", allow_module_level=True)


def _is_of_the_pack(error: ImportError) -> bool:
    """Whether one of the pack's modules is missing, or one of its nodes cannot import something: a renamed
    module would else leave out every test of it."""
    if (error.name or "").split(".")[0] in ("parallel_dit", "backend"):
        return True
    files = [Path(frame.filename).resolve() for frame in traceback.extract_tb(error.__traceback__)]
    return any(file.is_relative_to(NODES) for file in files)
