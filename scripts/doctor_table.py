"""The table that ends scripts/doctor.py --full: everything that was timed, in seconds a step."""

from collections.abc import Iterable

from doctor_findings import Finding

HEADER = ["check", "model", "method", "s a step", "x 1 rank", "of ceiling"]
#: Checks whose seconds are those of a step: of the mid-size Flux, of models that they name before the method,
#: of files of a small Flux.
OF_FLUX = ("speed", "overhead", "compiled", "kernels", "overhead compiled")
OF_SHAPES = ("shapes",)
OF_FILES = ("quantized", "dequantized once")


def rows(findings: Iterable[Finding]) -> list[list[str]]:
    """Return a row of HEADER for each finding with seconds a step, in the order of the findings."""
    checks = (*OF_FLUX, *OF_SHAPES, *OF_FILES)
    return [_row(each) for each in findings if each.check in checks and "seconds" in each.values]


def _row(finding: Finding) -> list[str]:
    values = finding.values
    names = (values.get(key) for key in ("method", "kernel", "matmul"))
    method = next(filter(None, names), "one rank")
    model = "flux-dev"
    if finding.check in OF_SHAPES:
        model, _, method = method.rpartition(", ")
    elif finding.check in OF_FILES:
        model = f"small Flux, {values['kind']}"
    if ratio := values.get("ratio"):
        method = f"one rank, {ratio['median']:.3f} x plain loop"
    seconds = f"{values['seconds']:.4f}"
    return [
        finding.check,
        model,
        method,
        seconds,
        *(_times(values, key) for key in ("speedup", "of_ceiling")),
    ]


def _times(values: dict, key: str) -> str:
    return f"{values[key]:.2f}" if key in values else ""


def show(findings: Iterable[Finding]):
    """Print the table, where anything was timed. Raises ImportError without benchmarks."""
    timed = rows(findings)
    if timed:
        import report  # of benchmarks

        print()
        report.table(HEADER, timed)
        print()
