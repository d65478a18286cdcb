"""Which GPUs the installed torch has kernels for."""

import torch

#: Compute capability of an NVIDIA GPU: major, minor.
Capability = tuple[int, int]


def has_kernels(index: int) -> bool:
    """Return whether torch runs on the GPU that it numbers ``index``: an old card that drives a screen, or a
    processor's own GPU, it may see and have no kernel for."""
    built = tuple(torch.cuda.get_arch_list())
    if not built:  # it tells of none
        return True
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return properties.gcnArchName.partition(":")[0] in built
    return has_kernels_for((properties.major, properties.minor), built)


def has_kernels_for(capability: Capability, archs: tuple[str, ...]) -> bool:
    """Return whether a torch built for ``archs`` runs on CUDA GPUs of a compute capability: a binary for x.y
    runs on x.z >= x.y; PTX (compute_) of x.y is compiled for anything newer."""
    for arch in archs:
        kind, _, digits = arch.partition("_")
        digits = "".join(filter(str.isdigit, digits))
        if kind not in ("sm", "compute") or len(digits) < 2:
            return True  # ROCm's gfx names: unknown here
        built = (int(digits[:-1]), int(digits[-1]))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False
