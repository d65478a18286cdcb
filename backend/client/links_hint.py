"""What to try where ranks that have all started do not reach each other."""

#: What ranks of one machine wait for where others are on other machines, and what to do.
UNREACHED = (
    "those of other machines are not ready or not reached (let every TCP port pass between the machines, "
    "give containers the host's network, and set NCCL_IB_DISABLE=1 where InfiniBand does not connect them)"
)
#: What GPUs of one machine may hang in. A launch measures nothing, and its host need not have ComfyUI.
HANGING = (
    "GPUs that do not reach each other's memory hang so (python scripts/doctor.py --full, run as this user, "
    "finds another way between them: docs/faq.md)"
)


def links_hint(has_machines: bool, has_gpus: bool) -> str:
    """Return the rest of a sentence on ranks that are ready; empty where nothing is known. ``has_machines``:
    others are elsewhere; ``has_gpus``: several run on GPUs of this machine."""
    within = HANGING if has_gpus else ""
    if has_machines:
        return f" here, so {UNREACHED}{'; or ' + within if within else ''}"
    return f" and {within}" if within else ""
