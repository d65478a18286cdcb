"""Makes the pack importable as ``parallel_dit``, as ComfyUI imports it (by its folder, whatever that is
called), without ComfyUI. Its backend is the tests' own ``backend``: each class exists once."""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BACKEND = "parallel_dit.backend"


class OneBackend(MetaPathFinder, Loader):
    """Finds the modules of ``parallel_dit.backend`` among those of ``backend``."""

    def find_spec(self, fullname, path=None, target=None):
        is_of_backend = fullname == BACKEND or fullname.startswith(f"{BACKEND}.")
        return ModuleSpec(fullname, self) if is_of_backend else None

    def exec_module(self, module):
        own_name = module.__name__.removeprefix("parallel_dit.")
        sys.modules[module.__name__] = importlib.import_module(own_name)


def _load(name: str, folder: Path):
    path = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=[str(folder)])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


if "parallel_dit" not in sys.modules:
    if (
        importlib.util.find_spec("backend") is None
    ):  # the path is ComfyUI's, whose modules this folder would hide
        _load("backend", ROOT / "backend")
    sys.meta_path.insert(0, OneBackend())
    _load("parallel_dit", ROOT)
