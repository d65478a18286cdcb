"""What scripts/doctor.py --full says of links between ranks, by the probe of auto."""

from doctor_findings import OK, PROBLEM, WARNING, Finding, Found
from doctor_hangs import SLOW_START, SMI_SECONDS
from doctor_lab import Lab
from doctor_slow_copies import SLOW_LINK

from backend.client.auto.driver_query import driver_says
from backend.client.auto.probe_process import FAILED, UnmeasuredError, hang_remedy
from backend.client.auto.probe_process import SLOW_START as OF_QUEUES


def links(lab: Lab) -> Found:
    """Rates and links, by the probe of auto."""
    try:
        machine = lab.machine()
    except UnmeasuredError as error:
        remedy = SLOW_START if error.remedy == OF_QUEUES else error.remedy or "see the problems above"
        text = f"ranks could not measure this machine ({error.why}); {remedy}"
        shown = driver_says(["nvidia-smi"], SMI_SECONDS)
        yield Finding("links", PROBLEM, text, {"log": _logs() or error.log, "nvidia-smi": shown})
        return
    rates = f"{machine.gemm / 1e12:.2f} TFLOP/s, attention {machine.attention / 1e12:.2f} TFLOP/s"
    text = f"{lab.ranks} ranks on {machine.name}: {rates}, memory {machine.bandwidth / 1e9:.0f} GB/s"
    text += f", from host memory {machine.host_link / 1e9:.1f} GB/s"
    yield Finding("links", OK, text, machine.as_dict())
    if lab.ranks == 1:
        return
    if machine.line:
        yield Finding("links", WARNING if machine.is_disturbed else OK, machine.line)
    if machine.links:
        text = f"{machine.links} {hang_remedy(lab.device)}."
        yield Finding("links", WARNING, text, {"log": _logs()})
    text = f"to a neighbour {machine.p2p / 1e9:.2f} GB/s, rings of {_groups(machine.rings)} GB/s"
    text += f", all-to-all among {_groups(machine.all_to_all)} GB/s, latency {machine.latency * 1e6:.0f} us"
    if lab.device == "cuda" and min([machine.p2p, *machine.rings.values()]) < SLOW_LINK:
        remedy = "prefer CFG and PipeFusion, and see to peer access, /dev/shm and PCIe lanes above"
        yield Finding("links", WARNING, f"{text}: slow for GPUs; {remedy}")
    else:
        yield Finding("links", OK, text)


def _logs() -> str:
    """Return the end of what ranks printed in each try that failed, also in those before one that worked."""
    return "\n\n".join(f"{each.why}:\n{each.log}" for each in FAILED)


def _groups(rates: dict[int, float]) -> str:
    """Write the rates of groups of so many ranks, in GB/s."""
    return ", ".join(f"{size} ranks {rate / 1e9:.2f}" for size, rate in rates.items())
