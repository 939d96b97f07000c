"""What HPACK bombs cost a gRPC server with our options and no other client.

    python -m tests.hostile.header_cost

CPU time and memory depend little on the load of the machine, unlike the times of `tests.hostile`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from typing import TYPE_CHECKING

import grpc
import psutil
from grpc_health.v1 import health, health_pb2_grpc

from cluster.serving.rpc.server import CHANNEL_OPTIONS
from tests.hostile.http2 import Http2Connection
from tests.hostile.http2_attacks import HTTP2_ATTACKS, HeaderBombs

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_NUM_CONNECTIONS = 64
_QUIET_S = 0.02


def main() -> None:
    """Print a row for each kind of bomb."""
    print("| attack | KiB | CPU ms | MiB | (of each connection) |")
    for attack in HTTP2_ATTACKS.values():
        if not isinstance(attack, HeaderBombs):
            continue
        data = attack.data()
        cpu_ms, mib = _cost(data, acknowledges=attack.acknowledges)
        print(f"| {attack.name} | {len(data) / 1024:.0f} | {cpu_ms:.1f} | {mib:.2f} |")


def _cost(data: bytes, *, acknowledges: bool) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(theirs,), daemon=True)
    child.start()
    port, server = ours.recv(), psutil.Process(child.pid)
    before_s, before_bytes = _cpu_s(server), server.memory_info().rss
    connections = [
        Http2Connection(port, acknowledges=acknowledges) for _ in range(_NUM_CONNECTIONS)
    ]
    for connection in connections:
        connection.send_frames(data)
    used_s = -1.0
    # Until the server is idle.
    while _cpu_s(server) - used_s > _QUIET_S:
        used_s = _cpu_s(server)
        time.sleep(1.0)
    grown = server.memory_info().rss - before_bytes
    for connection in connections:
        connection.close()
    child.terminate()
    child.join()
    return 1e3 * (used_s - before_s) / _NUM_CONNECTIONS, grown / 2**20 / _NUM_CONNECTIONS


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _serve(pipe: Connection) -> None:
    async def serve() -> None:
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(port)
        await server.wait_for_termination()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
