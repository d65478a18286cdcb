"""A second cable between two hosts (tests/support/hosts.py), which holds each packet for some time: the
latency of a network, for kernels without netem.

It joins two TAP devices. A thread for each direction reads the packets of one, in the form in which the
kernel hands large ones on (virtio_net_hdr, TCP segmentation offload), and writes them to the other one once
they are due. Hosts keep their addresses, so open connections move to it by their route.
"""

import fcntl
import os
import select
import struct
import threading
import time
from collections import deque

import hosts

#: linux/if_tun.h: requests, flags of a device, and what it may be handed whole.
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
#: A packet with its headers: 64 KiB at most.
MAX_PACKET = 1 << 17
DEVICE = "pdit-slow"


class SlowCable:
    """Joins both hosts of ``ends`` until ``close``; ``seconds``: how long it holds each packet, each way."""

    def __init__(self, ends: hosts.Hosts, seconds: float):
        self.seconds = seconds
        self._closed = False
        self._files = [_tap(name) for name in ends.names]
        first, second = self._files
        pairs = ((first, second), (second, first))
        self._threads = [threading.Thread(target=self._carry, args=pair, daemon=True) for pair in pairs]
        for thread in self._threads:
            thread.start()

    def close(self):
        """Remove it."""
        self._closed = True
        for thread in self._threads:
            thread.join()
        for file in self._files:
            os.close(file)

    def _carry(self, source: int, target: int):
        held: deque[tuple[float, bytes]] = deque()
        while not self._closed:
            wait = held[0][0] - time.monotonic() if held else 0.1
            if select.select([source], [], [], max(0.0, min(wait, 0.1)))[0]:
                held.append((time.monotonic() + self.seconds, os.read(source, MAX_PACKET)))
            while held and held[0][0] <= time.monotonic():
                os.write(target, held.popleft()[1])


def _tap(host: str) -> int:
    """Make a TAP device on a host; return what reads and writes its packets."""
    file = os.open("/dev/net/tun", os.O_RDWR)
    name = f"pdit{file}".encode()
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name, IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    hosts.run("ip", "link", "set", name.decode(), "netns", host, "name", DEVICE)
    hosts.run("ip", "-n", host, "link", "set", DEVICE, "up")
    return file
