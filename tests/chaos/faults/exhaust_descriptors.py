"""Idle connections take every descriptor, and a rank dies meanwhile."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack, suppress

from tests.chaos.faults.fault import Fault

__all__ = ["ExhaustDescriptors"]

# More than one, since a host may have half of the connections. All of 127.0.0.0/8 is the loopback.
_HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
# As gRPC's clients begin.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_CONNECT_TIMEOUT_S = 2.0
_NUM_AT_ONCE = 32
_NUM_ROUNDS = 40
_PAUSE_S = 0.1
_SECONDS = 8.0


class ExhaustDescriptors(Fault):
    """Other hosts open all connections that both frontends accept, and a rank is killed."""

    name = "no descriptors are left"
    needs_rank_processes = True
    needs_descriptor_limit = True
    pairs_with_others = False

    async def inject(self) -> None:
        target = self._scene.target
        limit = target.descriptor_limit
        assert limit is not None
        grpc_port, http_port = (
            int(address.rpartition(":")[2]) for address in (target.grpc_target, target.url)
        )
        with ExitStack() as stack:
            taken = 0
            # A connection is open before the server accepts it, or closes it.
            for _ in range(_NUM_ROUNDS):
                opening = [
                    _open(stack, host, port, first)
                    for host in _HOSTS
                    for port, first in ((grpc_port, _PREFACE), (http_port, b""))
                    for _ in range(_NUM_AT_ONCE // len(_HOSTS))
                ]
                await asyncio.gather(*opening)
                await asyncio.sleep(_PAUSE_S)
                taken = max((server.num_fds() for server in target.servers()), default=0)
                if taken > 7 * limit // 8:
                    break
            assert taken > 3 * limit // 4, f"Only {taken} of {limit} descriptors are taken."
            self._scene.generator.choice(target.ranks()).kill()
            await asyncio.sleep(_SECONDS)


async def _open(stack: ExitStack, host: str, port: int, first: bytes) -> None:
    """Open a connection that stays idle, unless the server closes it."""
    connection = stack.enter_context(socket.socket())
    connection.bind((host, 0))
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            await loop.sock_connect(connection, ("127.0.0.1", port))
            await loop.sock_sendall(connection, first)
