"""The step channel over real sockets."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import pytest

from pagedray.batch import (
    BlockCopy,
    Decodes,
    SequencePlan,
    SequenceStart,
    Shutdown,
    StepAck,
    StepOutput,
    StepPlan,
    pack_token_ids,
)
from pagedray.channel import (
    ChannelClosedError,
    ChannelTimeoutError,
    ControllerChannel,
)
from pagedray.sampling_params import SamplingParams
from pagedray.step_listener import StepListener, connect
from tests.fakes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

SECRET = b"s" * 32


@pytest.fixture(params=["unix:", "tcp:127.0.0.1:0"])
def listener(request: pytest.FixtureRequest) -> Iterator[StepListener]:
    with closing(StepListener(request.param)) as listening:
        yield listening


def test_plan_and_output_arrive_as_they_were_sent(listener: StepListener) -> None:
    worker = connect(listener.endpoint, 0, SECRET, 60.0)
    (controller,) = listener.accept(1, SECRET, 60.0)
    start = SequenceStart(
        3, pack_token_ids([1, 2, 3]), 3, [7], SamplingParams(logit_bias={5: -1.5}, seed=1), 9, 0
    )
    decodes = Decodes.pack([1, 2], [4, 9], [1], [8])
    plan = StepPlan(
        4, [SequencePlan(3, 0, 3, True, (7,))], [start], decodes, copies=[BlockCopy(1, 2)]
    )

    controller.send(plan)
    assert worker.receive(60.0) == plan
    worker.send(StepOutput(4, [11]))
    assert controller.receive(60.0) == StepOutput(4, [11])
    worker.close()
    controller.close()


def test_message_larger_than_a_socket_buffer_arrives_whole(listener: StepListener) -> None:
    worker = connect(listener.endpoint, 0, SECRET, 60.0)
    (controller,) = listener.accept(1, SECRET, 60.0)
    tokens = pack_token_ids(range(1_000_000))
    start = SequenceStart(0, tokens, 1_000_000, [], SamplingParams(), 0, 0)

    sender = threading.Thread(target=controller.send, args=(StepPlan(0, [], [start]),))
    sender.start()
    received = worker.receive(60.0)
    sender.join()
    assert isinstance(received, StepPlan)
    assert received.starts[0].token_ids == tokens
    worker.close()
    controller.close()


def test_has_message_sees_frames_that_are_already_buffered(listener: StepListener) -> None:
    worker = connect(listener.endpoint, 0, SECRET, 60.0)
    (controller,) = listener.accept(1, SECRET, 60.0)
    assert not controller.has_message()

    for step in range(3):
        worker.send(StepAck(step))
    seen: list[object] = []
    while len(seen) < 3:
        assert controller.has_message() or controller.receive(60.0)
        seen.append(controller.receive(60.0))
    assert seen == [StepAck(0), StepAck(1), StepAck(2)]
    assert not controller.has_message()
    worker.close()
    controller.close()


def test_timeout_leaves_half_a_frame_for_the_next_call(listener: StepListener) -> None:
    worker = connect(listener.endpoint, 0, SECRET, 60.0)
    (controller,) = listener.accept(1, SECRET, 60.0)
    raw = socket.socket(fileno=os.dup(controller.fileno()))
    body = b"\x91\xa8shutdown"
    frame = struct.pack("!I", len(body)) + body

    raw.sendall(frame[:6])
    with pytest.raises(ChannelTimeoutError):
        worker.receive(0.05)
    raw.sendall(frame[6:])
    assert worker.receive(60.0) == Shutdown()
    raw.close()
    worker.close()
    controller.close()


def test_dead_peer_is_end_of_file(listener: StepListener) -> None:
    worker = connect(listener.endpoint, 0, SECRET, 60.0)
    (controller,) = listener.accept(1, SECRET, 60.0)
    worker.close()
    wait_for(controller.has_message)
    with pytest.raises(ChannelClosedError):
        controller.receive(60.0)
    with pytest.raises(ChannelClosedError):
        send_until_rejected(controller)
    controller.close()


def send_until_rejected(controller: ControllerChannel) -> None:
    # The first send over TCP succeeds; the reset arrives afterwards.
    for _ in range(6000):
        controller.send(Shutdown())
        time.sleep(0.01)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!I", 2**31) + b"x",
        struct.pack("!I", 4) + b"\xff\xff\xff\xff",
        struct.pack("!I", 3) + b"\x80\x05.",
        struct.pack("!I", 5006) + b"\x93\xa3ack\x01" + b"\x91" * 5000,
    ],
    ids=["huge", "garbage", "pickle", "nested"],
)
def test_bytes_that_are_no_message_close_the_channel(listener: StepListener, frame: bytes) -> None:
    worker = connect(listener.endpoint, 0, SECRET, 60.0)
    (controller,) = listener.accept(1, SECRET, 60.0)
    raw = socket.socket(fileno=os.dup(worker.fileno()))
    raw.sendall(frame)
    with pytest.raises(ChannelClosedError):
        controller.receive(60.0)
    raw.close()
    worker.close()
    controller.close()


def test_parts_of_a_plan_cost_the_garbage_collector_nothing() -> None:
    plan = StepPlan(4, [SequencePlan(3, 0, 1, True, (7,))], swap_outs=[BlockCopy(1, 2)])
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
    assert received == plan
    # A step may have one for each running sequence.
    parts = (*received.chunks, *received.swap_outs, received.decodes)
    assert not any(map(gc.is_tracked, parts))
