"""python agent_server.py SOCKET PADDING: imports what torchrun's agents and their ranks do, once, and forks
an agent, launcher, client or reader of headers for each process that asks through ``ask``, in the namespaces
of that one (tests/support/hosts.py has hosts of their own). Standard input is a pipe of whoever started it:
its end ends the server. PADDING makes room for an agent's command line, by which /proc tells whose process it
is."""

import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
from pathlib import Path

#: Environment variable with the server's socket.
VARIABLE = "PARALLEL_DIT_TEST_AGENTS"
#: Beginnings of the variables that imports look at: an agent has the server's, or imports for itself.
OF_IMPORTS = (
    "OMP_",
    "MKL_",
    "KMP_",
    "MALLOC_",
    "TORCH_",
    "PYTORCH_",
    "DIFFUSERS_",
    "PYTHONHASHSEED",
    "CUDA_",
)
#: And of those among them that are looked at later, as a group of NCCL begins.
OF_NCCL = "TORCH_NCCL_"
#: File descriptors of the server's own are below this number, those of an agent while they arrive are not.
OWN = 500
FORKED, REFUSED = b"f", b"n"
#: Process, user and group of a socket's peer.
CREDENTIALS = struct.Struct("=iII")
#: Namespaces of a "host"; that of mounts has its /proc.
NAMESPACES = ("net", "pid", "mnt")


def ask(path: str, command: list[str]) -> int | None:
    """Have the server at ``path`` run this process's ``command``, with its files, folder and environment, and
    wait for the exit code; None where the server will not. A signal to this process goes to the agent."""
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if file < 3 or _is_inherited(file)]
    request = {"command": command, "environment": dict(os.environ), "folder": os.getcwd(), "files": files}
    body = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [len(body).to_bytes(8, "big")], files)
        server.sendall(body)
        if server.recv(1) != FORKED:
            return None
        agent = int.from_bytes(_exactly(server, 8), "big")
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(each, lambda number, frame: os.kill(agent, number))
        code = int.from_bytes(_exactly(server, 8) or b"\1", "big")
        server.recv(1)  # until it has ended, and what it held is free
        return code


def _is_inherited(file: int) -> bool:
    try:
        return os.get_inheritable(file)
    except OSError:  # the listing's own
        return False


def _exactly(server: socket.socket, count: int) -> bytes:
    """So many bytes, or none where the agent has been killed."""
    received = b""
    while len(received) < count:
        if not (more := server.recv(count - len(received))):
            return b""
        received += more
    return received


def serve(path: str):
    """Fork agents until standard input ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    ready, _, _ = select.select([0, listener], [], [])  # not before somebody asks, who then waits
    if 0 in ready:
        return
    gc.disable()
    from forked_ranks import exit_code_of, fork_ranks

    fork_ranks()
    import torch.distributed.run  # noqa: F401  # once, for all agents

    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for agents: they tell their exit code
    while True:
        ready, _, _ = select.select([0, listener], [], [])
        if 0 in ready:
            return
        asking, _ = listener.accept()
        request, files = _received(asking)
        request["process"] = _process_of(asking)
        if _imports_alike(request["environment"], "torch.distributed.run" in request["command"]):
            if os.fork() == 0:
                listener.close()
                _be_agent(request, files, asking, exit_code_of)
        else:
            asking.sendall(REFUSED)
        for file in files:
            os.close(file)
        asking.close()


def _received(asking: socket.socket) -> tuple[dict, list[int]]:
    head, files, _, _ = socket.recv_fds(asking, 8, 64)
    return json.loads(_exactly(asking, int.from_bytes(head, "big"))), files


def _process_of(asking: socket.socket) -> int:
    """The process that asks, by its number here."""
    asked_by = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return CREDENTIALS.unpack(asked_by)[0]


def _imports_alike(environment: dict[str, str], is_agent: bool) -> bool:
    """A launcher or client, which computes nothing, may lack variables that are made for ranks."""

    def seen(values) -> dict:
        names = [name for name in values if name.startswith(OF_IMPORTS) and not name.startswith(OF_NCCL)]
        return {name: values[name] for name in names}

    wanted, ours = seen(environment), seen(os.environ)
    return wanted == ours if is_agent else wanted.items() <= ours.items()


def _be_agent(request: dict, files: list[int], asking: socket.socket, exit_code_of):
    """Be the process that asks; does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gc.enable()
    _enter_namespaces(request["process"])
    os.setsid()
    told = fcntl.fcntl(asking.fileno(), fcntl.F_DUPFD_CLOEXEC, OWN)
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, OWN) for file in files]
    for file, number in zip(high, request["files"], strict=True):
        os.dup2(file, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in (*request["files"], told):
            _close(int(name))
    gc.freeze()  # what is closed here is not closed again
    os.chdir(request["folder"])
    command = request["command"]
    _show(command)
    os.write(told, FORKED + os.getpid().to_bytes(8, "big"))
    threading.Thread(target=_end_with, args=(told,), daemon=True).start()
    code = exit_code_of(command, request["environment"])
    os.write(told, (code & 0xFF).to_bytes(8, "big"))
    os._exit(code)


def _enter_namespaces(process: int):
    """Go where ``process`` is, if that is another "host"."""
    names = {name: f"/proc/{process}/ns/{name}" for name in NAMESPACES}
    there = [os.open(path, os.O_RDONLY) for name, path in names.items() if _is_other(name, path)]
    for namespace in there:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
    if there and os.fork():  # a process stays in its PID namespace, and its children are in the other one
        os._exit(0)


def _is_other(name: str, path: str) -> bool:
    return os.stat(path).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino


def _close(file: int):
    try:
        os.close(file)
    except OSError:  # the listing's own
        pass


def _show(command: list[str]):
    """Have /proc tell ``command`` as this process's, as setproctitle does."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end in proc(5)
    text = b"\0".join(map(os.fsencode, command))
    assert len(text) < end - start, "more PADDING"
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _end_with(told: int):
    """End when the process that asked is killed, as it would."""
    while os.read(told, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])
