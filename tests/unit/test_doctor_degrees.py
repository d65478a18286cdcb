"""What scripts/doctor.py --full runs on any number of ranks: ranks refuse here as real ones do."""

from functools import cache, partial
from itertools import product
from pathlib import Path

import doctor_degrees
import doctor_families
import doctor_flux_files
import doctor_lab
import doctor_models
import doctor_runs
import doctor_sizes
import doctor_steps
import pytest
import released_sizes
import tiny
import torch
from doctor_findings import OK, PROBLEM
from doctor_sizes import SIZES
from doctor_stubs import FAMILIES, StubLab, flux_blocks_and_heads, tiny_blocks_and_heads

from backend.config import ParallelConfig
from backend.protocol import BackendError, RefusedError

RANKS = (2, 3, 4, 6, 8)
#: Stages and Ulysses ranks by which two or three blocks of a released model are divided.
STAGES = {2: (2, 1), 3: (3, 1), 4: (2, 2), 5: (2, 2), 6: (2, 3), 7: (2, 3), 8: (2, 4), 9: (3, 3)}


class Refusing(StubLab):
    """Ranks that refuse what real ones refuse, and are right otherwise. ran: configurations and models."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks = ranks
        self.ran = []

    def run(self, config, path, sample, dtype="default", matmul="auto", loras=()):
        if why := self.refusal(path, config):
            raise RefusedError(why)
        self.ran.append((config.validate(), path.name))
        return doctor_lab.Run(torch.ones(4), 1.0)


class Released(Refusing):
    """GPUs, on which released models have few blocks."""

    def blocks_and_heads(self, path):
        if path.name in doctor_steps.SHAPES[1:]:
            return doctor_sizes.timed_blocks(self.ranks), released_heads(path.name)
        return flux_blocks_and_heads(SIZES["cuda"])


@cache
def released_heads(family):
    checkpoint = released_sizes.checkpoint_of(family)
    return checkpoint.family.blocks.heads(checkpoint.config)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_blocks_and_heads_are_those_that_ranks_count(tmp_path, family):
    """In the file, by which the doctor tells what ranks refuse."""
    path = tiny.write_checkpoint(tmp_path / f"{family}.safetensors", family)
    assert doctor_models.blocks_and_heads(path) == tiny_blocks_and_heads(family)
    lab = doctor_lab.Lab("cpu", 2, 1.0)
    blocks, heads = tiny_blocks_and_heads(family)
    assert lab.refusal(path, ParallelConfig(pipefusion_degree=blocks, num_pipeline_patch=1)) == ""
    too_many = ParallelConfig(ulysses_degree=heads + 1)
    assert f"{family} has {heads} attention heads" in lab.refusal(path, too_many)
    lab.close()


@pytest.mark.parametrize("family", doctor_runs.FAMILIES)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_family_has_every_method_on_all_ranks(ranks, family):
    """As it is, or as a hybrid that still has each method of it."""
    lab = Refusing(ranks)
    for name, config in doctor_runs.methods(ranks).items():
        own, why = doctor_degrees.fitting(partial(lab.refusal, Path(family)), config)
        assert own, f"{name}: {why}"
        assert own.validate().world_size == ranks and not lab.refusal(Path(family), own)
        cut = {axis for axis, size in config.degrees.items() if size > 1}
        assert cut <= {axis for axis, size in own.degrees.items() if size > 1}, name
        assert (own.wire, own.shard_weights) == (config.wire, config.shard_weights)
        assert own.has_stale_kv == config.has_stale_kv and (own == config) == (why == "")


@pytest.mark.parametrize("ranks", RANKS)
def test_methods_leave_no_family_out(ranks):
    """What is not possible says where the same degrees are judged, which were run."""
    lab = Refusing(ranks)
    found = list(doctor_runs.all_methods(lab))
    assert {each.status for each in found} == {OK}
    for each in found:
        if "fp32" in each.values:
            continue
        _, refused, rest = each.text.partition("not possible")
        assert refused and "; see " in rest, each.text
        family = each.text.partition(":")[0].rpartition(", ")[2]
        seen = rest.rpartition("; see ")[2]
        config = doctor_runs.methods(ranks)[seen.removesuffix(f", {family}")]
        assert (config.validate(), family) in lab.ran
        assert any(other.text.startswith(f"{seen}: float32") for other in found), seen
    assert {config.world_size for config, _ in lab.ran} == {1, ranks}


def test_what_is_not_possible_claims_nothing_of_the_method_it_names(monkeypatch):
    """Which may fail, or never be reached."""
    lab = Refusing(8)
    run = lab.run

    def fails(config, path, *arguments):
        if (config.ring_degree, config.ulysses_degree) == (2, 4):
            raise BackendError("rank 1 ended")
        return run(config, path, *arguments)

    monkeypatch.setattr(lab, "run", fails)
    texts: dict[str, list[str]] = {OK: [], PROBLEM: []}
    for each in doctor_runs.all_methods(lab):
        texts[each.status].append(each.text)
    asked = [text for text in texts[OK] if text.startswith("ulysses, wan21-t2v: not possible")]
    assert [text.rpartition("; ")[2] for text in asked] == ["see ring 2 x ulysses 4, wan21-t2v"]
    assert any(text.startswith("ring 2 x ulysses 4, wan21-t2v: ") for text in texts[PROBLEM])


def of_every_method(lab):
    """What "methods" says of the families that have every method, ahead of those that have one."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(doctor_families, "ONCE", ())
        return [each.text for each in doctor_runs.all_methods(lab)]


@pytest.mark.parametrize("ranks", RANKS)
def test_hybrids_come_after_all_methods_that_fit(ranks):
    """They take none of their time. On four ranks everything fits as asked."""
    lab = Refusing(ranks)
    found = of_every_method(lab)
    is_hybrid = ["not as asked" in text or "not possible" in text for text in found]
    assert is_hybrid == sorted(is_hybrid) and any(is_hybrid) == (ranks in (3, 6, 8))


def test_what_no_hybrid_divides_is_said_by_name():
    """Seven is a prime number, and more than the heads of one family and the blocks of three."""
    found = of_every_method(Refusing(7))
    left_out = {tuple(text.partition(": ")[0].split(", ")) for text in found if "not possible" in text}
    few_blocks = {
        (name, f) for name in ("pipefusion M=1", "pipefusion M=7") for f in doctor_runs.FAMILIES[1:]
    }
    few_heads = {(*name, "wan21-t2v") for name in (("ulysses",), ("ulysses", "wire fp8"), ("FSDP",))}
    assert left_out == few_blocks | few_heads
    by_rows = [text for text in found if "tensor parallel as tp 7 by rows" in text]
    assert len(by_rows) == len(doctor_runs.FAMILIES) and "does not divide" in by_rows[0]


@pytest.mark.parametrize("ranks", RANKS)
def test_waits_are_of_what_methods_runs(ranks):
    """The same degrees of each method and family, none of them twice, hybrids last."""
    lab = Refusing(ranks)
    asked = doctor_runs.methods(ranks)
    turns, left_out = doctor_degrees.turns_of(lab)
    assert not left_out
    ran = [(turn.config.validate(), family) for turn in turns for family in turn.families]
    assert len(ran) == len(set(ran))
    wanted = set()
    for config, family in product(asked.values(), doctor_runs.FAMILIES):
        own, _ = doctor_degrees.fitting(partial(lab.refusal, Path(family)), config)
        wanted.add((own.validate(), family))
    assert set(ran) == wanted
    is_hybrid = [turn.name not in asked for turn in turns]
    assert is_hybrid == sorted(is_hybrid) and any(is_hybrid) == (ranks in (3, 6, 8))
    assert all(turn.config == asked.get(turn.name, turn.config) for turn in turns)


@pytest.mark.parametrize("ranks", STAGES)
def test_pipefusion_is_timed_at_released_shapes(ranks):
    """Of few blocks by few stages, on all ranks but one of five and of seven."""
    lab = Released(ranks)
    found = list(doctor_steps.shapes(lab))
    assert {each.status for each in found} == {OK} and "not possible" not in str(found)
    timed = {each.values["method"] for each in found}
    for family in doctor_steps.SHAPES[1:]:
        configs = {config for config, model in lab.ran if model == family}
        (pipefusion,) = [config for config in configs if config.has_stale_kv]
        stages, ulysses = STAGES[ranks]
        assert (pipefusion.pipefusion_degree, pipefusion.ulysses_degree) == (stages, ulysses)
        assert pipefusion.world_size == (ranks - 1 if ranks in (5, 7) else ranks)
        assert pipefusion.patches == stages
        name = f"pp {stages} x ulysses {ulysses}" if ulysses > 1 else "pipefusion"
        name += f" M={stages}"
        name += f" ({ranks - 1} of {ranks} ranks)" if ranks in (5, 7) else ""
        assert f"{family}, {name}" in timed
    assert f"flux-dev, {doctor_steps.KINDS[0]}, pipefusion M={ranks}" in timed
    files = {each.values["method"] for each in doctor_flux_files.flux_files(lab) if "seconds" in each.values}
    assert f"flux-dev, fp8 with a LoRA, pipefusion M={ranks}" in files
