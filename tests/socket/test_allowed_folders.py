"""Which files a client may have loaded: those below the folders that the launcher named."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from live_backend import CONFIG, backend, checkpoint, free_at_the_end  # noqa: F401  # fixtures
from odd_files import index, transformer
from tiny import write_checkpoint

from backend.client import pool
from backend.client.launching.agent_command import launch_command
from backend.config import ParallelConfig
from backend.config import ParallelConfig as LaunchedConfig
from backend.engine import Engine
from backend.errors import UnsupportedError
from backend.loading.files.allowed_folders import ANYWHERE, Folders
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.protocol import Load, RefusedError
from backend.rank import start
from backend.rank.admission import Admission
from backend.rank.leader import Leader

OUTSIDE = "is not below a folder from which this backend may load"


@pytest.fixture
def models(tmp_path):
    """Folders models (allowed) and disk (not), with a file in each."""
    for name in ("models", "disk"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.safetensors").touch()
    return tmp_path


@pytest.mark.parametrize(
    "path", ["models/a.safetensors", "models/linked.safetensors", "models/folder/a.safetensors"]
)
def test_paths_below_a_root_are_allowed(models, path):
    """Users keep models on other disks and link to them."""
    (models / "models/linked.safetensors").symlink_to(models / "disk/a.safetensors")
    (models / "models/folder").symlink_to(models / "disk", target_is_directory=True)
    Folders.of([str(models / "models")]).check(str(models / path))


def test_a_root_by_another_name_is_allowed(models):
    (models / "other").symlink_to(models / "models", target_is_directory=True)
    Folders.of([str(models / "models")]).check(str(models / "other/a.safetensors"))
    Folders.of([str(models / "other")]).check(str(models / "models/a.safetensors"))
    Folders.of([str(models / "other/")]).check(str(models / "other/a.safetensors"))


@pytest.mark.parametrize(
    "path, says",
    [
        ("{}/disk/a.safetensors", OUTSIDE),
        ("{}/models2/a.safetensors", OUTSIDE),
        ("{}/models/../disk/a.safetensors", "has '..' in it"),
        ("{}/models/folder/../a.safetensors", "has '..' in it"),
        ("models/a.safetensors", "is not absolute"),
        ("", "is not absolute"),
        ("/dev/zero", OUTSIDE),
        ("/proc/self/environ", OUTSIDE),
        ("{}/models/a\0b", "is no path"),
        ("{}/loop", OUTSIDE),
        ("{}/\x1b[31m\n" + "x" * 5000, "is no path|" + OUTSIDE),
    ],
)
def test_other_paths_are_refused(models, path, says):
    (models / "loop").symlink_to(models / "loop")
    with pytest.raises(UnsupportedError, match=says) as error:
        Folders.of([str(models / "models")]).check(path.format(models))
    assert str(error.value).isprintable() and len(str(error.value)) < 1000


def test_without_the_option_any_path_is_allowed():
    assert Folders.of(None) == ANYWHERE
    ANYWHERE.check("/anything/../at all")


def test_with_an_option_of_nothing_no_path_is_allowed():
    with pytest.raises(UnsupportedError, match="there is none"):
        Folders.of([]).check("/a.safetensors")


@pytest.mark.parametrize("lora", [False, True], ids=["model", "lora"])
def test_the_door_looks_at_nothing_else(folder, models, lora):
    """The leader refuses a path outside before the engine, which does not check again, is asked for it."""
    outside = str(write_checkpoint(folder / "flux.safetensors"))
    inside = str(_linked(models / "models/flux.safetensors", Path(outside)))
    engine = Engine(ParallelConfig(), mesh.single(), Folders.of([str(models / "models")]))
    gather = SimpleNamespace(all_gather_object=lambda value: [value])
    admission = Admission(ParallelConfig(), gather, engine.memory)
    leader = SimpleNamespace(engine=engine, admission=admission, _holds_others=lambda job: False)
    message = Load(inside, loras=[[outside, 1.0]]) if lora else Load(outside)
    with pytest.raises(UnsupportedError, match=OUTSIDE):
        Leader.on_load(leader, None, message)
    assert callable(Leader.on_load(leader, None, Load(inside, loras=[[inside, 1.0]])))
    engine.load("m", inside, "default")


def _linked(link: Path, target: Path) -> Path:
    link.symlink_to(target)
    return link


def test_an_index_may_link_into_an_allowed_folder(tmp_path, folder):
    odd = transformer(tmp_path, write_checkpoint(folder / "plain.safetensors"))
    (tmp_path / "disk").mkdir()
    whole = next(odd.glob("*.safetensors")).rename(tmp_path / "disk/whole.safetensors")
    (odd / "part.safetensors").symlink_to(whole)
    index(odd, "part.safetensors")
    assert open_checkpoint(str(odd), Folders.of([str(tmp_path)])).block_count
    for folders in (Folders.of([str(odd)]), ANYWHERE):
        with pytest.raises(UnsupportedError, match="leads out of the model's folder"):
            open_checkpoint(str(odd), folders)


def test_the_launcher_always_names_folders():
    command = launch_command(LaunchedConfig(), "unix:/x", Path("/x"), ["/a", "/b c"])
    assert command[command.index("--models") + 1 :][:2] == ["/a", "/b c"]
    assert "--models" in launch_command(LaunchedConfig(), "unix:/x", Path("/x"))


@pytest.mark.parametrize(
    "given, roots",
    [([], None), (["--models"], ()), (["--models", "/a", "/b", "--models", "/c"], ("/a", "/b", "/c"))],
)
def test_the_option_of_a_backend_started_by_hand(given, roots):
    options = start.arguments().parse_args(["--address", "unix:/x", *given, "--parent-pipe"])
    assert Folders.of(options.models).roots == roots


def test_a_client_loads_from_the_allowed_folders_alone(backend, checkpoint):
    pids, outside = (
        backend.welcome.pids,
        str(Path(__file__).parents[1] / "golden/flux-dev__euler_simple.safetensors"),
    )
    for path, loras in ((outside, ()), ("/etc/passwd", ()), (checkpoint, [(outside, 1.0)])):
        with pytest.raises(RefusedError, match=OUTSIDE):
            backend.load(path, loras=loras)
    assert backend.load(checkpoint).family == "flux"
    assert pool.backend_for(CONFIG) is backend and backend.welcome.pids == pids


def test_a_folder_that_is_allowed_later_needs_another_backend(monkeypatch, backend):
    monkeypatch.setattr(pool, "_folders", {*pool._folders})
    pool.allow("/models of another kind")
    assert not backend.may_load and not backend.can_become(CONFIG)
