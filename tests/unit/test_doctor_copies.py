"""What scripts/doctor.py says of copies between GPUs and host memory, and how it has them measured."""

import json
from dataclasses import replace

import doctor_checks
import doctor_copies
import gpu_copies
import pytest
from doctor_copies import Copies, Copy, measured
from doctor_facts import Facts
from doctor_findings import OK, PROBLEM, WARNING
from doctor_processes import Ended
from doctor_stubs import ENDED, GPU, copies, machine, said

GB = 10**9


def box_pairs(count: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(count) for b in range(a + 1, count)]


def box(count: int, pairs=(), host=(), peers: bool = True, **changes) -> Facts:
    """A machine of so many equal GPUs, all of whose rates are 20 GB/s but those of ``pairs`` and ``host``."""
    indices = range(count)
    all_pairs = dict.fromkeys(box_pairs(count), 20.0) | dict(pairs)
    rates = copies(all_pairs, dict.fromkeys(indices, 20.0) | dict(host))
    return machine(
        gpus=[replace(GPU, index=index) for index in indices],
        peers=[[a == b or peers for b in indices] for a in indices],
        **dict(copies=rates) | changes,
    )


def warnings(facts: Facts) -> list[str]:
    found = said(facts, "copies")
    assert {status for status, _ in found} <= {OK, WARNING}
    return [text for status, text in found if status == WARNING]


def test_rates_and_ways_are_said():
    facts = box(3, pairs={(0, 2): 12.0}, host={0: 25.0})
    facts.peers[0][1] = facts.peers[1][0] = False
    assert said(facts, "copies") == [
        (OK, "from host memory 20.0 to 25.0 GB/s, to it 20.0 to 25.0 GB/s"),
        (OK, "between GPUs by peer access 12.0 to 20.0 GB/s (least 0-2)"),
        (OK, "between GPUs through host memory 20.0 GB/s"),
    ]


@pytest.mark.parametrize("there, back", [(24e9, 9e9), (9e9, 24e9)])
def test_the_slower_direction_of_a_pair_counts(there, back):
    one_way = Copies((Copy(0, 1, there), Copy(1, 0, back)))
    assert said(machine(copies=one_way), "copies") == [(OK, "between GPUs by peer access 9.0 GB/s")]


@pytest.mark.parametrize(
    "rate, carries",
    [(0.8, "one lane of PCIe 3"), (1.7, "one lane of PCIe 4"), (3.2, "four lanes of PCIe 3"), (6.4, "")],
)
def test_a_rate_of_few_lanes_is_a_bad_slot(rate, carries):
    """Also where others are no faster, and with one GPU."""
    for facts in (box(1, host={0: rate}), box(2, pairs={(0, 1): 9.0}, host={0: rate, 1: rate})):
        found = warnings(facts)
        assert len(found) == (len(facts.gpus) if carries else 0)
        for gpu, text in enumerate(found):
            assert text.startswith(f"GPU {gpu} copies {rate} GB/s from host memory and {rate} GB/s to it")
            assert f"no more than {carries} can carry; see to its slot and riser" in text


def test_one_direction_of_few_lanes_is_enough():
    rates = (Copy("host", 0, 24e9), Copy(0, "host", 0.8e9))
    found = said(box(1, copies=Copies(rates, left=((0, 1),))), "copies")
    assert "24.0 GB/s from host memory and 0.8 GB/s to it, no more than one lane of PCIe 3" in found[0][1]
    assert "GPU 0 to GPU 1; --full" in found[-1][1]


def test_a_card_far_slower_than_others_of_its_kind_explains_its_pairs():
    pairs = {(0, 2): 6.4, (1, 2): 6.4, (2, 3): 6.4}
    facts = box(4, pairs=pairs, host={2: 6.5})
    (text,) = warnings(facts)
    assert "GPU 2 copies 6.5 GB/s" in text and "others of its kind (20.0 GB/s), by fewer lanes" in text
    assert "see to its slot" in text
    assert warnings(box(2, host={0: 7.9})) and not warnings(box(2, host={0: 8.1}))
    facts.gpus[2] = replace(GPU, index=2, name="T4")  # of an older PCIe
    assert not warnings(facts)


def test_half_the_lanes_are_usual():
    assert not warnings(box(4, pairs={(0, 1): 10.0}, host={0: 10.0, 1: 10.0}))


def test_peer_access_that_is_slower_than_the_host_is_named():
    (text,) = warnings(box(4, pairs={(1, 3): 6.9}))  # a copy to host memory and one from there: 10 GB/s
    assert text.startswith("GPUs 1-3 (6.9 GB/s) reach each other's memory, but") and "ACS" in text
    assert warnings(box(2, pairs={(0, 1): 6.9})) and not warnings(box(2, pairs={(0, 1): 7.1}))
    assert not warnings(box(2, pairs={(0, 1): 6.9}, peers=False))


def test_a_pair_far_slower_than_the_others_is_named():
    facts = box(4, pairs=dict.fromkeys(box_pairs(4), 200.0) | {(0, 3): 20.0})
    (text,) = warnings(facts)
    assert text.startswith("GPUs 0-3 (20.0 GB/s) copy far less than others") and "bridge" in text


def test_a_card_far_slower_to_all_others_is_named():
    facts = box(4, pairs={pair: 20.0 if 3 in pair else 200.0 for pair in box_pairs(4)})
    (text,) = warnings(facts)
    assert text.startswith("GPU 3 and every other one (20.0 GB/s) copy far less than others")


@pytest.mark.parametrize("count, bridged", [(3, [(0, 1)]), (4, [(0, 1), (2, 3)]), (8, [(0, 1)])])
def test_bridges_between_some_are_no_fault(count, bridged):
    assert not warnings(box(count, pairs=dict.fromkeys(bridged, 200.0)))


def test_pairs_without_peer_access_are_not_held_to_those_with_it():
    facts = box(4, pairs=dict.fromkeys(box_pairs(4), 200.0) | {(1, 3): 15.0, (2, 3): 15.0})
    facts.peers[1][3] = facts.peers[2][3] = False
    assert not warnings(facts)


def test_slow_pairs_are_told_what_pays():
    (text,) = warnings(box(2, pairs={(0, 1): 5.5}, host={0: 6.5, 1: 6.5}, peers=False))
    assert text.startswith("GPUs 0-1 (5.5 GB/s) are slow for GPUs: prefer CFG and PipeFusion")


#: What could not be measured -> status and words.
FAILED: dict[str, tuple[dict, str, list[str]]] = {
    "a full GPU": (dict(full={1: 3 * GB // 10}), WARNING, ["GPU 1 was not measured", "0.3 GB", "Stop ranks"]),
    "a GPU that fills up meanwhile": (
        dict(broken={1: "CUDA out of memory. Tried to allocate 32.00 MiB"}),
        WARNING,
        ["GPU 1 was not measured", "close what uses GPU memory", "Stop ranks"],
    ),
    "a GPU that another program has": (
        dict(broken={0: "CUDA error: CUDA-capable device(s) is/are busy or unavailable"}),
        PROBLEM,
        ["GPU 0 cannot be used", "busy or unavailable", "compute mode"],
    ),
    "a link that hangs": (
        dict(ended="it did not end within 60 s", during="while copying from GPU 0 to GPU 1"),
        PROBLEM,
        ["stopped while copying from GPU 0 to GPU 1", "60 s", "IOMMU", "Xid"],
    ),
    "memory that ends in the middle": (
        dict(ended="CUDA error: out of memory", during="while copying from GPU 0 to GPU 1"),
        WARNING,
        ["copying from GPU 0 to GPU 1", "close what uses GPU memory", "Stop ranks"],
    ),
    "a program that does not start": (
        dict(ended="ModuleNotFoundError: No module named 'torch'"),
        PROBLEM,
        ["stopped before it began", "No module named 'torch'", "report it"],
    ),
    "no page-locked memory": (
        dict(unlocked="CUDA error: operation not supported"),
        WARNING,
        ["page locked", "not supported", "WSL 2", "--ulimit memlock=-1"],
    ),
    "more GPUs than one reaches": (
        dict(refused=((0, 5, "CUDA error: peer mapping resources exhausted"),)),
        OK,
        [
            "1 copy was not measured: GPU 0 to GPU 5, which says nothing of them; CUDA lets a GPU ",
            "reach eight others at once (CUDA error: peer mapping resources exhausted)",
        ],
    ),
    "no time": (
        dict(left=(("host", 1), (0, 1), (1, 0), (1, 2))),
        OK,
        [
            "4 copies were not measured within 3 s: host memory to GPU 1, GPU 0 to GPU 1, GPU 1 to GPU 0, ",
            "..., which says nothing of them; --full measures the links of all GPUs",
        ],
    ),
    "no time for one": (
        dict(left=((1, 0),)),
        OK,
        ["1 copy was not measured within 3 s: GPU 1 to GPU 0, which says nothing of them; --full"],
    ),
}


@pytest.mark.parametrize(
    "elsewhere, words",
    [
        (dict(way="NCCL_P2P_DISABLE=1"), "--full measures them again"),
        (dict(variables={"NCCL_P2P_DISABLE": "1"}), "keep NCCL_P2P_DISABLE until then"),
    ],
    ids=["measured", "environment"],
)
def test_ranks_that_take_another_way_are_no_problem(elsewhere, words):
    rates = (Copy(0, 1, 24e9), Copy(1, 0, 24e9, False))
    stopped = Copies(rates, ended="signal 9", during="while copying from GPU 0 to GPU 1")
    found = said(machine(copies=stopped, **elsewhere), "copies")
    texts = [text for status, text in found if status == WARNING]
    assert len(texts) == 2 and all(words in text and "IOMMU" in text for text in texts)
    assert PROBLEM not in {status for status, _ in found}


@pytest.mark.parametrize("variables", [{}, {"NCCL_P2P_DISABLE": "0"}], ids=["unset", "0"])
def test_ranks_that_use_peer_access_have_a_problem(variables):
    stopped = Copies(ended="signal 9", during="while copying from GPU 0 to GPU 1")
    ((status, text),) = said(machine(copies=stopped, variables=variables), "copies")
    assert status == PROBLEM and "a run with method auto, or --full, finds another way" in text


@pytest.mark.parametrize("count", [4, 8])
def test_bridged_cards_are_no_fault_where_time_ran_out(count):
    """Neighbours are measured first: of cards that are bridged in twos half of them are fast."""
    ways = gpu_copies.in_order(list(range(count)))
    bridged = [
        Copy(source, target, 100e9 if {source, target} in [{i, i + 1} for i in range(0, count, 2)] else 20e9)
        for source, target in ways
    ]
    for cut in range(2 * count, len(ways)):
        found = Copies(tuple(bridged[:cut]), left=tuple(ways[cut:]))
        assert not warnings(box(count, copies=found)), cut


def test_links_of_the_processor_may_differ():
    """Of two processors' own links, one is far from the page-locked memory."""
    assert not warnings(
        box(4, pairs=dict.fromkeys(box_pairs(4), 75.0), host={0: 200.0, 1: 200.0, 2: 75.0, 3: 75.0})
    )
    (text,) = warnings(
        box(4, pairs=dict.fromkeys(box_pairs(4), 50.0), host={0: 20.0, 1: 55.0, 2: 55.0, 3: 55.0})
    )
    assert "GPU 0 copies 20.0 GB/s" in text and "by fewer lanes or memory of another processor" in text


def test_warnings_of_pairs_say_that_other_programs_slow_them():
    behind, far = {(1, 3): 6.9}, dict.fromkeys(box_pairs(4), 200.0) | {(0, 3): 20.0}
    slow = box(2, pairs={(0, 1): 5.5}, host={0: 6.5, 1: 6.5}, peers=False)
    for facts in (box(4, pairs=behind), box(4, pairs=far), slow):
        (text,) = warnings(facts)
        assert text.endswith("where other programs use the GPUs, close them and run it again")


@pytest.mark.parametrize("name", FAILED)
def test_what_was_not_measured_is_one_line(name):
    changes, status, words = FAILED[name]
    (found,) = said(machine(copies=Copies(**changes)), "copies")
    assert found[0] == status and all(word in found[1] for word in words), found


def test_other_bytes_are_a_problem():
    rates = (Copy(0, 1, 24e9), Copy(1, 0, 24e9, False))
    found = said(machine(copies=Copies(rates, left=((1, 2), (2, 1)), refused=((2, 3, "full"),))), "copies")
    assert ["says nothing of them" in text for _, text in found[-2:]] == [False, True]  # GPU 1 has a problem
    (text,) = [text for status, text in found if status == PROBLEM]
    assert text.startswith("GPU 0 received other bytes than GPU 1 sent: switch IOMMU and ACS off")
    assert "until then a run with method auto, or --full, finds another way" in text


class Program:
    """Stands for gpu_copies.py: writes ``text`` and ends."""

    def __init__(self, monkeypatch, text: str = "", ended: Ended = ENDED):
        self.text, self.ended = text, ended
        self.commands: list[list[str]] = []
        self.seconds: list[float] = []
        monkeypatch.setattr(doctor_copies.doctor_processes, "run", self.run)

    def run(self, command, seconds, folder):
        self.commands.append([str(each) for each in command])
        self.seconds.append(seconds)
        out = self.commands[-1][self.commands[-1].index("--out") + 1]
        with open(out, "w") as file:
            file.write(self.text)
        return self.ended


def rows(*values: dict) -> str:
    return "".join(f"{json.dumps(each)}\n" for each in values)


RATE = dict(source=0, target=2, rate=24e9, is_same=True)


def test_full_gpus_are_left_out(monkeypatch):
    program = Program(monkeypatch, rows(dict(doing="while warming up"), RATE, dict(left=[[2, 0]])))
    found = measured({0: 2 * GB, 1: GB - 1, 2: GB})
    (command,) = program.commands
    assert command[-4:] == ["--seconds", "3.0", "0", "2"] and program.seconds == [60.0]
    assert found == Copies((Copy(0, 2, 24e9),), full={1: GB - 1}, left=((2, 0),))
    assert measured({1: 0}) == Copies(full={1: 0}) and len(program.commands) == 1


@pytest.mark.parametrize(
    "ended, why", [(Ended(None, 60.0), "it did not end within 60 s"), (Ended(-11, 60.0), "signal 11")]
)
def test_what_was_measured_before_it_ended_is_reported(monkeypatch, ended, why):
    text = (
        rows(dict(gpu=1, error="busy"), RATE, dict(doing="while copying from GPU 2 to GPU 0"))
        + '{"source": 2, "ta'
    )
    Program(monkeypatch, text, ended)
    found = measured(dict.fromkeys(range(3), 2 * GB))
    assert found.rates == (Copy(0, 2, 24e9),) and found.broken == {1: "busy"}
    assert (found.ended, found.during) == (why, "while copying from GPU 2 to GPU 0")


def test_how_a_complete_measurement_ends_says_nothing(monkeypatch):
    """CUDA may crash while the process ends."""
    Program(monkeypatch, rows(dict(doing="while copying"), RATE, dict(done=True)), Ended(-6, 60.0))
    found = measured({0: 2 * GB, 2: 2 * GB})
    assert found == Copies((Copy(0, 2, 24e9),))


def test_what_the_program_raised_counts_before_how_it_ended(monkeypatch):
    text = rows(
        dict(doing="while copying from GPU 0 to GPU 1"), dict(error="CUDA error: unspecified launch failure")
    )
    Program(monkeypatch, text, Ended(-6, 60.0))
    assert measured({0: 2 * GB, 1: 2 * GB}).ended == "CUDA error: unspecified launch failure"


def test_the_program_says_that_there_is_no_gpu():
    """The real one: this process and those that it starts have none."""
    found = measured({0: 2 * GB})
    assert not found.rates
    assert "opening GPU 0" in found.during or found.broken.keys() == {0}


def test_gpus_that_torch_has_kernels_for_are_measured(monkeypatch):
    asked = []
    monkeypatch.setattr(doctor_copies, "measured", lambda free: asked.append(free) or Copies())
    old = replace(GPU, index=0, capability=(6, 1))
    facts = machine(gpus=[old, replace(GPU, index=1, free=5 * GB)])
    del facts.copies
    assert not said(facts, "copies") and asked == [{1: 5 * GB}]
    elsewhere = machine(platform="win32")
    del elsewhere.copies
    assert not said(elsewhere, "copies") and len(asked) == 1


def test_without_gpus_nothing_is_said_and_nothing_runs(monkeypatch):
    program = Program(monkeypatch)
    facts = machine(gpus=[], peers=[])
    del facts.copies
    assert not said(facts, "copies") and not program.commands


def test_the_report_has_the_numbers():
    facts = box(1, host={0: 25.0})
    assert list(doctor_checks.quick(facts))
    row = {"source": "host", "target": 0, "rate": 25e9, "is_same": True}
    assert row in json.loads(json.dumps(facts.as_dict()["copies"]))["rates"]
