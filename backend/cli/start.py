"""The command ``start``: a backend that graphs and scripts connect to by its address.

    python -m backend.cli start --address unix:/run/pdit/backend.sock --token-file /run/pdit/token \\
        --config '{"ulysses_degree": 2}' --models ~/models

It stays in the foreground, for systemd, Slurm, Kubernetes or a container: it ends its ranks with itself,
watches their heartbeats, and ends with 1 and one sentence where the backend ends by itself. The socket's
folder and the token's file must be this user's alone (docs/security.md).

On several machines, start it on each with the same token (docs/multi_node.md); machine 0 alone is given the
address and the configuration:

    ... start --nnodes 2 --node-rank 0 --rdzv-endpoint 10.0.0.1:29500 --interface eth1 --token-file ... \\
        --models ... --address ... --config ...
    ... start --nnodes 2 --node-rank 1 --rdzv-endpoint 10.0.0.1:29500 --interface eth1 --token-file ... \\
        --models ...
"""

import argparse
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from ..client.launching.dependencies import ranks_versions
from ..client.launching.launcher import BackendProcess
from ..client.machines import machine_rendezvous
from ..client.machines.machine_link import Link
from ..client.machines.machines import Machines, placement
from ..client.open_socket import open_socket
from ..client.pack_version import pack_version
from ..config import ConfigError, ParallelConfig
from ..rank.start import device_of_some, own_token
from .settings import read_config
from .status import parser_of


def main(arguments: list[str]) -> int:
    """Serve until a signal or a client ends it; 1 where it ends by itself. Raises ConfigError and
    BackendError."""
    options = _options(arguments)
    token = own_token(options.token_file)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    machines = Machines(
        count=options.nnodes,
        index=options.node_rank,
        endpoint=options.rdzv_endpoint,
        interface=options.interface,
    ).validate()
    leads = machines.index == 0
    if not leads and (options.address or options.config != "{}"):
        raise ConfigError(
            "--address and --config belong to machine 0, which passes the configuration on; leave them out."
        )
    if leads and not options.address:
        raise ConfigError("start needs --address, unix:PATH or tcp:HOST:PORT, at which clients connect.")
    if leads and somebody_listens(options.address):
        raise ConfigError(
            f"something listens at {options.address} already; end it (a backend: python -m backend.cli stop) "
            f"or choose another address."
        )
    config, device, link = joined(machines, options.config, token)
    process = BackendProcess(config, device, options.models, options.address, token, link)
    try:
        return served(process, config, device)
    except KeyboardInterrupt:
        return 0
    finally:
        process.close()
        somebody_listens(options.address)  # else the socket goes


def joined(machines: Machines, text: str, token: str) -> tuple[ParallelConfig, str, Link | None]:
    """Return configuration and device of the ranks, and the link to the other machines once all are there."""
    if machines.index:
        link, begin = machine_rendezvous.join(machines, token, same_everywhere())
        config = ParallelConfig(**begin["config"])
        try:
            device_here(config, begin["device"], machines)
        except ConfigError as error:
            link.close(str(error))
            raise
        return config, begin["device"], link
    config = read_config(text)
    if machines.count == 1:
        return config, config.resolve_device(torch.cuda.device_count()), None
    device = device_here(config, config.device, machines)
    print(placement(config.degrees, machines.count, config.shard_weights), flush=True)
    begin = {"config": asdict(config), "device": device}
    link = machine_rendezvous.gather(machines, token, same_everywhere(), begin)
    return config, device, link


def device_here(config: ParallelConfig, device: str, machines: Machines) -> str:
    """Return "cuda" or "cpu" for the ranks of this machine; ConfigError where they do not fit on it."""
    return device_of_some(
        config, device=device, ranks=machines.ranks_here(config), gpus_here=torch.cuda.device_count()
    )


def same_everywhere() -> dict:
    """Return what has to be equal in the ranks' Python on all machines: a step that one does differently
    hangs all. Not comfy-kitchen: formats are tried, and a product that one rank cannot do is done by none."""
    return {"pack": pack_version(), **ranks_versions()}


def served(process: BackendProcess, config: ParallelConfig, device: str) -> int:
    """Wait until the ranks have ended, and say why unless a client has told them to."""
    if process.machines.index == 0:
        process.wait_ready()
        where = f"{config.product} on {device} at {process.address}"
    else:
        where = f"{process.machines.name} of {process.machines.count} started, on {device}"
    print(f"{where}{_of_gpus(process.machines.ranks_here(config), device)}, log {process.log}", flush=True)
    while process.running:
        time.sleep(0.5)
    if process.ended_as_asked:
        return 0
    print(process.failure_cause(), file=sys.stderr)
    return 1


def _of_gpus(ranks: int, device: str) -> str:
    """Say how many of this machine's GPUs have one of its ``ranks``; empty where all have."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    return f" ({ranks} of {gpus} GPUs)" if ranks < gpus else ""


def somebody_listens(address: str) -> bool:
    """Return whether a backend listens at ``address``; the socket that a killed one has left is removed."""
    if not address:  # of another machine than 0
        return False
    kind, _, path = address.partition(":")
    try:
        open_socket(address).close()
    except ConnectionRefusedError:
        if kind == "unix" and Path(path).is_socket():
            Path(path).unlink()
        return False
    except OSError:  # no such file
        return False
    return True


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = parser_of("start", __doc__, needs_address=False)
    parser.add_argument("--config", default="{}", help="fields of ParallelConfig as JSON")
    parser.add_argument("--models", nargs="*", default=[], help="folders from which files may be loaded")
    parser.add_argument("--nnodes", type=int, default=1, help="number of machines")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is, from 0")
    parser.add_argument(
        "--rdzv-endpoint", default="", help="HOST:PORT of machine 0; PORT and PORT + 1 are taken there"
    )
    parser.add_argument("--interface", default="", help="network interface to the other machines")
    options = parser.parse_args(arguments)
    # ranks run in a folder of their own; a unit file has no shell that knows ~
    options.models = [os.path.abspath(os.path.expanduser(each)) for each in options.models]
    return options
