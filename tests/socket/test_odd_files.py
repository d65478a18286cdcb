"""Files that claim more than they hold, that are no files, and whose names are made to mislead: each is
refused at once and in little memory, and the backend runs on."""

import resource
import time
import tracemalloc

import pytest
from live_backend import CONFIG, backend, checkpoint, free_at_the_end  # noqa: F401  # fixtures
from odd_files import ODD, header, index, transformer
from safetensors.torch import load_file
from tiny import write_checkpoint

from backend.client import pool
from backend.config import ParallelConfig
from backend.engine import Engine
from backend.errors import UnsupportedError, quoted, reason, some
from backend.loading.files.header_limits import shards
from backend.loading.recognition import open_checkpoint
from backend.parallel import mesh
from backend.protocol import RefusedError

#: A refusal takes well under a second; a machine that is busy with other tests may need longer.
SECONDS, BYTES = 5.0, 200 << 20


@pytest.fixture(scope="module")
def plain(folder):
    return write_checkpoint(folder / "flux-plain.safetensors")


@pytest.fixture
def engine():
    return Engine(ParallelConfig(), mesh.single())


@pytest.mark.parametrize("make, says", ODD.values(), ids=ODD)
def test_odd_files_are_refused_at_once(tmp_path, plain, engine, monkeypatch, make, says):
    monkeypatch.chdir(tmp_path)
    path = make(tmp_path, plain)
    started = time.perf_counter()
    with pytest.raises(UnsupportedError, match=says) as error:
        engine.check_load(str(path), "default")
    seconds = time.perf_counter() - started
    tracemalloc.start()  # which makes everything slower
    with pytest.raises(UnsupportedError, match=says):
        engine.check_load(str(path), "default")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    print(f"{seconds:.3f} s, {peak / 2**20:.1f} MiB")
    assert seconds < SECONDS and peak < BYTES
    assert "could not be checked" not in str(error.value)  # the refusal of what no check foresaw
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000


def test_a_sparse_file_of_a_terabyte_is_mapped_and_not_read(tmp_path, plain, engine):
    """Larger than any machine's memory."""
    entries, at = {}, 0
    for key, value in load_file(plain).items():
        entries[key] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    entries["vae.other"] = {"dtype": "F32", "shape": [1 << 38], "data_offsets": [at, at + (1 << 40)]}
    path = header(tmp_path / "sparse.safetensors", entries, at + (1 << 40))
    started, memory = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert engine.check_load(str(path), "default").checkpoint.block_count
    assert time.perf_counter() - started < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < BYTES


NASTY = "a\n\x1b[31mred\u202egnol\x00" + "x" * 10**6


def test_names_out_of_files_are_cut_and_escaped(tmp_path, engine):
    header(tmp_path / "n.safetensors", {NASTY: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    with pytest.raises(UnsupportedError, match="is no transformer of a supported family") as error:
        engine.check_load(str(tmp_path / "n.safetensors"), "default")
    message = str(error.value)
    assert message.isprintable() and message.isascii() and len(message) < 1000
    assert r"'a\n\x1b[31mred\u202egnol\x00xx" in message and "... (1,000,016 characters)" in message


def test_quoting():
    assert quoted("img_in.weight") == "'img_in.weight'" and quoted([1, "é"]) == r"[1, '\xe9']"
    assert (
        len(quoted("\U000e0001" * 100)) < 1000 and quoted("y" * 90, 10) == "'yyyyyyyyyy'... (90 characters)"
    )
    assert some(["a", "b", "c"], 2) == "'a', 'b', ..." and some(iter(["a"]), 2) == "'a'"
    assert reason(ValueError("a\n b\x1b[1m" + "z" * 1000)) == r"a b\x1b[1m" + "z" * (300 - 7)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b", "", "a\0b"])
def test_an_index_names_files_of_its_folder(tmp_path, name):
    with pytest.raises(UnsupportedError, match="which is not in its folder"):
        shards(index(tmp_path / "model", name))


def test_links_of_an_index_stay_with_the_model(tmp_path):
    odd = index(tmp_path / "model", "part.safetensors")
    (tmp_path / "secret").write_bytes(b"s")
    (tmp_path / "model/part.safetensors").symlink_to("../secret")
    with pytest.raises(UnsupportedError, match="'part.safetensors', a link that leads out of the model's"):
        shards(odd)


@pytest.mark.parametrize("linked", [False, True])
def test_links_of_hugging_faces_cache_work(tmp_path, plain, linked):
    model = tmp_path / "models--owner--name"
    snapshot = model / "snapshots/abc/transformer"
    made = transformer(tmp_path, plain)
    snapshot.parent.mkdir(parents=True)
    made.rename(snapshot)
    (model / "blobs").mkdir()
    whole = next(snapshot.glob("*.safetensors")).rename(model / "blobs/0123")
    (snapshot / "part.safetensors").symlink_to("../../../blobs/0123")
    index(snapshot, "part.safetensors")
    if linked:  # a user's link into the cache
        (tmp_path / "mine").symlink_to(snapshot, target_is_directory=True)
        snapshot = tmp_path / "mine"
    assert open_checkpoint(str(snapshot)).block_count
    whole.rename(tmp_path / "elsewhere")
    (model / "blobs/0123").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsupportedError, match="leads out of the model's folder"):
        open_checkpoint(str(snapshot))


#: The six of them that held rank 0 for longer than anybody waits, or for good.
LIVE = ("1e9 layers", "block 1e9", "1.2 M tensors", "gguf array of 2**40", "gguf pipe", "pipe for the index")


def test_a_backend_refuses_them_and_runs_on(tmp_path, plain, backend, checkpoint):
    pids = backend.welcome.pids
    for i, name in enumerate(LIVE):
        make, says = ODD[name]
        (tmp_path / str(i)).mkdir()
        path, started = make(tmp_path / str(i), plain), time.perf_counter()
        with pytest.raises(RefusedError, match=says):
            backend.load(str(path))
        seconds = time.perf_counter() - started
        print(f"{name}: {seconds:.3f} s")
        assert seconds < SECONDS
    assert backend.load(checkpoint).family == "flux"
    assert pool.backend_for(CONFIG).welcome.pids == pids
