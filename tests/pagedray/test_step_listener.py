"""How ranks connect, while others that lack the secret connect too."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from pagedray import step_listener
from pagedray.batch import Shutdown
from pagedray.channel import ChannelClosedError, ChannelTimeoutError
from pagedray.errors import WorkerError
from pagedray.step_listener import StepListener, connect
from tests.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = b"s" * 32


@pytest.fixture(params=["unix:", "tcp:127.0.0.1:0"])
def listener(request: pytest.FixtureRequest) -> Iterator[StepListener]:
    with closing(StepListener(request.param)) as listening:
        yield listening


@pytest.fixture
def tcp_listener() -> Iterator[StepListener]:
    with closing(StepListener("tcp:127.0.0.1:0")) as listening:
        yield listening


def stranger(listener: StepListener) -> socket.socket:
    """Return a connection of someone without the secret."""
    kind, _, address = listener.endpoint.partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(f"\0{address}")
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def test_wrong_secret_does_not_take_a_ranks_place(listener: StepListener) -> None:
    stranger = connect(listener.endpoint, 0, b"x" * 32, 60.0)
    friend = connect(listener.endpoint, 0, SECRET, 60.0)
    (controller,) = listener.accept(1, SECRET, 60.0)
    controller.send(Shutdown())
    assert friend.receive(60.0) == Shutdown()
    with pytest.raises(ChannelClosedError):
        stranger.receive(60.0)
    for channel in (stranger, friend, controller):
        channel.close()


def test_missing_ranks_are_named(listener: StepListener, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, turns = Clock(), itertools.count()
    monkeypatch.setattr(step_listener, "time", SimpleNamespace(monotonic=clock))

    def pass_time() -> None:
        # The rank that has connected is found in the first turns.
        clock.now_s = 10.0 if next(turns) == 5 else clock.now_s

    worker = connect(listener.endpoint, 1, SECRET, 60.0)
    with pytest.raises(ChannelTimeoutError, match=r"\[0, 2\]"):
        listener.accept(3, SECRET, 10.0, check=pass_time)
    worker.close()


def test_wait_for_ranks_ends_when_one_is_known_to_be_dead(listener: StepListener) -> None:
    checks = iter([None, None, WorkerError("A rank died.")])

    def check() -> None:
        if error := next(checks):
            raise error

    with pytest.raises(WorkerError, match="A rank died"):
        listener.accept(1, SECRET, 60.0, check=check)


def test_silent_connections_delay_no_rank(listener: StepListener) -> None:
    silent = [stranger(listener) for _ in range(60)]
    half = stranger(listener)
    half.sendall(struct.pack("!I", 40) + b"half")
    friend = connect(listener.endpoint, 0, SECRET, 60.0)
    began_s = time.monotonic()
    (controller,) = listener.accept(1, SECRET, 120.0)
    # One by one, with a second each, they would take a minute.
    assert time.monotonic() - began_s < 30.0
    for connection in (half, *silent):
        connection.close()
    friend.close()
    controller.close()


def test_a_connection_that_stays_silent_is_closed(listener: StepListener) -> None:
    silent = stranger(listener)
    silent.settimeout(60.0)
    threading.Thread(target=accept_nothing, args=(listener, 1.5), daemon=True).start()
    assert silent.recv(1) == b""
    silent.close()


def accept_nothing(listener: StepListener, timeout_s: float) -> None:
    with pytest.raises(ChannelTimeoutError):
        listener.accept(1, SECRET, timeout_s)


def test_a_hello_is_short(listener: StepListener) -> None:
    sender = stranger(listener)
    sender.settimeout(60.0)
    sender.sendall(struct.pack("!I", 257))
    thread = threading.Thread(target=accept_nothing, args=(listener, 0.6), daemon=True)
    thread.start()
    # Closed at once, not after the second that a silent connection has.
    assert sender.recv(1) == b""
    thread.join(60.0)
    sender.close()


def test_a_flood_of_connections_keeps_no_rank_out(tcp_listener: StepListener) -> None:
    silent = [stranger(tcp_listener) for _ in range(100)]
    friend = connect(tcp_listener.endpoint, 0, SECRET, 60.0)
    (controller,) = tcp_listener.accept(1, SECRET, 60.0)
    controller.send(Shutdown())
    assert friend.receive(60.0) == Shutdown()
    for connection in silent:
        connection.close()
    friend.close()
    controller.close()


def test_a_full_queue_of_connections_keeps_no_rank_out() -> None:
    with closing(StepListener("unix:")) as listening, ThreadPoolExecutor(1) as threads:
        strangers = fill_queue(listening)
        connecting = threads.submit(connect, listening.endpoint, 0, SECRET, 60.0)
        (controller,) = listening.accept(1, SECRET, 60.0)
        controller.send(Shutdown())
        friend = connecting.result()
        assert friend.receive(60.0) == Shutdown()
        for connection in strangers:
            connection.close()
        friend.close()
        controller.close()


def test_a_rank_does_not_wait_for_ever_to_connect() -> None:
    with closing(StepListener("unix:")) as listening:
        strangers = fill_queue(listening)
        with pytest.raises(BlockingIOError):
            connect(listening.endpoint, 0, SECRET, 0.05)
        for connection in strangers:
            connection.close()


def fill_queue(listener: StepListener) -> list[socket.socket]:
    """Connect until the listener's queue takes no more."""
    _, _, address = listener.endpoint.partition(":")
    connections: list[socket.socket] = []
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            connection.connect(f"\0{address}")
        except BlockingIOError:
            connection.close()
            return connections
        connections.append(connection)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
def test_ranks_connect_over_ipv6() -> None:
    with closing(StepListener("tcp:::1:0")) as listening:
        friend = connect(listening.endpoint, 0, SECRET, 60.0)
        (controller,) = listening.accept(1, SECRET, 60.0)
        friend.close()
        controller.close()
