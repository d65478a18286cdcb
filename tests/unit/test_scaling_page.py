"""docs/scaling.md is what scripts/scaling_page.py makes, and describe() is what a dry run counts."""

import math
from dataclasses import replace

import published_errors
import pytest
import scaling_page
import torch
from families import LATENT_FORMATS
from published import CASES
from scaling_page import Compared, dry_run, model, plans_of

from backend.config import ConfigError
from backend.errors import UnsupportedError
from backend.planner.memory import held_by_rank

PAGE = (scaling_page.ROOT / scaling_page.PART.page).read_text()
#: What the dry run sends, holds and multiplies over what is counted. HiDream's blocks are given some text
#: anew. Tensor parallelism's modulation is gathered ahead of the steps. Layers outside of blocks are not
#: counted.
SENT, KV, MACS = (0.97, 1.03), (0.97, 1.03), (0.97, 1.05)
#: Whole weights under FSDP, whose padding (at most a row of a tensor on each rank) is not counted.
GATHERED = (1.0, 1.03)
#: Families, or single runs, that multiply more -> how much, of a rank with one of 16 parts.
MORE = {
    "sana": 2.05,  # convolutions of the lines next to a rank's
    # the layers that make modulation: on every stage, once an evaluation
    "chroma/pipefusion/16/0": 1.06,
    "chroma/pipefusion x ulysses/16/1": 1.07,
    "chroma/pipefusion x ring/16/1": 1.07,
    "chroma/pipefusion x tensor parallel/16/1": 1.07,
    "chroma/pipefusion x ulysses x ring/16/3": 1.07,
}
#: Largest relative error of the estimate of activations: of methods alone, to most of which it is fitted, and
#: of hybrids.
ACTIVATIONS, OF_HYBRIDS = 0.15, 0.19
#: Families whose hybrids are further from it.
FURTHER = {"kandinsky5": 0.27, "kandinsky5-image": 0.23, "hunyuan-dit": 0.30}
#: Cheap ones of the fast tier.
SMALL = ("flux-dev", "sana")
RUNS = dry_run.stored()


def lines(table: str) -> list[str]:
    return [line for line in table.splitlines() if line]


def test_the_page_is_what_the_script_makes():
    """Every line, which takes minutes."""
    assert scaling_page.PART.read() == scaling_page.tables()


def test_projections_follow_published_times():
    """The median alone hides a method that is always projected too fast."""
    found, pipefusion = published_errors.errors(), published_errors.of_pipefusion()
    assert len(found) >= 74 and len(pipefusion) >= 16
    assert published_errors.middle(found) <= 0.055 < scaling_page.GOAL
    assert sum(found) / len(found) <= 0.075 and published_errors.middle(found, 0.9) <= 0.20
    assert abs(published_errors.middle(pipefusion)) <= 0.03
    small = [
        projected / seconds - 1
        for case, name, seconds, projected in published_errors.published()
        if (case.model.name, case.request.image_tokens) == ("flux", 4096) and "pp" in name
    ]
    assert len(small) == 3 and max(map(abs, small)) <= 0.05  # of small patches


def test_requests_of_published_tables_are_those_that_ran():
    """Else no GPU would take the time of the table's one."""
    low, high = published_errors.PLAUSIBLE
    for case in (case for case in CASES if "1" in case.seconds):
        assert low < published_errors.fitted(case).gemm / case.machine.gemm < high, case


def test_published_times_are_in_the_page():
    assert all(line in PAGE for line in lines(scaling_page.published_table()))


@pytest.mark.parametrize("family", SMALL)
def test_lines_of_a_family_are_in_the_page(family):
    for name in scaling_page.MACHINES:
        assert f"| {' | '.join(scaling_page.projected_row(family, name))} |\n" in PAGE
    for method in dry_run.METHODS:
        assert f"| {' | '.join(scaling_page.counted_row(family, method))} |\n" in PAGE
    for methods in scaling_page.dry_tables().values():
        assert f"| {' | '.join(scaling_page.dry_row(family, methods))} |\n" in PAGE


def test_the_page_calls_its_numbers_projected():
    heads = [line for line in PAGE.splitlines() if line.startswith("## ")]
    assert all("rojected" in head or "Counted" in head or head == "## How to read it" for head in heads)
    assert "No number on this page was measured here" in PAGE


def tables(family: str) -> int:
    """Bytes of tables that are no parameters, and that files store (SD3's positions)."""
    checkpoint = model(family).checkpoint
    names = checkpoint.sources.keys() - set(checkpoint.parameters)
    dtypes = {name: checkpoint.family.build.dtype_of(name, torch.bfloat16) for name in names}
    return sum(math.prod(checkpoint.shapes[name]) * dtype.itemsize for name, dtype in dtypes.items())


def check(name: str):
    """Compare a stored run with what is counted of the same rank."""
    found = Compared(name, RUNS[name])
    family, method, ranks, rank = found.parts
    counted = found.counted
    if isinstance(counted, str):
        with pytest.raises((ConfigError, UnsupportedError)):
            plans_of(family, method, ranks)
        return
    plan, sent = found.plan, found.sent
    config = dry_run.METHODS[method].config(ranks)
    stored_tables = 0 if config.shard_weights else tables(family)  # which are read, and which nobody shards
    assert counted["weights"] == plan.weight_bytes + stored_tables
    whole = counted.get("gathered", 0)
    assert GATHERED[0] * plan.gathered_bytes <= whole <= GATHERED[1] * plan.gathered_bytes
    assert counted["sent"].keys() == sent.keys()
    for mechanism, size in counted["sent"].items():
        assert SENT[0] * sent[mechanism] <= size <= SENT[1] * sent[mechanism], mechanism
    assert KV[0] * plan.kv_bytes <= counted["kv"] <= KV[1] * plan.kv_bytes
    activations = counted["peak"] - max(counted["kv"], plan.kv_bytes)
    largest = FURTHER.get(family, OF_HYBRIDS) if dry_run.METHODS[method].fixed else ACTIVATIONS
    assert abs(plan.activation_bytes / activations - 1) <= largest
    planned = held_by_rank(model(family).shape, config, model(family).request)[rank]
    assert planned.activations == pytest.approx(plan.activation_bytes, rel=0.02)
    most = MORE.get(name, MORE.get(family, MACS[1]))
    assert MACS[0] * found.macs <= counted["macs"] <= most * found.macs


@pytest.mark.parametrize("family", scaling_page.RELEASED)
def test_describe_counts_what_the_dry_run_does(family):
    """On 16 ranks, and on two of tensor parallelism: few models divide into more."""
    for method in (name for name, each in dry_run.METHODS.items() if each.suits(family)):
        numbers = dry_run.METHODS[method].ranks
        ranks = min(numbers) if method == "tensor parallel" else max(numbers)
        names = [name for name in RUNS if name.startswith(f"{family}/{method}/{ranks}/")]
        assert names
        for name in names:
            check(name)


@pytest.mark.full
def test_describe_counts_what_every_dry_run_does():
    """On every number of ranks."""
    wrong = {}
    for name in RUNS:
        try:
            check(name)
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong


def test_every_family_has_a_dry_run():
    """Under every method and number of ranks; and none is stored that nobody runs again."""
    assert set(scaling_page.RELEASED) == set(LATENT_FORMATS)
    every = dry_run.runs(list(scaling_page.RELEASED), list(dry_run.METHODS))
    assert set(RUNS) == {"/".join(map(str, which)) for which in every}


@pytest.mark.parametrize("method, ranks", [("ulysses", 4), ("ulysses", 8), ("ring", 4), ("pipefusion", 2)])
@pytest.mark.parametrize("family, heads, kv_heads", [("krea2", 48, 12), ("lumina2", 24, 8)])
def test_grouped_keys_and_values_travel_and_wait_as_they_are(family, heads, kv_heads, method, ranks):
    """Bytes of released models for one prompt, as the code sends and holds them, and as planned."""
    name = f"{family}/{method}/{ranks}/{ranks - 1}"
    counted = dry_run.counted(family, method, ranks, ranks - 1)
    assert not isinstance(counted, str)
    found = Compared(name, counted)
    plan = found.plan
    for mechanism, size in counted["sent"].items():
        assert SENT[0] * found.sent[mechanism] <= size <= SENT[1] * found.sent[mechanism], mechanism
    assert counted["kv"] == plan.kv_bytes
    shape = model(family).shape
    assert shape.kv_heads == kv_heads and shape.heads == heads
    request = replace(model(family).request, prompts=1)
    planned = held_by_rank(shape, dry_run.METHODS[method].config(ranks), request)[ranks - 1]
    assert planned.keys == pytest.approx(counted["kv"], rel=0.01)
    whole = replace(
        shape, kv_heads=0, blocks=tuple(replace(each, keys=each.queries) for each in shape.blocks)
    )
    before = held_by_rank(whole, dry_run.METHODS[method].config(ranks), request)[ranks - 1].keys
    if method == "pipefusion":
        assert before == heads / kv_heads * planned.keys
    tokens = 2 * len(shape.blocks) * sum(map(sum, plan.patches))
    key = 2 * shape.head_size * kv_heads
    if method == "ring":
        assert counted["sent"]["ring"] == pytest.approx(tokens * key * (ranks - 1), rel=0.02)
    if method == "ulysses":
        repeats = shape.kv_repeats(dry_run.METHODS[method].config(ranks))
        assert repeats == (2 if (family, ranks) == ("krea2", 8) else 1)
        queries = key * heads // kv_heads
        wanted = tokens * (queries + repeats * key) * (ranks - 1) / ranks
        assert counted["sent"]["ulysses"] == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize(
    "which",
    [
        ("sana", "pipefusion", 16, 15),
        ("flux-dev", "ulysses", 2, 1),
        ("pixart-sigma", "cfg x ulysses", 4, 3),
        ("pixart-sigma", "fsdp", 2, 1),
        ("pixart-sigma", "pipefusion x ulysses", 8, 7),
    ],
    ids=str,
)
def test_a_dry_run_is_as_stored(which):
    check_again(which)


def check_again(which: tuple[str, str, int, int]):
    """Make a dry run: it is the stored one, and its last step waits for nothing that is not listed."""
    found = dry_run.run(*which)
    assert dry_run.to_store(found) == RUNS["/".join(map(str, which))]
    expected = READ.get(found.family, set()) | read_once(*which)
    assert {place.rpartition(" in ")[2] for place in found.waits} == expected


def read_once(family: str, method: str, ranks: int, _: int) -> set[str]:
    """Positions of a patch's tokens that are not adjacent are copied to the device once a request: in the
    second step, where a dry run ends. Such are text after a first patch's image tokens, and, of several SP
    ranks, their shards of text and image."""
    config = dry_run.METHODS[method].config(ranks)
    of_family = model(family).checkpoint.family
    position = of_family.blocks.text_position
    shards = position == "first" and config.sp_degree > 1 and not of_family.cache.static_text
    is_apart = position == "last" or shards
    return {"request_caches._adjacent"} if config.has_stale_kv and is_apart else set()


#: Families whose model reads values of the device at every step -> in which functions.
READ = {"hidream": {"transformer_hidream_image.moe_infer"}}
#: Every method with every number of its ranks.
KINDS = [(method, ranks) for method, each in dry_run.METHODS.items() for ranks in each.ranks]


def every_kind_and_family() -> list[tuple[str, str, int, int]]:
    """Spread methods and numbers of ranks over the families, first those that fewest of them can run."""
    able = {
        kind: [
            family
            for family in scaling_page.RELEASED
            if isinstance(RUNS.get("/".join(map(str, (family, *kind, kind[1] - 1)))), dict)
        ]
        for kind in KINDS
    }
    counts = dict.fromkeys(scaling_page.RELEASED, 0)
    chosen = []
    for kind in sorted(KINDS, key=lambda kind: len(able[kind])):
        family = min(able[kind], key=counts.__getitem__)
        counts[family] += 1
        chosen.append((family, *kind, kind[1] - 1))
    return chosen


@pytest.mark.full
@pytest.mark.parametrize("which", every_kind_and_family(), ids=str)
def test_a_dry_run_of_every_family_is_as_stored(which):
    check_again(which)


def test_these_are_every_family_method_and_number_of_ranks():
    made = every_kind_and_family()
    assert {family for family, *_ in made} == set(scaling_page.RELEASED)
    assert {(method, ranks) for _, method, ranks, _ in made} == set(KINDS)
