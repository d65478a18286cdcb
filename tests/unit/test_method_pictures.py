"""scripts/method_pictures.py: timelines whose micro-batches are the step loop's own."""

from itertools import pairwise
from xml.etree import ElementTree

import method_pictures as drawings
import pytest

from backend.config import ParallelConfig


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_the_pages_drawings_are_what_the_script_draws(name):
    drawn = drawings.drawing(drawings.DRAWINGS[name])
    assert (drawings.FOLDER / f"{name}.svg").read_text() == drawn
    ElementTree.fromstring(drawn)


@pytest.mark.parametrize("name", drawings.DRAWINGS)
def test_all_work_is_done_once_and_one_thing_at_a_time(name):
    rows = drawings.timeline(drawings.DRAWINGS[name])
    assert sum(work.end - work.start for row in rows for work in row) == pytest.approx(drawings.STEPS)
    for row in rows:
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(row))


def test_warm_up_is_whole_and_later_steps_are_patches():
    rows = drawings.timeline(ParallelConfig(pipefusion_degree=2, num_pipeline_patch=4, warmup_steps=2))
    assert {work.patch for work in rows[0] if work.step < 2} == {-1}
    assert {work.patch for work in rows[1] if work.step >= 2} == {0, 1, 2, 3}


def test_a_stage_waits_for_the_stage_before():
    first, second = drawings.timeline(drawings.DRAWINGS["pipefusion2"])
    assert all(b.start >= a.end - 1e-9 for a, b in zip(first, second))


def test_a_rank_of_a_side_of_guidance_has_one_prompt():
    rows = drawings.timeline(drawings.DRAWINGS["cfg2"])
    assert [{work.prompt for work in row} for row in rows] == [{"positive"}, {"negative"}]
