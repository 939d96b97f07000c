"""The listening sockets of frontends."""

from __future__ import annotations

import socket

import pytest

from cluster.serving.listener import check_ports, free_port, listen
from pagedray.errors import DeviceError


def test_connections_inherit_tcp_nodelay() -> None:
    with (
        listen("HTTP", "127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
    ):
        listener.setblocking(True)
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.parametrize(("frontend", "flag"), [("HTTP", "--http-port"), ("gRPC", "--grpc-port")])
def test_a_port_in_use_is_named_with_its_flag(frontend: str, flag: str) -> None:
    with listen(frontend, "127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(DeviceError, match=rf"port {port} .* already in use; .* {flag}\.$"):
            listen(frontend, "127.0.0.1", port)


def test_the_reason_of_the_system_is_given_once() -> None:
    # An address of TEST-NET-1, which no machine has.
    with pytest.raises(DeviceError) as raised:
        listen("HTTP", "192.0.2.1", 8000)
    assert str(raised.value).count("192.0.2.1") == 1


def test_the_next_free_port_is_neither_in_use_nor_another_frontends() -> None:
    with listen("gRPC", "127.0.0.1", 0) as listener:
        used = listener.getsockname()[1]
        found = free_port("gRPC", "127.0.0.1", used, other=0)
        assert found > used
        assert free_port("gRPC", "127.0.0.1", used, other=found) > found
        check_ports("127.0.0.1", {"gRPC": found, "HTTP": 0})
        with pytest.raises(DeviceError, match=rf"^HTTP port {used} of .* with --http-port\.$"):
            check_ports("127.0.0.1", {"gRPC": found, "HTTP": used})
