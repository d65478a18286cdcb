"""How far one process is from every golden latent, in its standard deviations, on this machine: writes
tests/golden_distances.json, which scripts/families_table.py puts into docs/models.md and the tests hold to a
factor of ten (another machine rounds in another order).

    python scripts/golden_distances.py [--all]      # new cases alone without --all
"""

import json
import math
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/support")]
import torch
from families import CASES, golden, to_vae_units
from tiny import FLUX_CASES, error_in_std, golden_request, write_checkpoint
from variants import GOLDENS, golden_variant, write

from backend.config import ParallelConfig
from backend.engine import Engine
from backend.parallel import mesh
from backend.sampling.step_loop import Callbacks

DISTANCES = ROOT / "tests/golden_distances.json"


def distance(name: str, folder: Path) -> float:
    """Of the case FAMILY__CASE, or of a variant."""
    engine = Engine(ParallelConfig(), mesh.single())
    family, _, case = name.partition("__")
    path = folder / f"{family}.safetensors"
    written = write_checkpoint(path, family) if case else write(path, name)
    engine.load("tiny", str(written), "default")
    if not case:
        sample, latent = golden_variant(name)
        return error_in_std(engine.sample(sample, Callbacks())[0], latent)
    sample, latent = golden_request(case) if family == "flux-dev" else golden(name)
    samples, _ = engine.sample(sample, Callbacks())
    return error_in_std(to_vae_units(family, samples, sample.latent_shapes), latent)


def rounded_up(x: float) -> float:
    """To one digit."""
    unit = 10.0 ** math.floor(math.log10(x))
    return float(f"{math.ceil(x / unit) * unit:.0e}")


def main():
    torch.set_num_threads(1)
    golden_variants = (path.stem for path in GOLDENS.iterdir())
    names = sorted([*CASES, *(f"flux-dev__{case}" for case in FLUX_CASES), *golden_variants])
    known = {} if "--all" in sys.argv[1:] else json.loads(DISTANCES.read_text())
    with tempfile.TemporaryDirectory() as folder:
        found = {name: known.get(name) or rounded_up(distance(name, Path(folder))) for name in names}
    DISTANCES.write_text(json.dumps(found, indent=1) + "\n")
    print(DISTANCES.read_text(), end="")


if __name__ == "__main__":
    main()
