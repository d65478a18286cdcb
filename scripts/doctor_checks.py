"""The quick checks of scripts/doctor.py: a list of small functions of Facts that return findings.

A finding is (status, text): ok; warning, for what costs speed or may surprise; problem, for what will fail.
"""

from collections.abc import Callable, Iterable, Iterator

from doctor_facts import CUDA_SECONDS, TIMED_OUT, Facts
from doctor_findings import OK, PROBLEM, WARNING, Finding, findings, gb
from doctor_room import more_memory
from doctor_slow_copies import copies
from doctor_wheels import IMPORT_SECONDS

from backend.client.exit_report import MIN_SHARED_MEMORY
from backend.runtime.install_command import how_to_install, install_command

#: Least versions (README.md).
PYTHON = (3, 11)
#: Compute capability with bf16 tensor cores.
BF16 = (8, 0)
#: Bytes that should be free on a disk that holds sockets and logs; --full asks for the room of its files
#: itself.
DISK = 2 << 30
HOST_MEMORY = 8 << 30
#: Part of a GPU's memory that others may use before it is said.
OTHERS = 0.15
OPEN_FILES = 1024
#: NCCL registers more memory with InfiniBand than the 8 MB that systemd and containers let a process lock.
LOCKED_MEMORY = 1 << 30
#: Variable -> values that are fine, and what another one does.
VARIABLES = {
    "NCCL_P2P_DISABLE": (
        "0",
        "GPUs send through host memory, several times as slow; unset it, unless they have no peer access",
    ),
    "NCCL_SHM_DISABLE": ("0", "GPUs without peer access send through a socket; unset it"),
    "NCCL_SOCKET_IFNAME": ("", "NCCL meets on that interface, which has to exist; unset it on one machine"),
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": (
        "0",
        "models in float32 multiply in TF32, which keeps 10 bits of the mantissa; unset it if they need more",
    ),
    "CUDA_LAUNCH_BLOCKING": (
        "0",
        "ComfyUI waits for each kernel, which is for debugging alone, and ranks run without it; unset it",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        "0",
        "every tensor of ComfyUI asks CUDA for memory, and ranks run without it; unset it",
    ),
}
#: Which variables hide GPUs from a torch for ROCm; what it needs to see them.
OF_ROCM = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
SEEN_BY_ROCM = (
    "add this user to the groups render and video, which may open /dev/kfd and /dev/dri (a container needs "
    "--device=/dev/kfd --device=/dev/dri)"
)
#: What is not known of AMD's GPUs.
UNKNOWN_OF_AMD = (
    "unknown are what other programs hold of AMD's GPUs and their PCIe lanes, which rocm-smi shows, and "
    "whether this pack runs on them, which nobody has tried yet"
)
#: Packages without compiled code, of which no other build helps.
PURE_PYTHON = ("diffusers", "yunchang", "gguf")
#: Packages that are not needed -> what they are for.
OPTIONAL = {
    "flash-attn": "attention",
    "flash_attn_3": "attention",
    "flash-attn-4": "attention",
    "sageattention": "attention",
    "sageattn3": "attention",
    "comfy-kitchen": "products of quantized layers on int8, fp8 and fp4 tensor cores",
    "gguf": "GGUF files",
}

Status = tuple[str, str]


def python(facts: Facts) -> Status:
    version = ".".join(map(str, facts.python))
    if facts.python < PYTHON:
        return PROBLEM, f"Python {version} is older than {PYTHON[0]}.{PYTHON[1]}, which diffusers needs"
    return OK, f"Python {version} on {facts.system}"


def packages(facts: Facts) -> Status:
    if facts.unmet:
        return PROBLEM, f"missing or too old: {', '.join(facts.unmet)}; {how_to_install(facts.unmet)}"
    return OK, "every package of requirements.txt is installed"


def wheels(facts: Facts) -> Iterator[Status]:
    for name, wheel in facts.wheels.items():
        if wheel.is_slow:
            what = f"was not imported within {IMPORT_SECONDS:.0f} s"
            yield (
                WARNING,
                f"{name} {wheel.version} {what}: a busy machine, a slow disk, or an import that hangs",
            )
            continue
        if not wheel.error:
            text = f"{name} {wheel.version} can be imported"
            refused = wheel.refusal.removesuffix(".")
            yield (WARNING, f"{text}, but is refused: {refused}") if refused else (OK, text)
            continue
        remedy = f"install one built for torch {facts.torch.version}"
        if name in PURE_PYTHON:
            remedy = f"run: {install_command([name], upgrade=True)}"
        if name in OPTIONAL:
            remedy += ", or uninstall it: it is optional"
        yield PROBLEM, f"{name} {wheel.version} is broken ({wheel.error}); {remedy}"
    absent = [f"{name} ({what})" for name, what in OPTIONAL.items() if name not in facts.wheels]
    if absent:
        yield OK, f"optional and not installed: {', '.join(absent)}"


def cuda(facts: Facts) -> Iterator[Status]:
    if facts.smi[1] == TIMED_OUT:  # said before the next wait
        yield WARNING, f"{TIMED_OUT}; asking torch, which may take {CUDA_SECONDS:.0f} s more"
    yield _cuda(facts)


def _cuda(facts: Facts) -> Status:
    built, driver = facts.torch, facts.driver
    name = f"torch {built.version}"
    if facts.gpus:
        version = f"CUDA {built.cuda}" if built.cuda else f"ROCm {built.hip}"
        told = f", driver {driver[0]['driver_version']}" if driver else ""
        return OK, f"{name} with {version}{told}"
    if driver and not (built.cuda or built.hip):
        what = f"nvidia-smi finds {len(driver)} GPUs, but {name} was built without CUDA"
        return PROBLEM, f"{what}; install torch with CUDA (pytorch.org/get-started)"
    if driver and facts.variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return WARNING, f"{name}: CUDA_VISIBLE_DEVICES hides every GPU; unset it"
    if driver:
        what = f"nvidia-smi finds {len(driver)} GPUs, but {name} (CUDA {built.cuda}) can use none"
        what += f" ({facts.cuda_error})" if facts.cuda_error else ""
        driver_version = driver[0]["driver_version"]
        return PROBLEM, f"{what}; the driver {driver_version} may be too old for it: update the driver"
    if facts.smi[1] and (built.cuda or built.hip):
        says = f"{name} can use no GPU ({facts.cuda_error}); {facts.smi[1]}"
        return PROBLEM, f"{says}; {_driver_remedy(facts)}"
    if facts.cuda_error:
        return PROBLEM, f"{name} can use no GPU ({facts.cuda_error}); update the driver"
    if built.hip:
        what = f"{name} with ROCm {built.hip} sees no GPU, so ranks run on the CPU"
        hiding = next((each for each in OF_ROCM if facts.variables.get(each) in ("", "-1")), "")
        return WARNING, f"{what}; " + (f"{hiding} hides every GPU: unset it" if hiding else SEEN_BY_ROCM)
    return WARNING, f"{name}: no GPU, so ranks run on the CPU, which is for trying out"


def _driver_remedy(facts: Facts) -> str:
    """Say what helps where nvidia-smi fails."""
    if "mismatch" in facts.smi[1]:
        return "restart the machine: the driver was updated while it ran"
    return "restart the machine, or install its driver anew"


def nccl(facts: Facts) -> Status:
    built = facts.torch
    if not built.has_gloo:
        return PROBLEM, "torch has no gloo, by which ranks are controlled; install torch from pytorch.org"
    if facts.platform == "win32":
        return PROBLEM, "torch has no NCCL under Windows: run ComfyUI under Linux or WSL2"
    if len(facts.gpus) > 1 and not built.nccl:
        return PROBLEM, "torch has no NCCL, which joins GPUs; install torch with CUDA from pytorch.org"
    if built.hip and built.nccl:
        return OK, f"{built.nccl}, which is NCCL for AMD's GPUs, gloo"
    return OK, f"NCCL {built.nccl or 'absent (not needed without GPUs)'}, gloo"


def gpus(facts: Facts) -> Iterator[Status]:
    for gpu in facts.gpus:
        kind = gpu.arch or "compute capability " + ".".join(map(str, gpu.capability))
        text = f"GPU {gpu.index}: {gpu.name}, {gb(gpu.memory)}, {kind}"
        taken = gpu.memory - gpu.free
        if gpu.index not in facts.usable:
            archs = " ".join(facts.torch.archs)
            remedy = "install another torch, or list the other GPUs in gpus of Parallel Config"
            remedy += f" (the doctor: {facts.command_on(facts.usable)})" if facts.usable else ""
            yield PROBLEM, f"{text}, for which this torch has no kernels ({archs}); {remedy}"
        elif gpu.capability < BF16 and not facts.torch.hip:
            yield WARNING, f"{text}, too old for fast bf16: fp16 where a model allows it, else slow"
        elif taken > OTHERS * gpu.memory:
            yield WARNING, f"{text}; {gb(taken)} are taken by others: close what you do not need"
        else:
            yield OK, text
    if len(facts.gpus) == 1:
        yield WARNING, "one GPU: parallel methods need two or more; ComfyUI's own nodes are as fast"
    if len({gpu.name for gpu in facts.gpus}) > 1:
        unequal = "PipeFusion's patches, cfg_degree's prompts and shard_weights stay equal"
        yield WARNING, f"the GPUs differ: auto gives each a share by speed and memory, but {unequal}"


def peers(facts: Facts) -> Status:
    count = len(facts.gpus)
    if count < 2:
        return OK, "not asked: fewer than two GPUs"
    if facts.way:
        what = "GPUs failed to reach each other's memory when they were measured"
        return WARNING, f"{what}, and ranks start with {facts.way} since then; --full measures them again"
    lacking = [f"{a}-{b}" for a in range(count) for b in range(a + 1, count) if not facts.peers[a][b]]
    if not lacking:
        return OK, "every GPU reaches the memory of every other one (peer access)"
    what = f"no peer access between GPUs {', '.join(lacking)}, which then send through host memory"
    return WARNING, f"{what}: prefer CFG and PipeFusion, which send least, to Ulysses, ring and TP"


def modes(facts: Facts) -> Iterator[Status]:
    if facts.torch.hip and facts.gpus:
        known = "known by ROCm are the GPUs, their kernels in torch, peer access and copies"
        yield WARNING, f"{known}; {UNKNOWN_OF_AMD}; run it with --full --json doctor.json, and report it"
    if facts.smi[1]:
        remedy = "" if facts.gpus else f"; {_driver_remedy(facts)}"
        yield WARNING, f"modes and PCIe lanes are unknown: {facts.smi[1]}{remedy}"
    for gpu in facts.visible_driver:
        where = f"GPU {gpu['index']}"
        if "exclusive" in gpu["compute_mode"].lower():
            remedy = f"sudo nvidia-smi -i {gpu['index']} -c DEFAULT"
            yield PROBLEM, f"{where} is exclusive, so ComfyUI and a rank cannot share it; run {remedy}"
        if gpu["mig.mode.current"] == "Enabled":
            yield PROBLEM, f"{where} is cut by MIG, between whose parts NCCL cannot send; switch MIG off"
        width, most = gpu["pcie.link.width.current"], gpu["pcie.link.width.max"]
        if width.isdecimal() and most.isdecimal() and int(width) < int(most):
            yield _lanes(where, width=int(width), most=int(most), count=len(facts.driver))
    if facts.driver:
        yield OK, "compute modes, MIG and PCIe lanes were looked at"


def _lanes(where: str, width: int, most: int, count: int) -> Status:
    """Judge a GPU that has fewer PCIe lanes than it can use, among ``count`` GPUs."""
    text = f"{where} has {width} of {most} PCIe lanes"
    if count > 1 and 2 * width >= most:
        return OK, f"{text}, as usual on boards that share lanes among GPUs"
    return WARNING, f"{text}: see to its slot and riser"


def shared_memory(facts: Facts) -> Status:
    size = facts.shared_memory
    if size is None:
        return OK, "there is no /dev/shm on this system"
    text = f"/dev/shm has {size / (1 << 20):.0f} MB"
    if len(facts.gpus) < 2:
        return OK, text
    free = facts.free_shared_memory
    if size >= MIN_SHARED_MEMORY and free < MIN_SHARED_MEMORY // 4:
        remedy = "remove /dev/shm/nccl-* that no process uses"
        return WARNING, f"{text}, {free / (1 << 20):.0f} MB of them free, too little for NCCL; {remedy}"
    if size >= MIN_SHARED_MEMORY:
        return OK, text
    direct = all(all(row) for row in facts.peers)
    what = "" if direct else ", through which GPUs without peer access send"
    remedy = (
        "start a container with --shm-size=8g or --ipc=host; where that cannot be, method auto and --full"
    )
    # NCCL 2.24 and later takes host memory elsewhere where CUDA lets it
    return WARNING, f"{text}, too little for some NCCL{what}; {remedy} find a way that works, perhaps slower"


def disks(facts: Facts) -> Iterator[Status]:
    for name, free in facts.disks.items():
        if name in facts.unwritable:
            yield PROBLEM, f"the {name} cannot be written; set TMPDIR or XDG_CACHE_HOME to another one"
        elif free < DISK:
            yield WARNING, f"the {name} has {gb(free)} free; make room, or set TMPDIR to another one"
        else:
            yield OK, f"the {name} has {gb(free)} free"


def host(facts: Facts) -> Status:
    text = f"{gb(facts.host_memory)} of host memory are free, {facts.cores} cores"
    if facts.host_memory < HOST_MEMORY:
        return WARNING, f"{text}; {more_memory()}: files of weights are read through it"
    if facts.cores < len(facts.gpus):
        return WARNING, f"{text}, fewer than GPUs: each rank needs a core of its own"
    return OK, text


def limits(facts: Facts) -> Status:
    if facts.loopback:
        return PROBLEM, f"nothing can listen on 127.0.0.1 ({facts.loopback}), where ranks find each other"
    if facts.open_files is not None and 0 <= facts.open_files < OPEN_FILES:
        return WARNING, f"a process may open {facts.open_files} files; raise that: ulimit -n 65536"
    if facts.locked_memory is not None and 0 <= facts.locked_memory < LOCKED_MEMORY:
        return WARNING, (
            f"a process may lock {facts.locked_memory >> 10} kB of memory, too few for InfiniBand; raise "
            f"that: ulimit -l unlimited (systemd: LimitMEMLOCK=infinity, Docker: --ulimit memlock=-1)"
        )
    return OK, "sockets on loopback, open files, locked memory"


def variables(facts: Facts) -> Iterator[Status]:
    for name, (fine, what) in VARIABLES.items():
        value = facts.variables.get(name, "")
        if value and value not in fine:
            yield WARNING, f"{name} is {value}: {what}"
    yield OK, f"environment: {' '.join(facts.variables) or 'nothing that ranks would read'}"


def versions(facts: Facts) -> Status:
    _ = facts.topology  # only for who reads the report
    about = ", ".join(f"{name} {value}" for name, value in facts.build.items() if value)
    return OK, about


#: Name -> check, in the order in which they are reported.
CHECKS: dict[str, Callable[[Facts], Status | Iterable[Status]]] = {
    "versions": versions,
    "Python": python,
    "packages": packages,
    "wheels": wheels,
    "CUDA": cuda,
    "NCCL": nccl,
    "GPUs": gpus,
    "peer access": peers,
    "GPU modes": modes,
    "/dev/shm": shared_memory,
    "disk": disks,
    "host": host,
    "limits": limits,
    "environment": variables,
    "copies": copies,  # last: a copy that hangs takes a minute and more
}


def quick(facts: Facts) -> Iterator[Finding]:
    """Run every quick check."""
    for name, check in CHECKS.items():
        yield from findings(name, check, facts)
