"""Plans of auto under Parallel Model: one for each sampling, on two ranks of the CPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from comfy_modules import comfy_modules
from pairs import ksampler
from published import FLUX

with comfy_modules():
    from comfy.patcher_extension import WrappersMP
    from comfy_extras.nodes_context_windows import ContextWindowsManualNode
    from parallel_dit.backend.client import pool
    from parallel_dit.backend.config import ParallelConfig
    from parallel_dit.backend.planner.auto_config import AutoConfig
    from parallel_dit.backend.protocol import BackendError
    from parallel_dit.nodes.host import auto_plan
    from parallel_dit.nodes.parallel_model import remote_model

ONE = ParallelConfig(ulysses_degree=2, device="cpu")
MORE = ParallelConfig(data_parallel_degree=2, device="cpu")
OUT_OF_MEMORY = BackendError("rank 1 ran out of memory in the middle of a request")


class Plans:
    """backend.client.auto.planning that takes other plans for one latent and for several. asked: the
    requests; spared: plans whose ranks ran out of memory."""

    def __init__(self):
        self.asked, self.spared = [], []

    def plan_for(self, asked, check, show):
        self.asked.append(asked.request(FLUX))
        return (ONE if self.asked[-1].batch == 1 else MORE), ("why",)

    def is_memory_shortage(self, error) -> bool:
        return "ran out of memory" in str(error)

    def spare_more(self, asked, plan) -> bool:
        self.spared.append((asked.request(FLUX), plan))
        return False


@pytest.fixture
def plans(monkeypatch):
    found = Plans()
    monkeypatch.setattr(auto_plan, "planning", found)
    return found


@pytest.fixture
def dit(flux):
    """The handle of a loader that leaves its degrees open."""
    base = ParallelConfig(device="cpu")
    return replace(flux.dit, auto=AutoConfig(gpus="2", base=base), others=())


def test_each_sampling_is_planned_for_its_latent_and_steps(flux, dit, plans, monkeypatch):
    """The loader's plan stayed, whatever was sampled."""
    monkeypatch.setattr(flux, "ours", remote_model(dit))
    assert flux.error(ksampler(flux, steps=2)) <= 1e-4
    assert pool.launched().config == ONE
    noise = torch.randn(2, *flux.noise.shape[1:], generator=torch.Generator().manual_seed(1))
    pair = ksampler(flux, steps=3, noise=noise[..., :8], latent_image=0 * noise[..., :8])
    assert flux.error(pair) <= 1e-4
    assert pool.launched().config == MORE
    height, width = flux.noise.shape[-2:]
    text = flux.positive[0][0].shape[1]
    sizes = [(each.image_tokens, each.batch, each.steps, each.text_tokens) for each in plans.asked]
    assert sizes == [(height * width // 4, 1, 2, text), (height * 2, 2, 3, text)]
    assert all(each.drained and each.prompts == 2 for each in plans.asked)  # which go together


@pytest.mark.parametrize("causal, rows", [(True, 7), (False, 6)])
def test_context_windows_are_planned_for_one_window(flux, dit, plans, monkeypatch, causal, rows):
    """The whole latent was, of which no call of the model has more than a window and the row before it."""
    called = []

    def called_with(executor, x, *args, **kwargs):
        called.append(x.shape[2])
        return executor(x, *args, **kwargs)

    def windowed(model):
        settings = {"context_schedule": "standard_static", "context_stride": 1, "closed_loop": False}
        settings |= {"fuse_method": "pyramid", "dim": 2, "freenoise": False, "causal_window_fix": causal}
        model = ContextWindowsManualNode.execute(model, 6, 2, **settings).result[0]
        model.add_wrapper(WrappersMP.DIFFUSION_MODEL, called_with)
        return ksampler(flux, steps=2)(model)

    monkeypatch.setattr(flux, "ours", remote_model(dit))
    assert flux.error(windowed) <= 1e-4
    (asked,) = plans.asked
    assert max(called) == rows and len(called) > 2 * len(set(called))
    assert asked.image_tokens == -(-rows // 2) * flux.noise.shape[-1] // 2


@pytest.mark.parametrize("length, frames", [(6, 10), (20, 24), (90, 33)])
def test_guides_may_be_in_any_window(dit, plans, length, frames):
    """LTX-Video has their frames behind the video's; a window has those of guides that it overlaps."""
    found = guider(9, 9)
    handler = SimpleNamespace(dim=2, context_length=length, causal_window_fix=True)
    found.model_options["context_handler"] = handler
    guides = [{"latent_shape": [1, 4, 4]}, {"latent_shape": [2, 4, 4]}]
    found.conds["positive"][0]["guide_attention_entries"] = guides
    with auto_plan.one_plan(dit, found, torch.Size((1, 16, 33, 4, 4)), 4):
        pass
    assert plans.asked[-1].image_tokens == frames * 4


def guider(*lengths: int):
    """ComfyUI's guider with prompts of so many tokens."""
    conds = [{"cross_attn": torch.zeros(1, length, 8), "model_conds": {}} for length in lengths]
    return SimpleNamespace(conds={"positive": conds[:1], "negative": conds[1:]}, model_options={})


def test_a_sampling_within_another_keeps_its_plan(dit, plans):
    size = torch.Size((1, 16, 32, 32))
    with auto_plan.one_plan(dit, guider(9), size, 4) as outer:
        with auto_plan.one_plan(dit, guider(9), torch.Size((2, 16, 32, 32)), 4) as inner:
            assert inner.config == outer.config == ONE
        assert auto_plan.as_running(dit).config == ONE
    assert len(plans.asked) == 1


def test_the_next_sampling_needs_less_where_ranks_run_out_of_memory(dit, plans):
    """Not this one, whose solver has begun; and a prompt's tokens count."""
    with pytest.raises(BackendError):
        with auto_plan.one_plan(dit, guider(9, 30), torch.Size((1, 16, 32, 32)), 4):
            raise OUT_OF_MEMORY
    ((request, plan),) = plans.spared
    assert request.text_tokens == 30 and plan == ONE and not auto_plan._under_way


@pytest.mark.parametrize(
    "lengths, cfg, prompts", [((9, 9), 3.0, 2), ((9, 30), 3.0, 1), ((9, 9), 1.0, 1), ((9,), 3.0, 1)]
)
def test_prompts_of_one_call_may_go_to_ranks_of_their_own(dit, plans, lengths, cfg, prompts):
    """ComfyUI joins those of equal lengths, and skips the negative one at cfg 1."""
    found = guider(*lengths)
    found.cfg = cfg
    with auto_plan.one_plan(dit, found, torch.Size((1, 16, 32, 32)), 4):
        pass
    assert plans.asked[-1].prompts == prompts


def test_degrees_by_hand_stay(flux, plans):
    with auto_plan.one_plan(flux.dit, guider(9), torch.Size((2, 16, 32, 32)), 4) as found:
        assert found is flux.dit
    assert not plans.asked
