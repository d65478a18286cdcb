"""How a rank begins, from its command line, configuration, token and meeting place, and how it ends.

The launcher (client/launching/launcher.py) holds the write end of a pipe that is standard input of every
rank. The first rank of each machine reads one line, {"token", "config"}, and passes the configuration on
through the ranks' store, a file in their private folder. The token goes to rank 0 alone: never on a command
line, in a file or in an environment. A backend that is started by hand gets the configuration on the command
line and the token from a private file or the environment (docs/security.md)."""

import argparse
import faulthandler
import json
import os
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from ..config import MAX_CPU_RANKS, ConfigError, ParallelConfig
from ..hardware.gpu_sharing import shares_gpu
from ..loading.files.allowed_folders import ANYWHERE, Folders
from ..parallel import mesh
from ..protocol.handshake import MIN_TOKEN
from ..protocol.heartbeats import Heartbeats
from ..runtime.parent_pipe import be_killed_with_parent, end_with_parent

TOKEN_VARIABLE = "PARALLEL_DIT_TOKEN"
#: Key of the ranks' store under which the first rank of a machine leaves the configuration that it has read.
_CONFIG_KEY = "parallel-dit/config"


@dataclass(frozen=True)
class Start:
    """What a rank begins with. ``token`` is empty on every rank but 0; ``store`` is the ranks' meeting place,
    None for torchrun's own, as on several machines; ``folders``: from which files are loaded; ``beats``: the
    launcher's memory, if there is one."""

    address: str
    config: ParallelConfig
    device: str
    token: str = ""
    store: mesh.dist.FileStore | None = None  # pyright: ignore[reportPrivateImportUsage]  # the public name
    folders: Folders = ANYWHERE
    beats: Heartbeats | None = None


def begin() -> Start:
    """Read the command line and what it points to; ConfigError for what cannot run here."""
    options = arguments().parse_args()
    sys.stdout = LossyLog(sys.stdout)
    sys.stderr = LossyLog(sys.stderr)
    _leave_no_core()
    faulthandler.register(signal.SIGUSR1, file=2)  # before its first beat: the launcher may ask for it then
    beats = _beat(options.heartbeats) if options.heartbeats else None
    leads = int(os.environ["RANK"]) == 0
    store = mesh.file_store(options.store) if options.store else None
    if options.store:
        ready_file(options.store, os.environ["RANK"]).touch()
    if options.parent_pipe:
        end_with_parent()
        text, token = _from_parent(store)
        be_killed_with_parent()
    else:
        text = options.config
        token = own_token(options.token_file) if leads else ""
    os.environ.pop(TOKEN_VARIABLE, None)
    # the launcher, or CUDA_VISIBLE_DEVICES, made exactly those visible, numbered from 0
    config = replace(ParallelConfig(**json.loads(text)).validate(), gpus="")
    # the file is of one machine
    meeting = store if os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"] else None
    device = _device(config)
    folders = Folders.of(options.models)
    return Start(options.address, config, device, token, store=meeting, folders=folders, beats=beats)


def arguments() -> argparse.ArgumentParser:
    """Return the parser of a rank's command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True, help="unix:PATH or tcp:HOST:PORT on which rank 0 listens")
    parser.add_argument("--config", default="{}", help="the ParallelConfig as JSON, for a start by hand")
    parser.add_argument("--token-file", help=f"a file of this user alone with the token; or {TOKEN_VARIABLE}")
    parser.add_argument("--store", help="a file, in a private folder of one machine, where the ranks meet")
    parser.add_argument(
        "--parent-pipe",
        action="store_true",
        help="standard input is the launcher's pipe: token and configuration come through it, and every rank "
        "ends at its end; needs --store",
    )
    parser.add_argument("--heartbeats", help="memory of the launcher in which the ranks of a machine count")
    parser.add_argument(
        "--models",
        nargs="*",
        action="extend",
        help="folders below which clients may have files loaded; without this option, any file",
    )
    return parser


def ready_file(store: str, rank: str) -> Path:
    """Return the file next to ``store`` that says that a rank has imported everything."""
    return Path(f"{store}.ready-{rank}")


def linked_file(store: str) -> Path:
    """Return the file next to ``store`` that says that every rank has received what the others sent."""
    return Path(f"{store}.linked")


def own_token(path: str | None) -> str:
    """Return the token of a backend that is started by hand, from the file ``path`` or the environment.
    Raises ConfigError where others can read the file or the token could be guessed."""
    if path:
        with open(path) as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise ConfigError(f"the token's file {path} can be read by other users; chmod 600 it.")
            token = file.read().strip()
    else:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"the token ({path or TOKEN_VARIABLE}) has {len(token)} characters, which could be guessed; give "
            f"at least {MIN_TOKEN} random ones, as `openssl rand -hex 32` prints."
        )
    return token


def _from_parent(store) -> tuple[str, str]:
    """Return the configuration as JSON, and on rank 0 the token. The ranks of a machine share one pipe: the
    first of them reads its line and passes the configuration on. Only rank 0's launcher sends a token."""
    if os.environ["LOCAL_RANK"] != "0":
        return store.get(_CONFIG_KEY).decode(), ""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := os.read(0, 1 << 16)):
            raise ConnectionError("the launcher ended before it had said what to run")
        line += more
    sent = json.loads(line)
    text = json.dumps(sent["config"])
    store.set(_CONFIG_KEY, text)
    return text, sent["token"] if os.environ["RANK"] == "0" else ""


def _leave_no_core():
    """Have a crash write no core dump: gigabytes of weights, and the token, into the folder of the logs."""
    import resource  # commands that import this file run under Windows, too

    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def _beat(path: str) -> Heartbeats | None:
    """Beat where the launcher looks, or go on unwatched where its memory cannot be opened."""
    try:
        beats = Heartbeats.join(path)
    except OSError as error:
        print(f"No heartbeats: {error}. This rank is not watched.", file=sys.stderr)
        return None
    beats.start(int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"]))
    return beats


class LossyLog:
    """Standard output or error, into a file whose disk may be full: what cannot be written is lost, and what
    the rank was about to do is done."""

    def __init__(self, stream):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``; drop it where the disk is full. Return the number of characters."""
        try:
            return self._stream.write(text)
        except OSError:
            return len(text)

    def flush(self):
        """Flush the stream; ignore a full disk."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str):
        return getattr(self._stream, name)


def run_and_exit(main: Callable[[], None]) -> NoReturn:
    """Run ``main`` and end this process: with status 1, and a traceback on stderr, for what it raises."""
    status = 0
    try:
        main()
    except BaseException:
        status = 1
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # at once: destructors of process groups wait for peers that may be gone


def _device(config: ParallelConfig) -> str:
    """Return "cuda" or "cpu". Raises ConfigError where torchrun started another number of ranks, or more of
    them on this machine than it has GPUs."""
    ranks = int(os.environ["WORLD_SIZE"])
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    if config.world_size != ranks:
        raise ConfigError(f"{config.product}, but torchrun started {ranks}; give it --nproc-per-node to fit.")
    gpus = torch.cuda.device_count()
    if here == ranks:
        device = config.resolve_device(gpus)
    else:
        device = device_of_some(config, device=config.device, ranks=here, gpus_here=gpus)
    if device == "cuda" and not mesh.dist.is_nccl_available():
        raise ConfigError(
            "device is cuda, but this torch was built without NCCL, through which GPUs talk; install torch "
            "from pytorch.org, or set device to cpu."
        )
    return device


def device_of_some(config: ParallelConfig, device: str, ranks: int, gpus_here: int) -> str:
    """Return "cuda" or "cpu" for so many ``ranks`` of ``config`` on one of several machines. Raises
    ConfigError where they do not fit on it."""
    on = ParallelConfig(device=device).resolve_device(gpus_here)
    all_ranks = f"this machine would run {ranks} of the {config.world_size} ranks"
    if on == "cuda" and not shares_gpu() and ranks > gpus_here:
        raise ConfigError(
            f"{all_ranks} and has {gpus_here} GPU{'s' * (gpus_here != 1)}; change --nnodes or a degree, or "
            f"set device to cpu for a small model."
        )
    if on == "cpu" and ranks > MAX_CPU_RANKS:
        raise ConfigError(
            f"{all_ranks}, and at most {MAX_CPU_RANKS} on the CPU; change --nnodes or a degree."
        )
    return on
