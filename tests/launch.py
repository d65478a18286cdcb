"""Runs a rank program under torchrun and returns what it wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path


def run_ranks(program: str, ranks: int, folder: Path, *arguments: str, seconds: float = 600) -> object:
    """The JSON that rank 0 of tests/ranks/PROGRAM wrote into its last argument; fails with the ranks' output."""
    out = folder / f"{Path(program).stem}-{ranks}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks),
               str(Path(__file__).parent / "ranks" / program), *arguments, str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return json.loads(out.read_text())
