"""What scripts/doctor.py says of copies between GPUs and host memory: their rates, and which of them show a
bad slot, bridge or setting."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from statistics import median, median_low

from doctor_copies import ROOM, SECONDS, Copies, Place
from doctor_facts import Facts
from doctor_findings import OK, PROBLEM, WARNING, gb
from gpu_copies import HOST, words

#: Bytes/s that one lane of PCIe 3 carries at most: 8 GT/s, of which 128 of 130 bits are data.
LANE = 8e9 / 8 * 128 / 130
#: How many times that -> what carries no more.
LANES = {1: "one lane of PCIe 3", 2: "one lane of PCIe 4", 4: "four lanes of PCIe 3"}
#: Part of the rate of the others below which one is far slower: boards that share lanes among GPUs halve it.
FAR = 0.4
#: The same of a rate through host memory, which peer access should beat.
BEHIND = 0.7
#: Bytes/s between two GPUs, or around a ring, below which the exact methods that send most do not pay.
SLOW_LINK = 6e9
#: Bytes/s that 16 lanes of PCIe 4 carry at most. No slot is at fault above: links of the processor's own may
#: differ, as the page-locked memory lies at one processor.
PCIE = 16 * 2 * LANE
#: The variable without which ranks use peer access.
NO_PEERS = "NCCL_P2P_DISABLE"
OTHERS = "where other programs use the GPUs, close them and run it again"
SLOT = (
    "see to its slot and riser: a card wants 16 lanes, or 8, mostly those of the slot next to the processor, "
    "and a riser cable may carry fewer; the BIOS lists the lanes and PCIe generation of each slot"
)
BIOS = "switch IOMMU and ACS off in the BIOS (IOMMU is named VT-d or AMD-Vi there)"
ONE_PROCESSOR = "on a board of two processors, use slots of the same one"
BRIDGE = (
    "see to the NVLink bridge on them, or to their slots (what joins which: nvidia-smi topo -m, of AMD's "
    "rocm-smi --showtopo)"
)
CLOSE = "close what uses GPU memory (ranks of this pack: Stop ranks; ComfyUI's models: unload them)"
LEAST_SENT = (
    "prefer CFG and PipeFusion, which send least, to Ulysses, ring and TP; method auto of Parallel Config "
    "does so itself"
)
UNUSABLE = (
    "close the program that has it, and see to its compute mode (nvidia-smi lists both, of AMD's rocm-smi); "
    "restart the machine where the card is listed no more"
)
LOST = (
    "look for errors of the driver (sudo dmesg; Xid are those of NVIDIA's), and restart the machine where "
    "nvidia-smi or rocm-smi hangs"
)
#: What is said of copies that were not measured where nothing else is said of their GPUs.
UNKNOWN = ", which says nothing of them"

Status = tuple[str, str]
Pair = tuple[int, int]
#: GPU -> bytes/s from host memory, and to it.
HostRates = Mapping[int, tuple[float, float]]


def copies(facts: Facts) -> Iterator[Status]:
    """Judge the copies of this machine."""
    found = facts.copies
    yield from _unmeasured(facts)
    named = {*found.full, *found.broken, *map(int, re.findall(r"GPU (\d+)", found.during))}
    for copy in found.rates:
        if not copy.is_same:
            named |= {int(end) for end in (copy.source, copy.target) if end != HOST}
            what = f"{words(copy.target)} received other bytes than {words(copy.source)} sent"
            yield _of_links(facts, f"{what}: {BIOS}")
    host = _host_rates(found)
    names = {gpu.index: gpu.name for gpu in facts.gpus}
    slow = _slow_gpus(host, names)
    for text in slow.values():
        yield WARNING, f"{text}; {SLOT}; {OTHERS}"
    named |= slow.keys()
    pairs = _pair_rates(found)
    judged = {pair: rate for pair, rate in pairs.items() if not slow.keys() & set(pair)}
    is_whole = not (found.left or found.ended)
    for chosen, text in _slow_pairs(judged, host, facts.peers, names if is_whole else None):
        named |= set(chain(*chosen))
        yield WARNING, text
    yield from _rates(host, pairs, facts.peers)
    if found.left:
        what = f"{_not_measured(len(found.left))} within {SECONDS:g} s: {_listed(found.left, named)}"
        yield OK, f"{what}; --full measures the links of all GPUs"
    if found.refused:
        listed = _listed([(source, target) for source, target, _ in found.refused], named)
        why = f"CUDA lets a GPU reach eight others at once ({found.refused[0][2]})"
        yield OK, f"{_not_measured(len(found.refused))}: {listed}; {why}"


def _not_measured(count: int) -> str:
    """Say that so many copies were not measured."""
    return "1 copy was not measured" if count == 1 else f"{count} copies were not measured"


def _listed(copies: Sequence[tuple[Place, Place]], named: Collection[int]) -> str:
    """Name the first three of some copies. ``named``: GPUs of which something else was found: where one of
    them is among all, it is not said that nothing is known."""
    some = ", ".join(f"{words(source)} to {words(target)}" for source, target in copies[:3])
    known = any(end in named for copy in copies for end in copy)
    return some + (", ..." if len(copies) > 3 else "") + ("" if known else UNKNOWN)


def _of_links(facts: Facts, what: str) -> Status:
    """Return a fault of copies between GPUs: a problem, unless ranks already take another way."""
    if facts.way:
        way = f"ranks start with {facts.way} since GPUs failed to reach each other's memory"
        return WARNING, f"{what}; {way}, and --full measures them again"
    if facts.variables.get(NO_PEERS, "0") not in ("", "0"):
        return WARNING, f"{what}; keep {NO_PEERS} until then: ranks send through host memory with it"
    return PROBLEM, f"{what}; until then a run with method auto, or --full, finds another way between them"


def _unmeasured(facts: Facts) -> Iterator[Status]:
    """Say what could not be measured, and why."""
    found = facts.copies
    for gpu, free in found.full.items():
        what = f"GPU {gpu} was not measured: {gb(free)} are free, and that takes {gb(ROOM)}"
        yield WARNING, f"{what}; {CLOSE}"
    for gpu, why in found.broken.items():
        if _is_full(why):
            yield WARNING, f"GPU {gpu} was not measured ({why}); {CLOSE}"
        else:
            yield PROBLEM, f"GPU {gpu} cannot be used ({why}); {UNUSABLE}"
    if found.unlocked:
        what = f"no host memory can be page locked ({found.unlocked}), as on WSL 2 and in some containers"
        remedy = "run under Linux itself, or start the container with --ulimit memlock=-1"
        yield WARNING, f"{what}: weights load and return more slowly; {remedy}"
    if not found.ended:
        return
    what = f"the measurement stopped {found.during or 'before it began'}"
    if _is_full(found.ended):
        yield WARNING, f"{what} ({found.ended}); {CLOSE}"
    elif found.during.count("GPU") > 1:
        yield _of_links(facts, f"{what} ({found.ended}); {BIOS}, {LOST}")
    elif found.during:
        yield PROBLEM, f"{what} ({found.ended}); {LOST}"
    else:
        yield PROBLEM, f"{what} ({found.ended}); report it, with the file of --json"


def _is_full(why: str) -> bool:
    """Return whether CUDA or ROCm says that a GPU has no room."""
    return "out of memory" in why


def _host_rates(found: Copies) -> dict[int, tuple[float, float]]:
    """Return those of GPUs that were measured both ways."""
    sent = {copy.target: copy.rate for copy in found.rates if copy.source == HOST}
    received = {copy.source: copy.rate for copy in found.rates if copy.target == HOST}
    return {int(gpu): (rate, received[gpu]) for gpu, rate in sent.items() if gpu in received}


def _pair_rates(found: Copies) -> dict[Pair, float]:
    """Return the bytes/s of each pair of GPUs, in the slower direction of those that were measured."""
    rates: dict[Pair, float] = {}
    for copy in found.rates:
        if HOST not in (copy.source, copy.target):
            ends = sorted((int(copy.source), int(copy.target)))
            pair = ends[0], ends[1]
            rates[pair] = min(copy.rate, rates.get(pair, copy.rate))
    return dict(sorted(rates.items()))


def _slow_gpus(host: HostRates, names: Mapping[int, str]) -> dict[int, str]:
    """Return GPUs whose copies with the host are slow, by themselves or next to others of their kind -> what
    is to be said of each."""
    slow = {}
    for gpu, (sent, received) in host.items():
        rate = min(sent, received)
        text = f"GPU {gpu} copies {_range([sent])} from host memory and {_range([received])} to it"
        others = [min(host[each]) for each in host if each != gpu and names.get(each) == names.get(gpu)]
        carries = next((what for lanes, what in LANES.items() if rate <= lanes * LANE), "")
        if carries:
            slow[gpu] = f"{text}, no more than {carries} can carry"
        elif others and rate < min(PCIE, FAR * median(others)):
            what = f"far less than others of its kind ({_range([median(others)])})"
            why = "by fewer lanes or memory of another processor, which boards of two have"
            slow[gpu] = f"{text}, {what}, {why}"
    return slow


def _slow_pairs(
    pairs: Mapping[Pair, float], host: HostRates, peers: list[list[bool]], names: Mapping[int, str] | None
) -> Iterator[tuple[Collection[Pair], str]]:
    """Say which pairs are slow, each by the first reason that explains it, and what is to be said of them.
    Without ``names`` no pair is held to the others: not all were measured, and those that were may be the
    bridged ones."""
    behind = {(a, b) for a, b in pairs if peers[a][b] and pairs[a, b] < BEHIND * _through_host(host, a, b)}
    if behind:
        what = "reach each other's memory, but a copy through host memory would be faster"
        yield behind, f"{_named(behind, pairs)} {what}: {BIOS}; {ONE_PROCESSOR}; {OTHERS}"
    left = {pair: rate for pair, rate in pairs.items() if pair not in behind}
    far: set[Pair] = set()
    if names is not None:
        kinds = {(a, b): (peers[a][b], {names.get(a), names.get(b)}) for a, b in left}
        far = {pair for pair in left if left[pair] < FAR * _usual(pair, left, kinds)}
    if far:
        yield far, f"{_named(far, left)} copy far less than others: {BRIDGE}; {OTHERS}"
    slow = {pair for pair, rate in left.items() if rate < SLOW_LINK} - far
    if slow:
        yield slow, f"{_named(slow, left)} are slow for GPUs: {LEAST_SENT}; {OTHERS}"


def _through_host(host: HostRates, a: int, b: int) -> float:
    """Return the bytes/s of one copy to host memory and another one from there, in the slower direction; 0
    where the host was not measured."""
    if a not in host or b not in host:
        return 0.0
    return min(1 / (1 / host[source][1] + 1 / host[target][0]) for source, target in ((a, b), (b, a)))


def _usual(pair: Pair, pairs: Mapping[Pair, float], kinds: Mapping[Pair, tuple]) -> float:
    """Return the median of the other pairs of a kind. The lower one: of three GPUs a bridge may join two. 0
    where there are too few."""
    others = [rate for other, rate in pairs.items() if other != pair and kinds[other] == kinds[pair]]
    return median_low(others) if len(others) > 1 else 0.0


def _named(chosen: Collection[Pair], pairs: Mapping[Pair, float]) -> str:
    """Name pairs by their GPUs and rates; the one GPU that explains them all, where there is one."""
    rates = _range(pairs[pair] for pair in chosen)
    for gpu in sorted(set.intersection(*map(set, chosen))):
        if len(chosen) == sum(gpu in pair for pair in pairs) > 1:
            return f"GPU {gpu} and every other one ({rates})"
    return f"GPUs {', '.join(f'{a}-{b}' for a, b in sorted(chosen))} ({rates})"


def _rates(host: HostRates, pairs: Mapping[Pair, float], peers: list[list[bool]]) -> Iterator[Status]:
    """Say what was measured."""
    if host:
        sent, received = zip(*host.values())
        yield OK, f"from host memory {_range(sent)}, to it {_range(received)}"
    for is_direct, way in ((True, "by peer access"), (False, "through host memory")):
        rates = {(a, b): rate for (a, b), rate in pairs.items() if peers[a][b] == is_direct}
        if rates:
            least = min(rates, key=lambda pair: rates[pair])
            text = _range(rates.values())
            between = f" (least {least[0]}-{least[1]})" if " to " in text else ""
            yield OK, f"between GPUs {way} {text}{between}"


def _range(rates: Iterable[float]) -> str:
    """Write the least and the most of rates."""
    ordered = sorted(rates)
    least, most = (f"{rate / 1e9:.1f}" for rate in (ordered[0], ordered[-1]))
    return f"{least} GB/s" if least == most else f"{least} to {most} GB/s"
