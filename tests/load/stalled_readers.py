"""Clients that stop reading, beside clients that read: `python -m tests.load.stalled_readers`.

Clients read all the time, first alone, then while others have stopped reading. Measured are the
tokens that readers get for the server's CPU time, how long the server holds the stalled calls after
it has generated their tokens, and its memory. Every block of the KV cache is written before, since
memory counts for the server from its first use.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from contextlib import ExitStack
from typing import Any

import grpc

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.load.measured_server import MeasuredServer, pin_load
from tests.load.report import Report

__all__ = ["StalledReaders"]

_NUM_READERS = 4
_NUM_STALLED = 4
_NUM_SEQUENCES = 8
_MAX_TOKENS = 500
# The client's window does not grow.
_CHANNEL_OPTIONS = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**16),
    ("grpc.use_local_subchannel_pool", 1),
)
_FIELDS: dict[str, Any] = {"max_tokens": _MAX_TOKENS, "ignore_eos": True}  # Any: JSON


class StalledReaders:
    """Readers and stalled readers of one server."""

    def __init__(self, server: MeasuredServer, *, write_timeout_s: float) -> None:
        self._server = server
        self._write_timeout_s = write_timeout_s

    async def measure(self, frontend: str, num_rounds: int) -> dict[str, object]:
        """Compare readers alone with readers beside stalled ones, alternately."""
        open_stalled = self._stalled_http if frontend == "http" else self._stalled_grpc
        alone: list[float] = []
        beside: list[float] = []
        held: list[float] = []
        rss_mib = [self._server.rss_mib()]
        most_mib = 0.0
        for _ in range(num_rounds):
            alone.append(await self._tokens_per_cpu_s())
            with ExitStack() as stack:
                stalled = [open_stalled(stack) for _ in range(_NUM_STALLED)]
                assert stalled
                most_mib = max(most_mib, await self._until_stalled())
                started_s = time.monotonic()
                beside.append(await self._tokens_per_cpu_s())
                while await self._num_calls():
                    assert time.monotonic() < started_s + 5 * self._write_timeout_s
                    await asyncio.sleep(0.2)
                held.append(time.monotonic() - started_s)
            rss_mib.append(self._server.rss_mib())
        return {
            "readers_tokens_per_cpu_s_alone": [round(one) for one in alone],
            "readers_tokens_per_cpu_s_beside_stalled": [round(one) for one in beside],
            "stalled_calls_held_s": [round(one, 1) for one in held],
            "rss_mib_before_and_after_rounds": [round(one) for one in rss_mib],
            "rss_mib_at_most": round(most_mib),
        }

    async def fill_cache(self) -> None:
        """Write every block of the KV cache."""
        for _ in range(3):
            await self._tokens_per_cpu_s()

    async def _tokens_per_cpu_s(self) -> float:
        """Return the tokens that readers get per second of the server's CPU time."""
        cpu_s = self._server.cpu_s()
        num_tokens = self._server.num_generated_tokens()
        async with grpc.aio.insecure_channel(self._server.grpc_target) as channel:
            stub: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)  # Any: not async to mypy
            await asyncio.gather(*(_read(stub) for _ in range(_NUM_READERS)))
        num_tokens = self._server.num_generated_tokens() - num_tokens
        return num_tokens / (self._server.cpu_s() - cpu_s)

    async def _until_stalled(self) -> float:
        """Wait until the stalled calls generate nothing; return the server's most memory in MiB."""
        most_mib = self._server.rss_mib()
        while not self._server.is_idle():
            most_mib = max(most_mib, self._server.rss_mib())
            await asyncio.sleep(0.2)
        return most_mib

    async def _num_calls(self) -> int:
        async with grpc.aio.insecure_channel(self._server.grpc_target) as channel:
            stub: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)  # Any: not async to mypy
            return len((await stub.GetLoads(pb.GetLoadsRequest())).calls)

    def _stalled_http(self, stack: ExitStack) -> object:
        body = {"model": "tiny-llama", "prompt": "x", "stream": True, "n": _NUM_SEQUENCES}
        content = json.dumps({**body, **_FIELDS, "logprobs": 20}).encode()
        connection = stack.enter_context(socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", self._server.http_port))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
            % (len(content), content)
        )
        return connection

    def _stalled_grpc(self, stack: ExitStack) -> object:
        channel = grpc.insecure_channel(self._server.grpc_target, _CHANNEL_OPTIONS)
        stack.enter_context(channel)
        sampling = pb.SamplingParams(**_FIELDS, n=_NUM_SEQUENCES, logprobs=20)
        call = pagedray_pb2_grpc.GenerationServiceStub(channel).Generate(
            pb.GenerateRequest(text="x", sampling=sampling)
        )
        next(call)
        return call


async def _read(stub: Any) -> None:  # Any: the generated stub is not async to mypy
    sampling = pb.SamplingParams(**_FIELDS, n=_NUM_SEQUENCES)
    async for _ in stub.Generate(pb.GenerateRequest(text="x", sampling=sampling)):
        pass


def main() -> None:
    """Measure both frontends, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--write-timeout-s", type=float, default=20.0, help="(%(default)s)")
    Report.add_argument(parser)
    options = parser.parse_args()
    report = Report("tests.load.stalled_readers")
    pin_load()
    arguments = (
        f"--write-timeout-s={options.write_timeout_s:g}",
        "--max-num-seqs=64",
        "--num-blocks=1024",
        "--log-level=warning",
    )
    for frontend in ("http", "grpc"):
        with MeasuredServer(*arguments) as server:
            report.add("server", server.command)
            readers = StalledReaders(server, write_timeout_s=options.write_timeout_s)
            asyncio.run(readers.fill_cache())
            report.add(frontend, asyncio.run(readers.measure(frontend, options.rounds)))
            report.add(f"errors_in_log_{frontend}", server.logged_errors())
    report.write(options.output)


if __name__ == "__main__":
    main()
