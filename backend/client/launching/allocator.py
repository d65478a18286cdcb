"""Settings of torch's allocator for ranks on GPUs, by those of this process."""

import sys
from collections.abc import Mapping

from ...hardware.host_system import is_tegra, is_wsl

#: Settings of torch's allocator, under the names of several versions of it.
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
#: Segments that grow: requests of other sizes leave no gaps that nothing fits into. Others are given back
#: while the whole GPU is waited for, which two stages of a pipeline must not do at once: where they may, none
#: posts receives ahead.
_GROWING = "expandable_segments:True"


def settings(parent: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator's settings for ranks on GPUs: the user's, and segments that grow, unless these say
    otherwise. ComfyUI adds ``backend:cudaMallocAsync`` to the user's for its own process, which is left out.
    None of ours on WSL, where the first allocation fails under drivers before R615 (pytorch issue 192330),
    and on a Jetson, whose driver may have none (unslothai/unsloth issue 1446)."""
    found = {}
    may_grow = sys.platform == "linux" and not is_wsl() and not is_tegra()
    for name in NAMES:
        parts = [part.strip() for part in parent.get(name, "").split(",")]
        users = [part for part in parts if part and not part.startswith("backend:")]
        if users:
            is_said = any(part.startswith("expandable_segments") for part in users)
            found[name] = ",".join(users if is_said or not may_grow else [*users, _GROWING])
    newest, older = NAMES[:2]  # torch before 2.9 does not know the newest, later ones read the older first
    if not found and may_grow:
        found[newest] = _GROWING
    if set(found) == {newest}:
        found[older] = found[newest]
    return found


def grows(settings: Mapping[str, str]) -> bool:
    """Return whether segments grow by ``settings``, any of which the ranks' torch may read."""
    lasts = [value.replace(" ", "").rpartition("expandable_segments:")[2] for value in settings.values()]
    return bool(lasts) and all(last.startswith("True") for last in lasts)
