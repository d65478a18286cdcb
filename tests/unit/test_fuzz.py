"""A seeded fuzz of rank 0's decoder and checks; scripts/fuzz_protocol.py is the long one, guided by
coverage."""

from collections import Counter

import fuzz_protocol
import fuzzing
import pytest
import torch
from fuzz_frames import Mutator
from fuzzing import Rank0, TooMuch
from tiny import write_checkpoint

#: Seeds of the fuzz, and the frames of each: 20,000 together.
SEEDS, FRAMES = range(11, 21), 2_000


@pytest.fixture(scope="module")
def rank0(folder):
    return Rank0(str(write_checkpoint(folder / "flux-tiny.safetensors")))


@pytest.mark.parametrize("seed", SEEDS)
def test_frames_are_refused_or_accepted(rank0, seed):
    """Nothing else: no error but a refusal, none that takes seconds or hundreds of megabytes."""
    good, mutator, found = fuzz_protocol.good_frames(rank0), Mutator(seed), Counter()
    for frame in good:
        rank0.take(frame)
    for number in range(FRAMES):
        frame = mutator.mutate(good[number % len(good)], mutator.random.choice(good))
        found[rank0.take(frame)] += 1
    assert sum(found.values()) == FRAMES
    assert min(found[kind] for kind in ("no frame", "refused", "answered", "accepted")) > FRAMES // 100


def test_the_good_frames_are_good(rank0):
    found = Counter(rank0.take(frame) for frame in fuzz_protocol.good_frames(rank0))
    assert found["accepted"] >= 6 and not found["no frame"]


@pytest.mark.parametrize("error", [KeyError("planted"), OverflowError("planted")])
def test_an_error_outside_of_the_checks_is_found(rank0, tmp_path, monkeypatch, capsys, error):
    """The long fuzz says so, and keeps the frame."""

    def fails(message):
        raise error

    monkeypatch.setattr(fuzz_protocol, "Rank0", lambda path: rank0)
    arguments = ["--frames", "30", "--crashes", str(tmp_path / "crashes")]
    assert fuzz_protocol.main(arguments) == 0 and not (tmp_path / "crashes").exists()
    monkeypatch.setattr(rank0, "_follow", fails)
    assert fuzz_protocol.main(arguments) == 1
    assert "planted" in (tmp_path / "crashes/crash1.txt").read_text()
    with pytest.raises(type(error), match="planted"):
        fuzz_protocol.main(["--replay", str(tmp_path / "crashes/crash1.frame")])


def test_what_costs_too_much_is_found(rank0, monkeypatch):
    """Also inside the checks, which turn every other error into a refusal."""
    monkeypatch.setattr(fuzzing, "SECONDS", 0.05)
    sample = fuzz_protocol.good_frames(rank0)[0]

    def slow(message):
        while True:
            pass

    with monkeypatch.context() as patch, pytest.raises(TooMuch, match="more than 0.05 s"):
        patch.setattr(rank0.engine, "check_sample", slow)
        rank0.take(sample)

    def large(message):
        raise ValueError(torch.ones(2 * fuzzing.BYTES // 4).sum())

    monkeypatch.setattr(fuzzing, "SECONDS", 5.0)
    with monkeypatch.context() as patch, pytest.raises(TooMuch, match="bytes for a frame"):
        patch.setattr(rank0.engine, "check_sample", large)
        rank0.take(sample)


def test_the_corpus_grows_where_new_lines_are_reached(rank0, tmp_path):
    fuzz = fuzz_protocol.Fuzz(rank0, 3, tmp_path)
    corpus, lines, pairs = len(fuzz.corpus), fuzz.coverage.lines, fuzz.reached
    assert 0 < lines < fuzz.coverage.possible
    fuzz.run(400, 5)
    assert len(fuzz.corpus) > corpus and fuzz.coverage.lines > lines and fuzz.reached > pairs
    assert not fuzz.seen
