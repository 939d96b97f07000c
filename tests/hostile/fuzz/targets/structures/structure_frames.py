"""Frames between the replica and the processes of structured output, which may be corrupt."""

from __future__ import annotations

import socket

import msgspec

from cluster.structured.child_process import read_message
from cluster.structured.messages import (
    Compiled,
    CompilerStart,
    Died,
    GrammarLoaded,
    GrammarText,
    LoadFailed,
    LoadGrammar,
    MadeMask,
    MaskQuery,
    MaskReply,
    Rejected,
    StepQuery,
)
from pagedray.request import FinishReason
from pagedray.structure import Structure
from tests.hostile.fuzz.target import Target

_KINDS: tuple[object, ...] = (
    MaskReply,
    GrammarLoaded | LoadFailed,
    Compiled | Rejected | Died,
    StepQuery,
    LoadGrammar,
    CompilerStart,
    Structure,
)


def run(data: bytes) -> None:
    """Return a message or EOFError, of the kind that the first byte selects.

    If the byte is above 127, a length is put before the rest.
    """
    if not data:
        return
    sent = data[1:]
    if data[0] > 127:
        sent = len(sent).to_bytes(4, "big") + sent
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        try:
            read_message(ours, _KINDS[data[0] % len(_KINDS)])
        except EOFError:
            return


def _seed(message: object, kind: object) -> bytes:
    place = _KINDS.index(kind)
    first = next(one for one in range(128, 256) if one % len(_KINDS) == place)
    return bytes([first]) + msgspec.msgpack.encode(message)


_REPLY = MaskReply(
    [MadeMask(1, 0.5, 0.5, b"\x01\0\0\0"), MadeMask(2, 0.5, 0.5, b"", FinishReason.STOP, "e")]
)

TARGET = Target(
    run=run,
    seeds=(
        _seed(_REPLY, MaskReply),
        _seed(GrammarLoaded(5), GrammarLoaded | LoadFailed),
        _seed(Compiled(GrammarText(b"{}")), Compiled | Rejected | Died),
        _seed(StepQuery([MaskQuery(1, [2])], [3], [4], 0.5), StepQuery),
        _seed(Structure(kind="regex", text="a"), Structure),
        b"\x00\x00\x00\x00\x01\xc0",
        b"\x00\xff\xff\xff\xff",
    ),
)
