"""What to do next about what scripts/doctor.py --full has found, where the finding itself does not say."""

import re
from dataclasses import replace

from doctor_findings import OK, PROBLEM, WARNING, Finding
from doctor_limits import USUAL

from backend.quantization.dequantized_cache import CACHE_VARIABLE

REPORT = "report it, with the file of --json"
NOTHING = "nothing has to be done"
#: Words by which a finding says it itself, where they begin a word ("Connection reset by peer" says nothing).
SAID = (
    *("report it", "raise --minutes", "use --only", "close ", "set ", "install ", "prefer ", "see to "),
    *("links fails", "links failed", "(--ranks 2)", "clone ", "hung before", "IOMMU", "BIOS", NOTHING),
)
SAYS = re.compile("|".join(rf"(?<!\w){re.escape(words)}" for words in SAID))
ABOVE_USUAL = f"float32 is above {USUAL:g}, the most on CPUs; other kernels of GPUs may explain it: {REPORT}"
OTHER_METHOD = f"its images are wrong here: choose another method in Parallel Config, and {REPORT}"
#: Checks whose findings say it themselves, or that have nothing to do next, unless they fail.
SAYING = ("full", "links")
#: Check and status -> what to do.
NEXT = {
    ("one rank", PROBLEM): f"images of this GPU are off: update torch and the driver, then {REPORT}",
    ("methods", PROBLEM): OTHER_METHOD,
    ("speed", PROBLEM): OTHER_METHOD,
    ("fp8 and int8", PROBLEM): OTHER_METHOD,
    ("shapes", PROBLEM): OTHER_METHOD,
    ("speed", WARNING): "leave it to method auto, which counts the links, or choose another method",
    ("life", PROBLEM): f"restart ComfyUI after a cancel or a crash here, and {REPORT}",
    ("memory", WARNING): f"auto may choose plans that do not fit here: {REPORT}",
    ("compiled", PROBLEM): f"set compile of Parallel Config to off, and {REPORT}",
    ("compiled", WARNING): "set compile of Parallel Config to off",
    ("quantized", PROBLEM): f"set matmul of Load Parallel DiT to weight only for such files, and {REPORT}",
    ("quantized", WARNING): f"{NOTHING}: such files run weight only",
    ("dequantized once", WARNING): f"set {CACHE_VARIABLE}=0 where ComfyUI starts",
    ("kernels", PROBLEM): f"leave attention of Parallel Config on auto, and {REPORT}",
}


def advised(finding: Finding) -> Finding:
    """Return a warning or problem of --full with what to do next."""
    if finding.status == OK or SAYS.search(finding.text):
        return finding
    is_failure = "traceback" in finding.values
    if finding.check in SAYING and not is_failure:
        return finding
    what = REPORT if is_failure else NEXT.get((finding.check, finding.status), REPORT)
    return replace(finding, text=f"{finding.text}; {what}")
