"""A benchmark's numbers as a table on the terminal, JSON, and a bar chart, in output/benchmarks/."""

import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from PIL import Image, ImageDraw

#: Where reports go unless --out says otherwise.
OUT = Path(__file__).resolve().parents[1] / "output" / "benchmarks"
ROW, LEFT, WIDTH = 26, 300, 900
INK, BAR, GOAL = "#222222", "#4477aa", "#cc3311"


@dataclass(frozen=True)
class Bar:
    """One bar of the chart; low..high is the range over rounds, goal a mark to reach or None."""

    label: str
    median: float
    low: float
    high: float
    goal: float | None = None


def shown(spread: dict, digits: int = 2) -> str:
    """A spread as "median (low..high)"."""
    return "{:.{d}f} ({:.{d}f}..{:.{d}f})".format(spread["median"], spread["low"], spread["high"], d=digits)


def outcome(met: bool | None) -> str:
    return {True: "met", False: "missed", None: ""}[met]


def table(header: list[str], rows: list[list[str]]):
    """Print rows in aligned columns."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, ["-" * width for width in widths], *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def write(name: str, title: str, unit: str, bars: list[Bar], **facts):
    """Write NAME.json with ``facts`` (of which ``options`` holds the folder) and the versions, and NAME.png
    with the bars; say where."""
    out = Path(facts["options"]["out"])
    out.mkdir(parents=True, exist_ok=True)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": version("diffusers"),  # importing it takes what runtime/lean_imports.py leaves out
        "cores": psutil.cpu_count(),
    }
    (out / f"{name}.json").write_text(
        json.dumps({"benchmark": name, "versions": versions, **facts}, indent=1)
    )
    chart(out / f"{name}.png", f"{title} ({unit})", bars)
    print(f"wrote {out / name}.json and .png")


def chart(path: Path, title: str, bars: list[Bar]):
    """Draw the bars into a PNG file."""
    image = Image.new("RGB", (LEFT + WIDTH + 80, ROW * (len(bars) + 2)), "white")
    draw = ImageDraw.Draw(image)
    draw.text((10, 8), title, INK)
    most = max(max(bar.high, bar.goal or 0) for bar in bars) or 1.0

    def x(value):
        return LEFT + round(WIDTH * max(value, 0.0) / most)

    for row, bar in enumerate(bars):
        top = ROW * (row + 1) + 6
        middle = top + ROW // 2 - 4
        draw.text((10, top), bar.label, INK)
        draw.rectangle((LEFT, top, x(bar.median), top + ROW - 8), BAR)
        draw.line((x(bar.low), middle, x(bar.high), middle), INK, 2)
        if bar.goal is not None:
            draw.line((x(bar.goal), top - 3, x(bar.goal), top + ROW - 5), GOAL, 3)
        draw.text((x(bar.high) + 8, top), f"{bar.median:.3g}", INK)
    image.save(path)
