"""Importing a ComfyUI checkout's own modules into a test, or skipping the test file with the reason."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

ROOT = Path(os.environ.get("COMFYUI_PATH", Path.home() / "ComfyUI"))


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
        pytest.skip(f"the ComfyUI at {ROOT} cannot be imported here: {error}", allow_module_level=True)
