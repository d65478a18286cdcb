"""Options of the sockets between client and rank 0, on both ends."""

import socket

import pytest
from handshakes import TOKEN

from backend.client.client import BackendClient
from backend.protocol import Ping, Welcome, socket_options
from backend.serving.server import Server


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux's names of the options")
def test_a_peer_whose_machine_is_gone_is_found_by_both_ends():
    """Its places are given back, and who waits for an answer is told; tcp itself asks nothing for hours."""
    server = Server("tcp:127.0.0.1:0", TOKEN, Welcome(1, "cpu", {}, [1]), dict)
    client = BackendClient(f"tcp:127.0.0.1:{server.listener.getsockname()[1]}", TOKEN)
    client.request(Ping())  # it is in by now
    (member,) = server.members
    for end in (client._socket, member.connection):
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        for name, value in socket_options.TCP_OPTIONS.items():
            found = end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            assert found == value or (name == "TCP_NODELAY" and found), name
    client.close()
    server.listener.close()


def test_both_ends_of_a_unix_socket_write_far_ahead(server):
    """As far as the system grants: ends that wait for each other at every small piece take twice as long."""
    client = BackendClient(f"unix:{server.path}", TOKEN)
    client.request(Ping())
    (member,) = server.members
    with socket.socket(socket.AF_UNIX) as usual:
        least = usual.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    for end in (client._socket, member.connection):
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > least
    client.close()
