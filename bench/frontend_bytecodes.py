"""Python bytecodes and calls that a streamed message costs in each frontend.

    python -m bench.frontend_bytecodes --output bench/results/frontend_bytecodes.json

Those of the package `cluster` are counted, which do not depend on the machine and its load, so that
two commits can be compared where times vary: how often asyncio looks for events depends on both.
The work of C code, such as gRPC's, and of system calls is not included either.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cluster
from bench.frontend_server import start_frontends
from bench.frontends.kinds import KINDS, NUM_STREAMS, open_clients
from bench.frontends.token_counter import TokenCounter
from bench.records.command import command_and_date

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from bench.frontend_server import PacedEngine
    from bench.frontends.clients import StreamClients
    from bench.frontends.kinds import Kind

_COUNTED = tuple(cluster.__path__)
NUM_WARM_UP_STEPS = 3
NUM_STEPS = 12
STEP_S = 0.25
"""Enough to write the messages of a step while bytecodes are counted."""
MOST_LEAD = 1000
TOKENS_PER_MESSAGE = (1, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    frontend: str
    tokens_per_message: int
    bytecodes_per_message: float
    calls_per_message: float
    """Calls of Python functions, and resumptions of coroutines."""


class BytecodeCounter:
    """Counts what the current thread runs of the package `cluster`."""

    def __init__(self) -> None:
        self.num_bytecodes = 0
        self.num_calls = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count inside the block."""
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)

    # Any: as in sys.settrace's signature.
    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_COUNTED):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.num_bytecodes += 1
        elif event == "call":
            self.num_calls += 1
        return self._trace


async def _measure(kind: Kind, counter: TokenCounter, num_tokens: int) -> Row:
    frontends, engine = await start_frontends(counter)
    engine.set_pace(step_s=0.0, lead=MOST_LEAD)
    port = frontends.grpc_port if kind.is_grpc else frontends.http_port
    assert port is not None
    is_over = threading.Event()
    try:
        with open_clients(kind, port, NUM_STREAMS, counter) as clients:
            reader = threading.Thread(target=_read, args=(clients, is_over))
            reader.start()
            try:
                return await _count(kind, engine, num_tokens)
            finally:
                is_over.set()
                await asyncio.to_thread(reader.join)
    finally:
        await frontends.stop_servers(0.0)


async def _count(kind: Kind, engine: PacedEngine, num_tokens: int) -> Row:
    while engine.stats().scheduler.num_running < NUM_STREAMS:
        await asyncio.sleep(0.01)
    for _ in range(NUM_WARM_UP_STEPS):
        _publish(engine, num_tokens)
        await asyncio.sleep(STEP_S)
    counted = BytecodeCounter()
    for _ in range(NUM_STEPS):
        _publish(engine, num_tokens)
        with counted.counting():
            await asyncio.sleep(STEP_S)
    num_messages = NUM_STEPS * NUM_STREAMS
    return Row(
        kind.name,
        num_tokens,
        round(counted.num_bytecodes / num_messages, 1),
        round(counted.num_calls / num_messages, 2),
    )


def _publish(engine: PacedEngine, num_tokens: int) -> None:
    """Publish as many tokens of each stream before the event loop sees any of them."""
    for _ in range(num_tokens):
        engine.run_step()


def _read(clients: StreamClients, is_over: threading.Event) -> None:
    while not is_over.is_set():
        clients.read(0.05)


def main() -> int:
    """Count in every frontend and print a table."""
    parser = argparse.ArgumentParser(description="Python bytecodes of a streamed message.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    print("| frontend | tokens per message | bytecodes per message | calls |")
    print("| --- | ---: | ---: | ---: |")
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(TokenCounter.NUM_BYTES))
        file.flush()
        for kind, num_tokens in product(KINDS, TOKENS_PER_MESSAGE):
            if kind.is_grpc and not kind.shares_connection:
                continue
            row = asyncio.run(_measure(kind, TokenCounter(Path(file.name)), num_tokens))
            print(
                f"| {row.frontend} | {row.tokens_per_message} | {row.bytecodes_per_message:.0f} "
                f"| {row.calls_per_message:.1f} |",
                flush=True,
            )
            rows.append(row)
    if options.output:
        report = {
            **command_and_date(),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("grpcio", "protobuf", "uvicorn")},
            },
            "rows": [asdict(row) for row in rows],
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
