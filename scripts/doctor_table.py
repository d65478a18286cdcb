"""The table that ends scripts/doctor.py --full: the seconds a step of each method, kernel and file, and of
what it is compared with. Not in it: links, life, head sizes of kernels, seconds of compiling."""

from collections.abc import Iterable

from doctor_findings import OK, Finding

HEADER = ["check", "model", "method", "s a step", "x 1 rank", "of ceiling", "status"]
#: Checks whose seconds are those of a step: of the mid-size Flux, of models that they name before the method,
#: of files of a small Flux.
OF_FLUX = ("speed", "overhead", "compiled", "kernels", "overhead compiled")
OF_SHAPES = ("fp8 and int8", "shapes")
OF_FILES = ("quantized", "dequantized once")


def rows(findings: Iterable[Finding]) -> list[list[str]]:
    """Return a row of HEADER for each finding with seconds a step, in the order of the findings, each after
    its baseline, which is there once. The status of a finding is "" where it is ok. Of "overhead" the ratio
    is the method, and its seconds, of whole requests, are left out."""
    checks = (*OF_FLUX, *OF_SHAPES, *OF_FILES)
    listed: list[list[str]] = []
    for each in findings:
        if each.check not in checks or "seconds" not in each.values:
            continue
        listed += [row for row in _baselines(each) if row not in listed]
        listed.append(_row(each))
    return listed


def _baselines(finding: Finding) -> list[list[str]]:
    """Return the row of what a finding has the seconds of besides its own, if any."""
    check, values = finding.check, finding.values
    if "eager" in values:
        named = "flux-dev", values["method"].removesuffix(", compiled") + ", eager", values["eager"]
    elif check in OF_FILES and "bf16" in values:
        named = "small Flux, bf16", "one rank", values["bf16"]
    elif "each_pass" in values:
        named = f"small Flux, {values['kind']}", "dequantized each time", values["each_pass"]
    else:
        return []
    model, method, seconds = named
    return [[check, model, method, f"{seconds:.4f}", "", "", ""]]


def _row(finding: Finding) -> list[str]:
    values = finding.values
    names = (values.get(key) for key in ("method", "kernel", "matmul"))
    method = next(filter(None, names), "one rank")
    model = "flux-dev"
    if finding.check in OF_SHAPES:
        model, _, method = method.rpartition(", ")
    elif finding.check in OF_FILES:
        model = f"small Flux, {values['kind']}"
    seconds = f"{values['seconds']:.4f}"
    if ratio := values.get("ratio"):
        method = f"{ratio['median']:.3f} x plain loop"
        seconds = ""
    if latents := values.get("latents"):
        method = f"{method}, {latents} latents"
    return [
        finding.check,
        model,
        method,
        seconds,
        *(f"{values[key]:.2f}" if key in values else "" for key in ("speedup", "of_ceiling")),
        "" if finding.status == OK else finding.status,
    ]


def show(findings: Iterable[Finding]):
    """Print the table, where anything was timed. Raises ImportError without benchmarks."""
    timed = rows(findings)
    if timed:
        import report  # of benchmarks

        print()
        report.table(HEADER, timed)
        print()
