"""The lines under Load Parallel DiT, with flags of ComfyUI's own command line."""

from types import SimpleNamespace

from comfy_modules import comfy_modules

with comfy_modules():
    from comfy.cli_args import PerformanceFeature, args
    from parallel_dit.backend.client.auto.model_choice import ModelChoice
    from parallel_dit.backend.config import CHOICES, ParallelConfig
    from parallel_dit.nodes.host import plan_report


def test_flags_that_do_not_reach_the_ranks_are_said(monkeypatch):
    """They made one GPU faster than several, and nothing said so."""
    attention = {name: f"attention {name}: a kernel" for name in CHOICES["attention"]}
    ranks = [{"rank": 0, "weight_bytes": 1, "blocks": (0, 9)}]
    info = {"device": "cuda", "dtype": "bfloat16", "attention": attention, "ranks": ranks, "quantized": []}
    config = ParallelConfig(address="unix:/elsewhere")  # whose GPUs are not looked at
    loaded = SimpleNamespace(info=info)
    dit = SimpleNamespace(config=config, loaded=loaded, choice=ModelChoice(""))
    usual = plan_report.loaded_lines(dit)
    assert usual[-1] == "attention auto: a kernel"
    monkeypatch.setattr(args, "use_sage_attention", True)
    monkeypatch.setattr(args, "fast", set(PerformanceFeature))
    assert plan_report.loaded_lines(dit) == [
        *usual,
        "ComfyUI runs with --use-sage-attention, the ranks do not; set attention of "
        "Parallel Config to sage, which needs SageAttention 2.",
        "ComfyUI runs with --fast fp16_accumulation, which the ranks do not have.",
    ]
