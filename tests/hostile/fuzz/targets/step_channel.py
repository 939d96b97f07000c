"""Frames of the step channel, for the controller and for a rank."""

from __future__ import annotations

import socket

import msgspec

from pagedray.batch import (
    BlockCopy,
    ControllerMessage,
    Decodes,
    SequencePlan,
    SequenceStart,
    StepMasks,
    StepOutput,
    StepPlan,
    TextBatch,
    WorkerMessage,
    pack_token_ids,
)
from pagedray.channel import ChannelClosedError, StepChannel
from pagedray.sampling_params import SamplingParams
from tests.hostile.fuzz.target import Target

_KINDS: tuple[object, ...] = (ControllerMessage, WorkerMessage)


def run(data: bytes) -> None:
    """Receive messages that can be sent again, or ChannelClosedError.

    Of the first byte, one bit selects the receiver, and one puts a length before the rest.
    """
    if not data:
        return
    kind, sent = _KINDS[data[0] & 1], data[1:]
    if data[0] & 2:
        sent = len(sent).to_bytes(4, "big") + sent
    ours, theirs = socket.socketpair()
    with theirs:
        channel: StepChannel[object, object] = StepChannel(ours, kind)
        try:
            theirs.sendall(sent)
            for message in channel.received():
                encoded = msgspec.msgpack.encode(message)
                assert msgspec.msgpack.decode(encoded, type=kind) == message
        except ChannelClosedError:
            return
        finally:
            channel.close()


_PLAN = StepPlan(
    step=3,
    chunks=[SequencePlan(row=0, first_position=2, num_tokens=1, is_sampled=True)],
    starts=[
        SequenceStart(
            row=0,
            token_ids=pack_token_ids([5, 6, 7]),
            num_prompt_tokens=3,
            block_ids=[1, 2],
            sampling=SamplingParams(temperature=0.5, top_p=0.9, stop=("a",), logit_bias={3: 1.5}),
            seed=7,
            index=0,
        )
    ],
    decodes=Decodes.pack([1, 2], [4, 9], [1], [7]),
    swap_outs=[BlockCopy(1, 2)],
)
_MESSAGES = (
    (0, _PLAN),
    (0, StepMasks(step=3, words=b"\x01\x00\x00\x00")),
    (0, StepPlan(1, [], texts=TextBatch([[1, 2]], pooling="mean", is_normalized=True))),
    (1, StepOutput(step=3, token_ids=[9])),
)

TARGET = Target(
    run=run,
    seeds=(
        *(bytes([2 | kind]) + msgspec.msgpack.encode(one) for kind, one in _MESSAGES),
        b"\x00\x00\x00\x00\x01\xc0\x00\x00\x00\x02\x91",
        b"\x00\xff\xff\xff\xff",
    ),
    words=(b"\xa4plan", b"\xa5masks", b"\xa6output", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),
)
