"""Where scripts/doctor.py --full runs, and what is said of it first."""

from doctor_facts import Facts
from doctor_findings import PROBLEM, WARNING, Finding, gb

FILES_IN_MEMORY = (
    "the temporary folder lies in memory (tmpfs), and in it the files of --full, up to 13 GB (16 on three "
    "GPUs): set TMPDIR to a disk"
)
#: Part of the largest GPU's memory below which a card, as one that drives the screen, fits no equal share.
SMALL = 0.25


def place(device: str, ranks: int, facts: Facts) -> tuple[str, int]:
    """Return where --full runs: every GPU that can compute, or 2 ranks on the CPU, unless asked otherwise."""
    chosen = ("cuda" if facts.usable else "cpu") if device == "auto" else device
    return chosen, ranks or (len(facts.usable) if chosen == "cuda" else 2)


def remarks(device: str, ranks: int, facts: Facts) -> list[Finding]:
    """Return what is to be said of GPUs that cannot be used, and of files in memory. A problem: nothing runs.
    Numbers of the CPU are not what was asked for where there are GPUs."""
    if facts.platform == "win32":
        what = "not run: ranks do not run under Windows, where torch has no NCCL to join GPUs"
        return [Finding("full", PROBLEM, f"{what}; run ComfyUI under Linux or WSL 2 (docs/faq.md)")]
    if device == "cpu":  # whose files are small
        return []
    if not facts.usable:
        if device == "cuda" or facts.gpus or facts.driver or facts.smi[1] or facts.cuda_error:
            what = "not run: the GPUs cannot be used, see CUDA and GPUs above"
            return [Finding("full", PROBLEM, f"{what}; --device cpu runs small models")]
        return []
    about = [Finding("full", WARNING, FILES_IN_MEMORY)] if facts.is_temporary_in_memory else []
    about += _small(ranks, facts)
    if 1 < len(facts.gpus) == len(facts.usable) < ranks:
        what = f"not run: {ranks} ranks need {ranks} GPUs, and there are {len(facts.usable)}"
        return [Finding("full", PROBLEM, f"{what}; run --full --ranks {len(facts.usable)}")]
    left_out = [f"{gpu.index} ({gpu.name})" for gpu in facts.gpus if gpu.index not in facts.usable]
    if not left_out:
        return about
    names = ", ".join(left_out)
    if len(facts.usable) == 1 < ranks and facts.usable != [0]:  # ranks share the first one alone
        what = f"not run: torch has no kernels for GPU {names}, and ranks would share it"
        return [Finding("full", PROBLEM, f"{what}; run {facts.command_on(facts.usable)} --ranks {ranks}")]
    if 1 < len(facts.usable) < ranks:
        what = f"not run: torch has no kernels for GPU {names}, and {ranks} ranks need {ranks} GPUs"
        return [Finding("full", PROBLEM, f"{what}; run --full --ranks {len(facts.usable)}")]
    return [Finding("full", WARNING, f"torch has no kernels for GPU {names}: run without it"), *about]


def _small(ranks: int, facts: Facts) -> list[Finding]:
    """Warn of GPUs that would make checks of several ranks fail for want of memory."""
    used = [gpu for gpu in facts.gpus if gpu.index in facts.usable][: ranks or None]
    least = SMALL * max(gpu.memory for gpu in used)
    small = [gpu for gpu in used if gpu.memory < least]
    if not small:
        return []
    names = ", ".join(f"{gpu.index} ({gpu.name}, {gb(gpu.memory)})" for gpu in small)
    others = [gpu.index for gpu in used if gpu not in small]
    command = facts.command_on(others)
    if others == facts.usable[: len(others)]:  # as torch numbers them, the fastest first
        command = f"python scripts/doctor.py --full --ranks {len(others)}"
    what = f"GPU {names} has less than a quarter of the largest one's memory"
    why = "checks in which every GPU holds as much may fail for want of it"
    return [Finding("full", WARNING, f"{what}: {why}; run {command}")]
