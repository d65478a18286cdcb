"""A long fuzz of rank 0's frame decoder and checks, guided by coverage: a mutated frame that reaches a new
pair of lines is mutated further.

    python scripts/fuzz_protocol.py --frames 1000000 [--seed N] [--minutes M] [--crashes FOLDER]

Frames that raise what would end rank 0, or that take seconds or hundreds of megabytes, are written to FOLDER
with their traceback; then the exit status is 1. ``--replay FILE`` tries one of them again.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "tests/support")) if path not in sys.path]
from fuzz_frames import Mutator, seeds
from fuzzing import Rank0, TooMuch
from tiny import golden_request, write_checkpoint

#: Files of backend/ whose lines are counted.
WATCHED = (
    *("protocol/messages", "protocol/framing", "protocol/tensor_body"),
    *("config", "rank/leader", "rank/worker"),
    *("serving/server", "serving/argument_cache", "loading/lora/lora_keys", "loading/lora/lora_spellings"),
    *("sampling/validation", "sampling/tensor_validation", "sampling/guidance", "sampling/request"),
    *("sampling/model_call", "sampling/model_inputs", "sampling/describe_validation"),
)
#: Different crashes after which it ends.
MAX_CRASHES = 20
#: Seconds between two lines about how far it is.
REPORT_SECONDS = 30.0


class Coverage:
    """Pairs of lines of the WATCHED files that ran one after the other. sys.settrace is what every Python
    has."""

    def __init__(self):
        self.files = {str(ROOT / f"backend/{name}.py") for name in WATCHED}
        self.pairs: set[tuple[CodeType, int, int]] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what runs inside."""
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)

    def _called(self, frame, event, _):
        if frame.f_code.co_filename not in self.files:
            return None
        code, pairs, before = frame.f_code, self.pairs, 0

        def line(frame, event, _):
            nonlocal before
            if event == "line":
                pairs.add((code, before, frame.f_lineno))
                before = frame.f_lineno
            return line

        return line

    @property
    def lines(self) -> int:
        """How many different lines ran."""
        return len({(code.co_filename, line) for code, _, line in self.pairs})

    @property
    def possible(self) -> int:
        """How many lines the functions of these files have."""
        return sum(len(_lines(compile(Path(file).read_text(), file, "exec"))) for file in self.files)


def _lines(code: CodeType, top: bool = True) -> set[int]:
    """Those of the functions inside ``code``; what runs at the import is left out."""
    lines = set() if top else {line for _, _, line in code.co_lines() if line}
    for inner in (const for const in code.co_consts if isinstance(const, CodeType)):
        is_class = "__qualname__" in inner.co_names
        lines |= _lines(inner, is_class)
    return lines


def good_frames(rank0: Rank0) -> list[bytes]:
    """Frames of a client that wants nothing odd: of 16 tokens and 4 tokens of a prompt."""
    sample, _ = golden_request("euler_simple", rank0.model)
    tensors = dict(sample.tensors)
    for name, value in sample.tensors.items():
        if name in ("noise", "latent"):
            tensors[name] = value[..., :8, :8]
        elif value.ndim == 3:
            tensors[name] = value[:, :4]
    return seeds(rank0.model, rank0.path, replace(sample, tensors=tensors))


class Fuzz:
    """``count`` frames, what came of them, and the corpus that grows."""

    def __init__(self, rank0: Rank0, seed: int, crashes: Path):
        self.rank0, self.crashes, self.mutator = rank0, crashes, Mutator(seed)
        self.corpus, self.coverage = good_frames(rank0), Coverage()
        self.found, self.seen, self.started = Counter(), set(), time.monotonic()
        for frame in list(self.corpus):
            self._try(frame)

    def run(self, count: int, minutes: float):
        """Try ``count`` frames, fewer where the minutes are over or enough crashes are found."""
        reported = time.monotonic()
        for _ in range(count):
            choice = self.mutator.random.choice
            frame = self.mutator.mutate(choice(self.corpus), choice(self.corpus))
            before = self.reached
            self._try(frame)
            if self.reached > before:
                self.corpus.append(frame)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                print(self, flush=True)
            if time.monotonic() - self.started > 60 * minutes or len(self.seen) >= MAX_CRASHES:
                break

    @property
    def reached(self) -> int:
        return len(self.coverage.pairs)

    def _try(self, frame: bytes):
        try:
            with self.coverage.watching():
                self.found[self.rank0.take(frame)] += 1
        except (Exception, TooMuch) as error:
            self.found["crash"] += 1
            self._write(frame, error)

    def _write(self, frame: bytes, error: BaseException):
        """Keep a frame unless another one has failed at the same place."""
        place = (type(error).__name__, *(line[:2] for line in traceback.extract_tb(error.__traceback__)[-1:]))
        if place in self.seen:
            return
        self.seen.add(place)
        self.crashes.mkdir(parents=True, exist_ok=True)
        where = self.crashes / f"crash{len(self.seen)}"
        where.with_suffix(".frame").write_bytes(frame)
        where.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))
        print(f"{where}.frame: {type(error).__name__}: {error!s:.200}", flush=True)

    def __str__(self) -> str:
        count, seconds = sum(self.found.values()), time.monotonic() - self.started
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.found.most_common())
        return (
            f"{count} frames in {seconds:.0f} s ({count / seconds:.0f} a second): {kinds}; corpus "
            f"{len(self.corpus)}, {self.coverage.lines} of {self.coverage.possible} lines, {self.reached} "
            f"pairs"
        )


def main(arguments: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--crashes", type=Path, default=Path("crashes"), help="folder (default: crashes)")
    parser.add_argument("--replay", type=Path, help="try the frame in this file, and nothing else")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        rank0 = Rank0(str(write_checkpoint(Path(folder) / "flux-tiny.safetensors")))
        if options.replay:
            print(rank0.take(options.replay.read_bytes()))
            return 0
        with redirect_stderr(nowhere):  # tracebacks of refusals
            fuzz = Fuzz(rank0, options.seed, options.crashes)
            fuzz.run(options.frames, options.minutes)
    print(fuzz)
    return 1 if fuzz.seen else 0


if __name__ == "__main__":
    sys.exit(main())
