"""Where scripts/doctor.py --full runs, and what is said of it first."""

from doctor_facts import Facts
from doctor_findings import PROBLEM, WARNING, Finding

FILES_IN_MEMORY = (
    "the temporary folder lies in memory (tmpfs), and in it the files of --full, up to 13 GB (16 on three "
    "GPUs): set TMPDIR to a disk"
)


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
    in_memory = [Finding("full", WARNING, FILES_IN_MEMORY)] if facts.is_temporary_in_memory else []
    if 1 < len(facts.gpus) == len(facts.usable) < ranks:
        what = f"not run: {ranks} ranks need {ranks} GPUs, and there are {len(facts.usable)}"
        return [Finding("full", PROBLEM, f"{what}; run --full --ranks {len(facts.usable)}")]
    left_out = [f"{gpu.index} ({gpu.name})" for gpu in facts.gpus if gpu.index not in facts.usable]
    if not left_out:
        return in_memory
    names = ", ".join(left_out)
    if len(facts.usable) == 1 < ranks and facts.usable != [0]:  # ranks share the first one alone
        what = f"not run: torch has no kernels for GPU {names}, and ranks would share it"
        return [Finding("full", PROBLEM, f"{what}; run {facts.without_others} --ranks {ranks}")]
    if 1 < len(facts.usable) < ranks:
        what = f"not run: torch has no kernels for GPU {names}, and {ranks} ranks need {ranks} GPUs"
        return [Finding("full", PROBLEM, f"{what}; run --full --ranks {len(facts.usable)}")]
    return [Finding("full", WARNING, f"torch has no kernels for GPU {names}: run without it"), *in_memory]
