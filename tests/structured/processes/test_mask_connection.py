"""The connection to a process that makes masks, from several threads."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from typing import Any

import msgspec
import pytest

from cluster.structured.processes.compiled_grammar import CompiledGrammar
from cluster.structured.processes.frames import read_message, write_frame
from cluster.structured.processes.mask_connection import (
    MaskConnection,
    MaskProcess,
    MaskProcessDiedError,
)
from cluster.structured.processes.messages import (
    GrammarLoaded,
    GrammarText,
    LoadGrammar,
    MadeMask,
    MaskQuery,
    MaskReply,
    StepQuery,
)

SILENCE_S = 0.1


async def started(connection: MaskConnection) -> MaskProcess:
    """Return the process once another thread has started it."""
    while True:
        try:
            return connection.process_with(())
        except MaskProcessDiedError:
            await asyncio.sleep(0.002)


async def test_a_process_that_hangs_is_given_up_while_it_loads_a_grammar() -> None:
    ends: list[socket.socket] = []

    def connect() -> tuple[socket.socket, socket.socket]:
        """Start a process that does nothing."""
        pairs = socket.socketpair(), socket.socketpair()
        ends.extend(theirs for _, theirs in pairs)
        return pairs[0][0], pairs[1][0]

    connection = MaskConnection(connect, max_tenant_bytes=100)
    no_source: Any = None  # Any: no masks are made here
    grammar = CompiledGrammar(
        no_source, 1, GrammarText(b"{}"), "", connection.ended_grammar_ids.append
    )
    loading = asyncio.create_task(asyncio.to_thread(connection.load_grammar, grammar))
    process = await started(connection)
    # The margin for a reply is 5 s.
    limit_s = SILENCE_S - 5.0

    def query() -> None:
        connection.send_queries(process, [], 0.0, limit_s + 5.0)
        connection.receive_reply(process, 60.0, limit_s)

    async with asyncio.timeout(60.0):
        with pytest.raises(MaskProcessDiedError, match=r"^The mask process died: no reply\.$"):
            await asyncio.to_thread(query)
        closed = "The mask process died: Connection closed by the other end."
        with pytest.raises(MaskProcessDiedError, match=f"^{re.escape(closed)}$"):
            await loading
    connection.close()
    for end in ends:
        end.close()


def test_errors_of_the_socket_are_described_in_words() -> None:
    pairs = socket.socketpair(), socket.socketpair()
    connection = MaskConnection(lambda: (pairs[0][0], pairs[1][0]), max_tenant_bytes=100)
    no_source: Any = None  # Any: no masks are made here
    grammar = CompiledGrammar(
        no_source, 1, GrammarText(b"{}"), "", connection.ended_grammar_ids.append
    )
    for _, theirs in pairs:
        theirs.close()
    with pytest.raises(MaskProcessDiedError, match=r"^The mask process died: Broken pipe\.$"):
        connection.load_grammar(grammar)
    connection.close()


NUM_BYTES = 2**20
"""More than the buffers of a socket hold."""


@pytest.mark.parametrize("is_last", [False, True])
def test_large_queries_pass_large_replies_that_come_late(is_last: bool) -> None:
    (masks, their_masks), (grammars, their_grammars) = socket.socketpair(), socket.socketpair()
    is_late = threading.Event()
    read: list[StepQuery] = []

    def reply(sequence_id: int) -> None:
        mask = MadeMask(sequence_id, 0.0, 0.0, bytes(NUM_BYTES), is_offender=is_last)
        write_frame(their_masks, msgspec.msgpack.encode(MaskReply([mask], is_last)))

    def serve() -> None:
        """Send each reply as a whole before reading the next query, as the process does."""
        read_message(their_grammars, LoadGrammar)
        write_frame(their_grammars, msgspec.msgpack.encode(GrammarLoaded(1)))
        read.append(read_message(their_masks, StepQuery))
        is_late.wait()
        reply(1)
        if not is_last:
            read.append(read_message(their_masks, StepQuery))
            reply(2)

    process = threading.Thread(target=serve)
    process.start()
    connection = MaskConnection(lambda: (masks, grammars), max_tenant_bytes=100)
    no_source: Any = None  # Any: no masks are made here
    grammar = CompiledGrammar(
        no_source, 1, GrammarText(b"{}"), "", connection.ended_grammar_ids.append
    )
    server = connection.process_with((grammar,))
    connection.send_queries(server, [MaskQuery(1, [5])], 0.0, 60.0)
    assert connection.receive_reply(server, 0.0, 60.0) is None
    is_late.set()
    token_ids = list(range(NUM_BYTES // 2))
    connection.send_queries(server, [MaskQuery(2, token_ids)], 0.0, 60.0)
    replied = [connection.receive_reply(server, 60.0, 60.0) for _ in range(1 if is_last else 2)]
    process.join()
    assert [one and one.masks[0].sequence_id for one in replied] == [1, 2][: len(replied)]
    assert [query.queries for query in read[1:]] == [[MaskQuery(2, token_ids)]] * (not is_last)
    connection.close()
    their_masks.close()
    their_grammars.close()
