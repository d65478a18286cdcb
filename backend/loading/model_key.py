"""The name under which ranks hold what a Load asks for."""

import hashlib
import json
from pathlib import Path

from ..protocol import Load


def model_key(message: Load) -> str:
    """Names what a Load loads: a file that changed on disk is another model. The same on every rank of a
    machine."""
    path = Path(message.path).resolve()
    stamp = [path.stat().st_mtime_ns, path.stat().st_size] if path.exists() else []
    what = [str(path), message.weight_dtype, message.matmul, stamp]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
