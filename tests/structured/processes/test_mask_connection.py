"""The connection to a process that makes masks, from several threads."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import pytest

from cluster.structured.processes.compiled_grammar import CompiledGrammar
from cluster.structured.processes.mask_connection import (
    MaskConnection,
    MaskProcess,
    MaskProcessDiedError,
)
from cluster.structured.processes.messages import GrammarText

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
