"""The channels of a group with ranks that send byte by byte, stop in a frame, or read slowly."""

from __future__ import annotations

import logging
import select
import socket
import struct
import time
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.rank_channels import DiskReports, RankChannels
from pagedray.batch import (
    ControllerMessage,
    DiskReport,
    RankLogLine,
    SequenceStart,
    StepAck,
    StepOutput,
    StepPlan,
    WorkerFailure,
    WorkerMessage,
    pack_token_ids,
)
from pagedray.channel import ChannelClosedError, StepChannel
from pagedray.errors import WorkerError
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

AT_ONCE_S = 30.0
"""Generous for what must not wait: a wait would last forever."""


class Group:
    """Channels of two ranks, and the ranks' ends as plain sockets."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.ranks = [rank for _, rank in pairs]
        self.channels = RankChannels([StepChannel(end, WorkerMessage) for end, _ in pairs])

    def close(self) -> None:
        self.channels.close()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def group() -> Iterator[Group]:
    with closing(Group()) as group:
        yield group


def frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("!I", len(body)) + body


def large_plan(step: int, num_tokens: int) -> StepPlan:
    start = SequenceStart(
        0, pack_token_ids([2**31 - 1] * num_tokens), num_tokens, [], SamplingParams(), 0, 0
    )
    return StepPlan(step, [], [start])


def read_slowly(group: Group, rank: int, chunk_sizes: Iterator[int], num_messages: int) -> bytes:
    """Receive frames as a rank that reads a few bytes whenever the controller has a turn."""
    received = b""
    while num_frames(received) < num_messages:
        group.channels.exchange(0.0)
        readable = select.poll()
        readable.register(group.ranks[rank], select.POLLIN)
        if readable.poll(0):
            received += group.ranks[rank].recv(next(chunk_sizes))
    return received


def num_frames(data: bytes) -> int:
    count = 0
    while len(data) >= 4 and len(data) >= (size := 4 + struct.unpack_from("!I", data)[0]):
        data, count = data[size:], count + 1
    return count


@settings(max_examples=60)
@given(cuts=st.lists(st.integers(0, 200), max_size=30), steps=st.integers(1, 8))
def test_messages_arrive_however_their_bytes_are_cut(cuts: list[int], steps: int) -> None:
    with closing(Group()) as group:
        sent = [StepOutput(step, [step] * 3) for step in range(steps)]
        data = b"".join(map(frame, sent))
        points = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
        for begin, end in pairwise(points):
            group.ranks[0].sendall(data[begin:end])
            group.channels.exchange(0.0)
            assert len(group.channels.outputs) == num_frames(data[:end])
        assert list(group.channels.outputs) == sent
        assert group.channels.acknowledged == [steps - 1, -1]


def test_bytes_that_come_one_by_one_hold_up_no_other_rank(group: Group) -> None:
    slow = frame(StepOutput(0, [1] * 20))
    for step, byte in enumerate(slow):
        group.ranks[0].sendall(bytes([byte]))
        group.ranks[1].sendall(frame(StepAck(step)))
        group.channels.exchange(0.0)
        assert group.channels.acknowledged[1] == step
    assert list(group.channels.outputs) == [StepOutput(0, [1] * 20)]


def test_half_a_frame_does_not_hold_up_the_controller(group: Group) -> None:
    group.ranks[0].sendall(frame(StepOutput(0, [1] * 20))[:10])
    began_s = time.monotonic()
    group.channels.exchange(60.0)
    group.channels.exchange(0.05)
    assert time.monotonic() - began_s < AT_ONCE_S
    assert not group.channels.outputs


def test_rank_that_ends_within_a_frame_is_gone(group: Group) -> None:
    group.ranks[0].sendall(frame(StepOutput(0, [1]))[:-1])
    group.ranks[0].close()
    group.channels.exchange(1.0)
    with pytest.raises(ChannelClosedError):
        group.channels.exchange(1.0)


@settings(max_examples=30)
@given(
    sizes=st.lists(st.sampled_from([0, 10, 40_000, 300_000]), min_size=1, max_size=3),
    chunks=st.lists(st.integers(1, 100_000), min_size=1, max_size=5),
)
def test_plans_for_a_rank_that_reads_slowly_never_wait_for_it(
    sizes: list[int], chunks: list[int]
) -> None:
    """300 000 tokens are 1.5 MB, several times a socket's buffer."""
    with closing(Group()) as group:
        plans = [large_plan(step, size) for step, size in enumerate(sizes)]
        began_s = time.monotonic()
        for plan in plans:
            group.channels.send(plan)
        assert time.monotonic() - began_s < AT_ONCE_S

        # The other rank serves its plans meanwhile; rank 1 does not read its own.
        def repeated() -> Iterator[int]:
            while True:
                yield from (max(chunk, 10_000) for chunk in chunks)

        received = read_slowly(group, 0, repeated(), len(plans))
        for plan in plans:
            expected = frame(plan)
            assert received[: len(expected)] == expected
            received = received[len(expected) :]
        assert not received


def test_output_of_a_step_whose_copies_have_not_ended_acknowledges_nothing(group: Group) -> None:
    output = StepOutput(0, [7], is_acknowledged=False)
    group.ranks[0].sendall(frame(output))
    group.channels.exchange(1.0)
    assert list(group.channels.outputs) == [output]
    assert group.channels.acknowledged == [-1, -1]
    group.ranks[0].sendall(frame(StepAck(0)))
    group.channels.exchange(1.0)
    assert group.channels.acknowledged == [0, -1]
    assert list(group.channels.outputs) == [output]


def test_report_of_a_disk_is_taken_once_every_rank_has_sent_its_own(group: Group) -> None:
    group.ranks[0].sendall(frame(DiskReport(3, True, [7], 0.5)))
    group.channels.exchange(AT_ONCE_S)
    assert group.channels.disk_reports.take_joined() == []
    group.ranks[1].sendall(frame(DiskReport(3, True, [8], 0.25)))
    group.channels.exchange(AT_ONCE_S)
    assert group.channels.disk_reports.take_joined() == [DiskReport(3, True, [7, 8], 0.5)]


def test_what_a_rank_logs_is_logged_with_its_number(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    group.ranks[1].sendall(frame(RankLogLine(logging.WARNING, "The disk is full.")))
    group.channels.exchange(AT_ONCE_S)
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", "Rank 1: The disk is full.")
    ]
    assert group.channels.acknowledged == [-1, -1]


def test_plan_larger_than_the_buffer_arrives_once_the_rank_reads(group: Group) -> None:
    plan = large_plan(0, 1_000_000)
    group.channels.send(plan)
    group.ranks[1].sendall(frame(StepAck(0)))
    group.channels.exchange(1.0)
    assert group.channels.acknowledged == [-1, 0]

    received = read_slowly(group, 0, iter(lambda: 1 << 20, 0), 1)
    assert msgspec.msgpack.decode(received[4:], type=ControllerMessage) == plan
    # The controller no longer waits for room in the socket.
    began_s = time.monotonic()
    group.channels.exchange(0.05)
    assert time.monotonic() - began_s >= 0.04


def test_failure_of_a_rank_is_its_last_message(group: Group) -> None:
    group.ranks[1].sendall(frame(StepAck(0)) + frame(WorkerFailure("Traceback\nValueError: bad")))
    group.ranks[1].close()
    with pytest.raises(WorkerError, match="Rank 1 failed: ValueError: bad"):
        group.channels.exchange(1.0)
    assert group.channels.acknowledged == [-1, 0]


def test_rank_that_fails_because_another_is_gone_is_not_the_cause(group: Group) -> None:
    group.ranks[0].sendall(frame(WorkerFailure("Connection closed by peer", is_peer=True)))
    with pytest.raises(ChannelClosedError, match="Rank 0 lost the connection to another rank"):
        group.channels.exchange(1.0)


def test_shutdown_does_not_wait_for_a_rank_that_does_not_read(group: Group) -> None:
    group.channels.send(large_plan(0, 1_000_000))
    began_s = time.monotonic()
    group.channels.shut_down()
    group.channels.close()
    assert time.monotonic() - began_s < AT_ONCE_S


def test_a_report_is_joined_once_every_rank_has_sent_its_own() -> None:
    reports = DiskReports(2)
    reports.add_report(0, DiskReport(3, True, [7], 0.5))
    reports.add_report(0, DiskReport(4, True, [], 0.5))
    reports.add_report(1, DiskReport(2, False))
    assert reports.take_joined() == []
    reports.add_report(1, DiskReport(3, True, [5, 7], 0.75))
    assert reports.take_joined() == [DiskReport(3, True, [5, 7], 0.75)]
    reports.add_report(1, DiskReport(4, True))
    reports.add_report(0, DiskReport(2, False))
    assert reports.take_joined() == [DiskReport(4, True, [], 0.5), DiskReport(2, False)]


def test_no_rank_reports_nothing() -> None:
    assert DiskReports(0).take_joined() == []
