"""scripts/gpu_copies.py, which times copies between GPUs, on GPUs that are not here."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import gpu_copies
import pytest
import torch
from gpu_copies import HOST

#: Bytes of a copy here, and of the least; the GPUs are as much slower than real ones.
BYTES, MIN_BYTES = 1 << 14, 1 << 10
#: Bytes/s of links that nothing else is said of, and of a GPU's own memory.
USUAL, OWN = 20e6, 1e7
#: What torch appends to CUDA's errors.
APPENDED = "\nCUDA kernel errors might be asynchronously reported at some other API call\nCompile with ..."


class OnPlace:
    """A tensor of a GPU, or of page-locked host memory."""

    def __init__(self, gpus: "Gpus", place, values: torch.Tensor):
        self.gpus, self.place, self.values = gpus, place, values
        self.nbytes = values.nbytes

    def __len__(self):
        return len(self.values)

    def __getitem__(self, part):
        return OnPlace(self.gpus, self.place, self.values[part])

    def __add__(self, number):
        return OnPlace(self.gpus, self.place, self.values + number)

    def zero_(self):
        self.values.zero_()

    def copy_(self, source, non_blocking=False):
        self.values.copy_(self.gpus.sent(source, self))

    def equal(self, other):
        assert self.place == other.place
        return self.values.equal(other.values)


class Event:
    """The time of a stream when it comes there, in milliseconds."""

    def __init__(self, gpus):
        self.gpus = gpus

    def record(self):
        self.gpu = self.gpus.current
        self.at = self.gpus.stream_time(self.gpu)

    def synchronize(self):
        self.gpus.now = max(self.gpus.now, self.at)

    def elapsed_time(self, end):
        assert self.gpu == end.gpu and end.at <= self.gpus.now  # its end has been waited for
        return 1e3 * (end.at - self.at)


class Gpus:
    """torch, on GPUs with a clock of their own for each stream. ``rates``: of links that are unlike USUAL;
    ``failing``: copies that raise, ``wrong``: those of which a byte gets lost, ``lost``: of which nothing
    arrives; ``free``: bytes of GPUs that are nearly full; ``closed``: GPUs that cannot be opened; ``peers``:
    how many others a GPU can reach; ``launch``: seconds until a copy begins where nothing runs."""

    int32 = torch.int32

    def __init__(
        self, rates=(), failing=(), wrong=(), free=(), closed=(), can_lock=True, lost=(), peers=99, launch=0.0
    ):
        self.rates, self.free = dict(rates), dict(free)
        self.failing, self.wrong, self.closed, self.can_lock = failing, wrong, closed, can_lock
        self.lost, self.peers, self.launch = lost, peers, launch
        self.reached: dict = {}
        self.now = 0.0
        self.current = 0
        self.streams: dict[int, float] = {}
        self.copied: list[tuple] = []
        self.cuda = SimpleNamespace(
            device=self.device,
            Event=lambda enable_timing: Event(self),
            synchronize=self.synchronize,
            mem_get_info=self.mem_get_info,
        )

    @contextmanager
    def device(self, gpu):
        before, self.current = self.current, gpu
        yield
        self.current = before

    def synchronize(self, gpu):
        self.now = max(self.now, self.streams.get(gpu, 0.0))

    def stream_time(self, gpu):
        return max(self.now, self.streams.get(gpu, 0.0))

    def mem_get_info(self, gpu):
        if gpu in self.closed:
            raise RuntimeError(f"CUDA error: CUDA-capable device(s) is/are busy or unavailable{APPENDED}")
        return self.free.get(gpu, 1 << 30), 1 << 30

    def arange(self, count, dtype, device):
        return OnPlace(self, int(device.removeprefix("cuda:")), torch.arange(count, dtype=dtype))

    def zeros_like(self, other):
        return OnPlace(self, other.place, torch.zeros_like(other.values))

    def empty(self, count, dtype, pin_memory):
        if not self.can_lock:
            raise RuntimeError(f"CUDA error: operation not supported{APPENDED}")
        self.locked_by = self.current
        return OnPlace(self, HOST, torch.zeros(count, dtype=dtype))

    def sent(self, source, target):
        """Have a stream copy, between two GPUs the source's; return what arrives."""
        way = source.place, target.place
        if way in self.failing:
            raise RuntimeError(f"CUDA error: uncorrectable NVLink error{APPENDED}")
        if HOST not in way and source.place != target.place:
            reached = self.reached.setdefault(source.place, set())
            if len(reached | {target.place}) > self.peers:
                raise RuntimeError(f"CUDA error: peer mapping resources exhausted{APPENDED}")
            reached.add(target.place)
        stream = target.place if source.place == HOST else source.place
        self.now += self.launch
        rate = self.rates.get(way, OWN if source.place == target.place else USUAL)
        self.streams[stream] = self.stream_time(stream) + source.nbytes / rate
        self.copied.append((*way, source.nbytes))
        if way in self.lost:
            return target.values.clone()
        values = source.values.clone()
        if way in self.wrong:
            values[-1] += 1
        return values


@pytest.fixture
def run(monkeypatch):
    """Run the program's measurement on such GPUs; return its rows."""

    def measure(gpus: Gpus, indices: list[int], seconds: float = 3.0) -> list[dict]:
        monkeypatch.setattr(gpu_copies, "torch", gpus)
        monkeypatch.setattr(gpu_copies, "time", SimpleNamespace(monotonic=lambda: gpus.now))
        monkeypatch.setattr(gpu_copies, "BYTES", BYTES)
        monkeypatch.setattr(gpu_copies, "MIN_BYTES", MIN_BYTES)
        rows: list[dict] = []
        gpu_copies.time_copies(indices, seconds, lambda **values: rows.append(values))
        return json.loads(json.dumps(rows))

    return measure


def rates_in(rows: list[dict]) -> dict[tuple, float]:
    """Source and target -> bytes/s."""
    found = {(row["source"], row["target"]): row["rate"] for row in rows if "rate" in row}
    assert len(found) == sum("rate" in row for row in rows)
    return found


def all_ways(indices: list[int]) -> set[tuple]:
    ends = [HOST, *indices]
    return {(source, target) for source in ends for target in ends if source != target}


@pytest.mark.parametrize("indices", [[0], [0, 1], [1, 3, 4], list(range(8))], ids=str)
def test_every_way_is_timed_by_its_own_bytes_and_milliseconds(run, indices):
    last = indices[-1]
    odd = {(HOST, last): 2e6, (last, HOST): 3e6, (last, indices[0]): 5e6}
    gpus = Gpus(rates=odd)
    rows = run(gpus, indices, seconds=60.0)
    expected = dict.fromkeys(all_ways(indices), USUAL) | {way: odd[way] for way in odd if len({*way}) > 1}
    assert rates_in(rows) == pytest.approx(expected)
    compared = {(row["source"], row["target"]): row["is_same"] for row in rows if "is_same" in row}
    assert compared == {way: True for way in expected if HOST not in way}
    assert gpus.locked_by == indices[0]  # no other GPU is opened for it
    # a usual copy takes 0.8 ms, so that three are timed as one, and others more than 2 ms
    timed = {way: gpus.copied.count((*way, BYTES)) for way in expected}
    assert timed == {way: 2 + (1 if way in odd else 3) * gpu_copies.TIMINGS for way in expected}


@pytest.mark.parametrize("rate, together", [(4e8, 44), (1e10, 64)], ids=["NVLink", "the most"])
def test_launches_are_no_part_of_fast_copies(run, rate, together):
    """A copy over NVLink takes a tenth of a millisecond."""
    gpus = Gpus(rates={(0, 1): rate}, launch=5e-6 if rate < 1e9 else 0.0)
    rows = run(gpus, [0, 1], seconds=60.0)
    assert rates_in(rows)[0, 1] == pytest.approx(rate, rel=0.01)
    assert gpus.copied.count((0, 1, BYTES)) == 2 + together * gpu_copies.TIMINGS


def test_the_median_of_timings_counts(run, monkeypatch):
    """A program that copies for a moment changes nothing."""
    gpus = Gpus()
    sent = gpus.sent

    def disturbed(source, target):
        arrived = sent(source, target)
        if gpus.copied.count((0, 1, BYTES)) == 3:
            gpus.streams[0] += 1.0
        return arrived

    monkeypatch.setattr(gpus, "sent", disturbed)
    monkeypatch.setattr(gpu_copies, "ENOUGH_SECONDS", 60.0)
    assert rates_in(run(gpus, [0, 1], seconds=60.0))[0, 1] == pytest.approx(USUAL)


def test_gpus_that_idled_are_warmed_up_first(run):
    gpus = Gpus()
    run(gpus, [0, 1])
    first = next(at for at, (source, target, _) in enumerate(gpus.copied) if source != target)
    for gpu in (0, 1):
        spent = sum(size / OWN for source, _, size in gpus.copied[:first] if source == gpu)
        assert spent == pytest.approx(gpu_copies.WARM_SECONDS, rel=0.01)


def test_pairs_are_in_an_order_in_which_every_gpu_comes_soon():
    for count in range(1, 10):
        copies = gpu_copies.in_order(list(range(count)))
        assert len(copies) == len({*copies}) and {*copies} == all_ways(list(range(count)))
        first = copies[2 * count : 3 * count]
        assert count == 1 or {gpu for pair in first for gpu in pair} == {*range(count)}
    assert gpu_copies.in_order([2, 5], with_host=False) == [(2, 5), (5, 2)]


def test_the_time_limit_holds_and_what_is_left_is_named(run):
    slow = {way: 1e5 for way in all_ways([0, 1, 2]) if HOST not in way}
    gpus = Gpus(rates=slow)
    rows = run(gpus, [0, 1, 2], seconds=2.0)
    one = BYTES / 1e5
    measured = rates_in(rows)
    left = {tuple(pair) for pair in rows[-2]["left"]}
    assert measured.keys() | left == all_ways([0, 1, 2]) and not measured.keys() & left
    assert left and any(HOST not in way for way in measured)
    assert 2.0 <= gpus.now < 2.0 + 3 * one
    # where a copy takes long, one timing of one copy is enough
    assert gpus.copied.count((0, 1, BYTES)) == 3
    assert measured[0, 1] == pytest.approx(1e5)


def test_a_full_gpu_is_named_and_a_fuller_one_sends_less(run):
    gpus = Gpus(free={1: MIN_BYTES, 2: 4 * BYTES})
    rows = run(gpus, [0, 1, 2], seconds=60.0)
    (full,) = [row for row in rows if "gpu" in row]
    assert full["gpu"] == 1 and "out of memory" in full["error"]
    assert rates_in(rows) == pytest.approx(dict.fromkeys(all_ways([0, 2]), USUAL))
    size = 4 * BYTES // gpu_copies.SHARE
    assert not [way for *way, copied in gpus.copied if 2 in way and copied > size]
    assert (0, 2, size) in gpus.copied and (HOST, 2, size) in gpus.copied and (0, HOST, BYTES) in gpus.copied


def test_a_gpu_that_cannot_be_opened_is_named_and_others_are_measured(run):
    rows = run(Gpus(closed=[0]), [0, 1], seconds=60.0)
    (closed,) = [row for row in rows if "gpu" in row]
    why = "CUDA error: CUDA-capable device(s) is/are busy or unavailable"  # without what torch appends
    assert closed == {"gpu": 0, "error": why}
    assert rates_in(rows).keys() == {(HOST, 1), (1, HOST)}
    alone = Gpus(closed=[0])
    assert [*map(sorted, run(alone, [0]))] == [["doing"], ["error", "gpu"], ["done"]] and not alone.copied


def test_bytes_that_get_lost_are_seen(run):
    rows = run(Gpus(wrong=[(1, 0)]), [0, 1], seconds=60.0)
    wrong = [(row["source"], row["target"]) for row in rows if not row.get("is_same", True)]
    assert wrong == [(1, 0)]


@pytest.mark.parametrize("indices", [[0, 1], list(range(4)), list(range(8))], ids=str)
def test_copies_of_which_nothing_arrives_are_seen(run, indices):
    """Though the host has written the numbers of each GPU's neighbour there before."""
    between = {way for way in all_ways(indices) if HOST not in way}
    rows = run(Gpus(lost=between), indices, seconds=60.0)
    assert {(row["source"], row["target"]) for row in rows if row.get("is_same") is False} == between


def test_a_ninth_peer_ends_nothing(run):
    """Healthy GPUs, of which CUDA lets each reach eight."""
    rows = run(Gpus(peers=8), list(range(10)), seconds=60.0)
    refused = {(row["source"], row["target"]) for row in rows if "unmeasured" in row}
    between = {way for way in all_ways(list(range(10))) if HOST not in way}
    assert len(refused) == 10 and rates_in(rows).keys() >= between - refused
    assert {row["unmeasured"] for row in rows if "unmeasured" in row} == {
        "CUDA error: peer mapping resources exhausted"
    }
    assert not [row for row in rows if "error" in row] and rows[-1] == {"done": True}


def test_what_fails_ends_all_further_copies(run):
    """An error of CUDA stays in its process."""
    rows = run(Gpus(failing=[(1, 2)]), [0, 1, 2], seconds=60.0)
    assert rows[-3:] == [
        {"doing": "while copying from GPU 1 to GPU 2"},
        {"error": "CUDA error: uncorrectable NVLink error"},
        {"done": True},
    ]
    assert (0, 1) in rates_in(rows) and (1, 2) not in rates_in(rows)


def test_without_page_locked_memory_pairs_are_measured(run):
    rows = run(Gpus(can_lock=False), [0, 1], seconds=60.0)
    (unlocked,) = [row["unlocked"] for row in rows if "unlocked" in row]
    assert unlocked == "CUDA error: operation not supported"
    assert rates_in(rows).keys() == {(0, 1), (1, 0)}


def test_a_line_is_there_whatever_comes_next(tmp_path):
    """The process may be killed while it copies."""
    path = tmp_path / "out"
    with path.open("w") as out:
        gpu_copies._writes_to(out)(doing="while copying")
        assert path.read_text() == '{"doing": "while copying"}\n'
