"""The listening sockets of frontends."""

from __future__ import annotations

import socket

from cluster.serving.connections.listener import listen


def test_connections_inherit_tcp_nodelay() -> None:
    with (
        listen("HTTP", "127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        listener.setblocking(True)
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
