"""num_pipeline_patch 0 on live ranks: they run the number of patches that the report says."""

import json
from dataclasses import replace

import pytest
import torch
from live_backend import CONFIG, backend, checkpoint, free_at_the_end  # noqa: F401  # fixtures
from published import FLUX, RTX4090
from safetensors import safe_open
from safetensors.torch import save_file
from tiny import golden_request

from backend.cli import __main__ as cli
from backend.client import pool
from backend.client.auto import measurements

#: 400 tokens: each of three patches is long enough.
LATENT = [16, 40, 40]
STEPS = 8
#: Links so slow that stages wait for what goes back to the first one.
SLOW = replace(RTX4090, p2p=2e7, all_to_all={2: 2e7}, on_host=True)


@pytest.fixture
def sampled(backend, checkpoint, tmp_path, monkeypatch, capsys):  # noqa: F811  # the fixture
    """sampled(number) -> the latent of the command ``sample`` with that num_pipeline_patch, how often rank 0
    called the model, and what is printed, on a machine of slow links that was measured before."""
    monkeypatch.setattr(measurements, "known", lambda choice, device, indices: (FLUX, SLOW))
    monkeypatch.setattr(pool, "close_all", lambda: None)  # others share the ranks
    monkeypatch.setattr(pool, "allow", lambda *folders: None)  # one more would end them
    tensors = golden_request("euler_simple")[0].tensors
    prompt = {name: tensors[f"positive.{name}"] for name in ("c_crossattn", "y", "guidance")}
    save_file(prompt, tmp_path / "positive.safetensors")
    request = {"model": checkpoint, "positive": "positive.safetensors", "latent": LATENT, "steps": STEPS}

    def run(number: int) -> tuple[torch.Tensor, int, str]:
        out = f"{number}.safetensors"
        (tmp_path / "request.json").write_text(json.dumps(request | {"out": out}))
        config = {"pipefusion_degree": 2, "device": "cpu", "num_pipeline_patch": number}
        assert cli.main(["sample", str(tmp_path / "request.json"), "--config", json.dumps(config)]) == 0
        with safe_open(tmp_path / out, "pt") as file:
            stats = json.loads(file.metadata()["stats"])
            return file.get_tensor("samples"), stats["model_calls"], capsys.readouterr().err

    return run


def calls(patches: int) -> int:
    """Calls of the model on a rank: one in the step of warm-up, then one a patch."""
    return 1 + (STEPS - 1) * patches


def test_ranks_run_the_number_that_is_reported(sampled, backend):  # noqa: F811  # the fixture
    """Bit for bit the latent of that number set by hand, and not that of as many patches as stages."""
    latent, called, said = sampled(0)
    assert "num_pipeline_patch 0: 3 patches, about " in said and called == calls(3)
    by_hand, called, said = sampled(3)
    assert torch.equal(latent, by_hand) and called == calls(3) and "patches" not in said
    as_stages, called, _ = sampled(2)
    assert not torch.equal(latent, as_stages) and called == calls(2)
    assert torch.equal(sampled(0)[0], latent)
    assert pool.backend_at_hand(CONFIG) is backend


def test_ranks_start_with_what_the_user_has_set(sampled, monkeypatch):
    """What they lack is told by it (Admission.config)."""
    asked = []
    backend_for = pool.backend_for

    def recorded(config, **named):
        asked.append(config)
        return backend_for(config, **named)

    monkeypatch.setattr(pool, "backend_for", recorded)
    sampled(0)
    assert [config.num_pipeline_patch for config in asked] == [0]
