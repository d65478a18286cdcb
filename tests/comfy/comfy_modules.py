"""Importing a ComfyUI checkout's own modules into a test, or skipping the test file with the reason.
What the pack's own modules fail to import is an error."""

import os
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ROOT = Path(os.environ.get("COMFYUI_PATH", Path.home() / "ComfyUI"))
NODES = Path(__file__).resolve().parents[2] / "nodes"


@contextmanager
def comfy_modules():
    """``with comfy_modules(): import comfy...``; ComfyUI runs on the CPU where there is no GPU, with the
    attention of a GPU."""
    if not (ROOT / "comfy").is_dir():
        pytest.skip(f"there is no ComfyUI at {ROOT}; set COMFYUI_PATH", allow_module_level=True)
    try:
        sys.path.append(str(ROOT))
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
