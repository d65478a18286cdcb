"""What auto makes of transformers whose sequence cannot be cut."""

from dataclasses import replace

import pytest
import torch
from fallback_models import CONFIGS, CUT, write
from published import L40

from backend.loading.recognition import open_checkpoint
from backend.planner.choose import Question, choose
from backend.planner.machine import RequestEstimate
from backend.rank_plan.shape_of import shape_of
from backend.sampling.validation import check_degrees, check_family


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in CUT])
def test_auto_knows_what_cannot_be_cut(tmp_path, name):
    """Prompts and samples alone are shared, and nothing else is a candidate."""
    write(tmp_path / name, name)
    checkpoint = open_checkpoint(str(tmp_path / name))
    shape = shape_of(checkpoint, torch.float32)
    machine = replace(L40, memory=(48 << 30,) * 2)
    for prompts, batch, shared in ((2, 1, (2, 1)), (1, 1, (1, 1)), (1, 2, (1, 2))):
        question = Question(shape, RequestEstimate(steps=8, prompts=prompts, batch=batch), machine, 2)
        plans = [each.plan for each in question.options()]
        assert {(plan.cfg_degree, plan.data_parallel_degree) for plan in plans} == {(1, 1), shared}
        chosen = choose(question).option
        assert chosen.plan in plans and chosen.fits and chosen.seconds > 0
        for plan in plans:
            check_family(checkpoint.family, plan)
            check_degrees(checkpoint, plan)
