"""What a list of requests of python -m backend.cli sample shares: memory of the ranks."""

from types import SimpleNamespace

import pytest

from backend.cli import sample
from backend.client.auto.model_choice import ModelChoice
from backend.config import ParallelConfig
from backend.protocol import RefusedError, Result


@pytest.mark.parametrize("lacking", [{0: 1}, {}])
def test_models_leave_where_memory_is_lacking(monkeypatch, lacking):
    """Of a list, those of its other requests; a refusal for another reason is none of memory."""
    request = SimpleNamespace(choice=ModelChoice("/a"), out="o")
    other = ModelChoice("/b")
    asked = []

    def sampled(backend, request, config, keep):
        asked.append(tuple(keep))
        if keep:
            refusal = RefusedError("no")
            refusal.lacking = lacking
            raise refusal
        return Result({"seconds": 1.0}, {"samples": None}), []

    monkeypatch.setattr(sample, "_sampled", sampled)
    monkeypatch.setattr(sample, "write_result", lambda *_: None)
    given = (SimpleNamespace(models={other: "b"}), request, ParallelConfig(), [request.choice, other])
    if lacking:
        sample.run(*given)
    else:
        with pytest.raises(RefusedError):
            sample.run(*given)
    assert asked == [(request.choice, other), ()][: 1 + len(lacking)]
