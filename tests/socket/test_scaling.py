"""benchmarks/scaling.py on ranks: forked ones, as backends of these tests have."""

import json
import os
import subprocess
import sys

from benchmarked import BENCHMARKS, SMALL, save_model


def test_scaling_measures_two_ranks(tmp_path):
    model = save_model(tmp_path / "model")
    command = [sys.executable, str(BENCHMARKS / "scaling.py"), *SMALL, "--only", "pipefusion"]
    run = subprocess.run(
        [*command, "--model", model, "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows = {row["scenario"]: row for row in json.loads((tmp_path / "scaling.json").read_text())["rows"]}
    assert {"pipefusion M=2", "pipefusion M=4, 28 steps (projected)", "ceiling"} <= rows.keys()
    assert all(row["seconds"]["median"] > 0 for row in rows.values())
