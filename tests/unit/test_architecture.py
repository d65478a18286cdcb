"""The rooms of the project and who may import whom, read from the source with ast."""

import ast
import re
from collections import defaultdict
from functools import cache
from graphlib import TopologicalSorter
from itertools import combinations

import pytest
from source_files import ROOT, SOURCES, assigned, complexity, lines, python_files
from source_imports import REGISTRY, all_imports, facts, imports, registered, under

#: Rooms from bottom to top: files of a room import rooms above it in this list alone. A room is a folder, or
#: a file at the top of the backend.
LAYERS = [
    "backend",
    "backend.errors",
    "backend.units",
    "backend.runtime",
    "backend.hardware",
    "backend.shares",
    "backend.config",
    "backend.protocol",
    "backend.models",
    "backend.quantization",
    "backend.parallel",
    "backend.planner",
    "backend.loading",
    "backend.serving",
    "backend.sampling",
    "backend.client",
    "backend.rank_plan",
    "backend.preflight",
    "backend.engine",
    "backend.rank",
    "backend.probe",
    "backend.worker",
    "backend.cli",
    "nodes.comfy_models",
    "nodes.diffusers_folder",
    "nodes.graph",
    "nodes.host",
    "nodes.panel",
    "nodes",
]
#: What ComfyUI's process imports of the backend: rooms, and single files that need nothing.
SHARED = ("backend.client", "backend.planner", "backend.protocol", "backend.config", "backend.errors")
SHARED_FILES = (
    *(
        "backend.loading.files.regular_files",
        "backend.parallel.stage_split",
        "backend.hardware.device_memory",
    ),
    *(
        "backend.shares",
        "backend.hardware.cgroup_limits",
        "backend.hardware.gpu_sharing",
        "backend.runtime.torch_version",
    ),
    *(
        "backend.quantization.dequantized_cache",
        "backend.runtime.install_command",
        "backend.units",
        "backend.quantization.lora_bytes",
    ),
    *(
        "backend.loading.lora.lora_file_bytes",
        "backend.loading.lora.lora_spellings",
        "backend.runtime.whole_files",
    ),
    "backend.runtime.callbacks",
)
STDLIB_ONLY = (
    "backend.config",
    "backend.errors",
    "backend.hardware.gpu_sharing",
    "backend.runtime.install_command",
    "backend.quantization.dequantized_cache",
    "backend.runtime.parent_pipe",
    "backend.loading.files.allowed_folders",
    "backend.loading.files.regular_files",
    "backend.parallel.modulation.modulation_chunks",
    "backend.parallel.stage_split",
    "backend.parallel.wire_bytes",
    "backend.planner.auto_config",
    "backend.planner.candidates",
    "backend.planner.choose",
    "backend.planner.cost",
    "backend.planner.drift",
    "backend.planner.machine",
    "backend.planner.memory",
    "backend.planner.model_shape",
    "backend.planner.option",
    "backend.planner.question",
    "backend.planner.rank_shares",
    "backend.shares",
    "backend.runtime.torch_version",
    *("backend.units", "backend.quantization.lora_bytes", "backend.runtime.whole_files"),
    *("backend.loading.lora.lora_file_bytes", "backend.loading.model_key", "backend.runtime.callbacks"),
    "backend.protocol.handshake",
    "backend.protocol.heartbeats",
    "backend.protocol.load_choices",
    "backend.protocol.messages",
    "backend.protocol.solver_names",
    "backend.protocol.step_times",
    *("backend.client.machines.machine_link", "backend.client.silence", "backend.client.step_timer"),
)
#: Imported by ComfyUI's process: these packages must not come with them.
HEAVY = ("diffusers", "yunchang", "transformers", "accelerate", "torch.distributed")
#: Opens a folder with diffusers' own pipeline, which it imports then.
LATE = {"nodes.diffusers_folder.pipelines"}
#: Only these rooms speak torch.distributed; the rest uses their verbs.
COLLECTIVES = (
    "backend.parallel",
    "backend.serving.broadcast",
    "backend.sampling.step_loop",
    "backend.worker",  # torchrun's record of errors
)
#: These rooms name families: what a family is, and from which files and keys it is recognised.
NAMING = ("backend.models", "backend.loading")
#: All that solvers know of the sampling around them.
OF_SOLVERS = ("backend.sampling.solvers", "backend.sampling.prediction")
#: Pairs of files that import each other: the second names a type of the first, where types are checked alone.
CIRCLES = {
    ("backend.loading.checkpoint", "backend.loading.weight_loading"),
    ("backend.quantization.packed_weight", "backend.quantization.kernels"),
    ("backend.serving.server", "backend.serving.job_queue"),
}
#: Folders of the client in the order in which imports point.
OF_CLIENT = ("auto", "launching", "machines")
#: Limits of a file and of a function, at 110 columns.
FILE_LINES, FUNCTION_LINES, COMPLEXITY, FAMILY_LINES = 350, 50, 12, 40
#: Files and functions over a limit -> why. An entry that is not needed any more fails.
EXCEPTIONS: dict[str, str] = {}


def test_imports_within_the_pack_are_relative():
    """ComfyUI imports the pack under its folder's name: there is no ``backend`` there, as in tests."""
    assert not {module for module in SOURCES if facts(module).absolute & {"backend", "nodes"}}


def room(module: str) -> str:
    """The folder of a module, or the file at the top of the backend."""
    parts = module.split(".")
    if parts[0] == "backend":
        return ".".join(parts[:2])
    return ".".join(parts[:2]) if ".".join(parts[:2]) in LAYERS else parts[0]


def arrows() -> dict[tuple[str, str], set[tuple[str, str]]]:
    """(room, room that it imports) -> the files between which the arrow runs."""
    found = defaultdict(set)
    for module in SOURCES:
        for imported in imports(module) & SOURCES.keys():
            if room(module) != room(imported):
                found[room(module), room(imported)].add((module, imported))
    return found


def test_every_room_has_a_layer():
    assert {room(module) for module in SOURCES} == set(LAYERS)


def test_no_arrow_runs_up():
    """So there is no cycle: an order of all rooms is one."""
    up = {
        between
        for (above, below), files in arrows().items()
        if LAYERS.index(below) > LAYERS.index(above)
        for between in files
    }
    assert not up


def test_an_arrow_that_runs_up_is_seen():
    """The graph is read from the source: known arrows are in it."""
    found = arrows()
    assert ("backend.sampling.validation", "backend.errors") in found["backend.sampling", "backend.errors"]
    assert found["backend.loading", "backend.models"] and found["nodes", "nodes.host"]
    assert LAYERS.index("backend.models") < LAYERS.index("backend.loading")


@pytest.mark.parametrize("module", [m for m in SOURCES if under(m, ["backend"])])
def test_backend_never_imports_comfy(module):
    packages = {m.split(".")[0] for m in imports(module)} - {"comfy_kitchen"}  # a library of kernels
    assert not [name for name in packages if name.startswith(("comfy", "nodes", "folder_paths"))]


@pytest.mark.parametrize("module", [m for m in SOURCES if under(m, ["nodes"])])
def test_nodes_reach_the_backend_through_its_shared_rooms_only(module):
    reached = {m for m in imports(module) if under(m, ["backend"])}
    assert not [m for m in reached if not under(m, SHARED) and m not in SHARED_FILES]
    own = facts(module).at_start if module in LATE else imports(module)
    assert not [m for m in own if under(m, HEAVY)]


@pytest.mark.parametrize("module", [m for m in SOURCES if under(m, SHARED) or m in SHARED_FILES])
def test_shared_rooms_bring_nothing_heavy(module):
    assert not [m for m in all_imports(module) if under(m, HEAVY)]


@pytest.mark.parametrize("module", STDLIB_ONLY)
def test_shared_files_need_nothing(module):
    heavy = ("torch", "safetensors", "diffusers")
    assert not [m for m in all_imports(module) if m.split(".")[0] in heavy]


@pytest.mark.parametrize("module", [m for m in SOURCES if not under(m, COLLECTIVES)])
def test_collectives_live_in_their_rooms(module):
    assert not [m for m in imports(module) if under(m, ["torch.distributed"])]


@pytest.mark.parametrize("module", [m for m in SOURCES if under(m, ["backend"]) and not under(m, NAMING)])
def test_the_engine_names_no_family(module):
    body = ast.parse(SOURCES[module].read_text()).body
    code = "\n".join(ast.unparse(node) for node in body if not isinstance(node, ast.Expr)).lower()
    names = [family for family in FAMILY_FILES if f"{family}." in code or f"'{family}'" in code]
    assert not [*names, *(family for family in FAMILY_FILES if f"'{family.replace('_', '-')}'" in code)]


FAMILY_FILES = {
    path.stem: path
    for path in sorted((ROOT / "backend/models").glob("*.py"))
    if re.search(r"^FAMILY\b", path.read_text(), re.MULTILINE)
}


@pytest.mark.parametrize("module", [m for m in SOURCES if under(m, ["backend.models.common"])])
def test_what_families_share_knows_none_of_them(module):
    families = {f"{REGISTRY}.{name}" for name in FAMILY_FILES}
    assert not imports(module) & {*families, REGISTRY}


@pytest.mark.parametrize("module", [m for m in SOURCES if under(m, ["backend.sampling.solvers"])])
def test_solvers_know_predictions_alone(module):
    assert not [m for m in imports(module) if under(m, ["backend.sampling"]) and not under(m, OF_SOLVERS)]


def test_rooms_within_a_room_import_one_way():
    """As the folders of backend.client do: auto plans, and launches ranks; launching links machines."""
    inner = {module: ".".join(module.split(".")[:3]) for module in SOURCES if module.count(".") > 2}
    found = {
        (inner[module], inner[imported])
        for module in inner
        for imported in imports(module) & inner.keys()
        if inner[module] != inner[imported] and room(module) == room(imported)
    }
    of_client = {(above, below) for above, below in found if above.startswith("backend.client")}
    assert of_client <= set(combinations([f"backend.client.{name}" for name in OF_CLIENT], 2)) and of_client
    assert not {(above, below) for above, below in found if (below, above) in found}


def test_files_import_each_other_in_no_circle():
    """But for CIRCLES, of which one arrow is there for a type alone."""
    arrows_left = {module: set(imports(module)) & SOURCES.keys() - {module} for module in SOURCES}
    for first, second in CIRCLES:
        assert first in imports(second) and first not in facts(second).at_start
        arrows_left[second].remove(first)
    order = TopologicalSorter(arrows_left)
    order.prepare()  # raises CycleError, which names the files
    assert order.is_active()


@pytest.mark.parametrize("name", FAMILY_FILES)
def test_a_family_is_one_short_literal_in_one_file(name):
    literal = assigned(FAMILY_FILES[name])["FAMILY"]
    assert lines(literal) <= FAMILY_LINES


def test_every_family_file_is_in_the_registry():
    """Once. To the rules above it imports them, and what they import."""
    assert sorted(registered()) == sorted(FAMILY_FILES)
    found = all_imports(REGISTRY)
    assert {f"{REGISTRY}.{name}" for name in FAMILY_FILES} <= found
    assert any(under(each, HEAVY) for each in found)


def test_root_package_needs_no_comfyui():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert [(node.level, node.module) for node in froms] == [(1, "nodes.extension")]
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]


@cache
def over_limits() -> dict[str, int]:
    """Files over FILE_LINES, and functions of the product over FUNCTION_LINES or COMPLEXITY -> their
    number."""
    found = {str(path): len((ROOT / path).read_text().splitlines()) for path in python_files()}
    found = {path: size for path, size in found.items() if size > FILE_LINES}
    for module in SOURCES:
        for name, (size, branches) in facts(module).functions.items():
            if size > FUNCTION_LINES or branches > COMPLEXITY:
                found[f"{module}.{name}"] = size if size > FUNCTION_LINES else branches
    return found


def test_files_and_functions_are_short_and_simple():
    over = over_limits()
    assert not over.keys() - EXCEPTIONS.keys(), over


def test_lines_fit():
    """ruff lets a line pass that has no blank in it, as a pattern."""
    texts = {str(path): (ROOT / path).read_text().splitlines() for path in python_files()}
    long = [(name, n) for name, text in texts.items() for n, line in enumerate(text, 1) if len(line) > 110]
    assert not long


def test_all_python_files_are_measured():
    files = {str(path) for path in python_files()}
    assert {"__init__.py", "scripts/make_workflows.py", "tests/unit/test_architecture.py"} <= files
    assert {str(path.relative_to(ROOT)) for path in SOURCES.values()} <= files
    assert not [path for path in files if "site-packages" in path]


def test_every_exception_is_needed():
    assert not EXCEPTIONS.keys() - over_limits().keys()
    assert all(EXCEPTIONS.values())


def test_branches_are_counted():
    """As ruff's C901 does."""
    source = "def f(x):\n  for y in x:\n    if y:\n      try: g()\n      except E: pass\n    elif x: pass\n"
    assert complexity(ast.parse(source).body[0]) == 5
