"""Which version of the backend's sources this process runs, and whether they are still on the disk."""

import hashlib

from ..protocol import BackendError
from .launching.interpreter import PACK


def pack_version() -> str:
    """Return a digest of the backend's sources."""
    digest = hashlib.sha256()
    for path in sorted((PACK / "backend").rglob("*.py")):
        digest.update(path.relative_to(PACK).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


#: Of this process. Processes that it starts read what is on the disk then.
IMPORTED = pack_version()


def require_same_pack():
    """Raise BackendError where the pack was updated since this process imported it: what it starts would be
    of another version."""
    if pack_version() != IMPORTED:
        raise BackendError(
            "The pack was updated while ComfyUI runs, whose ranks would be of another version than its "
            "nodes; restart ComfyUI."
        )
