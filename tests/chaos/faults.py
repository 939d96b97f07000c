"""The faults that a run injects; `FAULTS` lists them, each with a row in docs/reliability.md."""

import asyncio
import json
import random
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import ClassVar

import grpc
import psutil

from tests.chaos.clients import Relay
from tests.chaos.targets import Target, named
from tests.load.keep_alive import KeepAlive
from tests.load.mutated_bodies import mutated_json, mutated_protobuf
from tests.load.request_bodies import json_bodies, protobuf_bodies

_OPEN_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The target of a fault, and what a fault needs to know about the run."""

    target: Target
    generator: random.Random
    key: str
    """The API key of a tenant that no checked call belongs to."""
    relays: tuple[Relay, ...]
    """The relays through which clients that resume their streams connect."""
    hung: set[psutil.Process] = field(default_factory=set)
    """Processes that hang forever, so that no other fault continues them."""

    def choose(self, processes: Iterable[psutil.Process], number: int = 1) -> list[psutil.Process]:
        """Return at most this number of processes, at random."""
        given = list(processes)
        return self.generator.sample(given, min(number, len(given)))


class Fault(ABC):
    """One thing that goes wrong, once."""

    name: ClassVar[str]
    """As in the table of docs/reliability.md."""
    targets: ClassVar[frozenset[str]] = frozenset({"server"})
    """The kinds of targets that it applies to."""
    needs_rank_processes: ClassVar[bool] = False
    needs_disk: ClassVar[bool] = False
    """Whether it fills the disk of the target, which only root can make."""
    needs_descriptor_limit: ClassVar[bool] = False
    """Whether it takes all connections that a low limit of descriptors allows."""
    may_end_streams: ClassVar[bool] = False
    """Whether accepted streams may end with an error. They never end in silence."""
    limit_s: ClassVar[float] = 60.0
    """How long it may take until the server is whole and streams continue, on a busy machine."""
    pause_limit_s: ClassVar[float] = 60.0
    """How long a stream may pause, on a busy machine."""
    pairs_with_others: ClassVar[bool] = True

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._awaited: list[psutil.Process] = []
        """Processes that must end before the fault is over."""

    @abstractmethod
    async def inject(self) -> None:
        """Inject the fault; return once nothing more of it follows."""

    def is_over(self) -> bool:
        """Return whether the server has recovered from the fault."""
        return not any(process.is_running() for process in self._awaited)


async def pause(scene: Scene, processes: Iterable[psutil.Process], *, seconds: float) -> None:
    """Send SIGSTOP and later SIGCONT, but do not continue processes that another fault has hung."""
    stopped = list(processes)
    # Some may have ended, or end meanwhile.
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    await asyncio.sleep(seconds)
    for process in stopped:
        if process not in scene.hung:
            with suppress(psutil.NoSuchProcess):
                process.resume()


class _OfRanks(Fault):
    """A fault of rank processes, on any target."""

    targets = frozenset({"server", "serve"})
    needs_rank_processes = True


class KillRank(_OfRanks):
    """SIGKILL of one rank."""

    name = "a rank is killed"
    _number: ClassVar[int] = 1

    async def inject(self) -> None:
        for rank in self._scene.choose(self._scene.target.ranks(), self._number):
            rank.kill()


class KillTwoRanks(KillRank):
    """SIGKILL of two ranks."""

    name = "two ranks are killed"
    _number = 2


class KillDuringReplacement(_OfRanks):
    """SIGKILL of a rank, and of a rank of the next group while it starts."""

    name = "a rank is killed while ranks are replaced"
    limit_s = 90.0
    _wait_s: ClassVar[float] = 30.0

    async def inject(self) -> None:
        target = self._scene.target
        old = target.ranks()
        if not old:
            return
        self._scene.generator.choice(old).kill()
        deadline_s = time.monotonic() + self._wait_s
        while time.monotonic() < deadline_s:
            started = [rank for rank in target.ranks() if rank not in old]
            if started:
                started[0].kill()
                return
            await asyncio.sleep(0.02)


class StopRank(_OfRanks):
    """SIGSTOP of a rank, and SIGCONT before a watchdog must have noticed."""

    name = "a rank pauses"

    async def inject(self) -> None:
        await pause(self._scene, self._scene.choose(self._scene.target.ranks()), seconds=4.0)


class HangRank(_OfRanks):
    """SIGSTOP of a rank, without SIGCONT: the server has to notice and replace it."""

    name = "a rank hangs"

    async def inject(self) -> None:
        for rank in self._scene.choose(self._scene.target.ranks()):
            self._awaited.append(rank)
            self._scene.hung.add(rank)
            # A pair's other fault may just have killed it.
            with suppress(psutil.NoSuchProcess):
                rank.suspend()


class PauseEverything(Fault):
    """SIGSTOP of the server and of all ranks, and SIGCONT, as when a machine is suspended."""

    name = "the server and all ranks pause"
    targets = frozenset({"server", "serve"})

    async def inject(self) -> None:
        target = self._scene.target
        await pause(self._scene, [*target.servers(), *target.ranks()], seconds=8.0)


class Terminate(Fault):
    """SIGTERM: the open streams finish within --drain-s, and new calls are refused."""

    name = "SIGTERM"
    limit_s = 180.0
    pairs_with_others = False

    async def inject(self) -> None:
        for server in self._scene.target.servers():
            server.terminate()
            while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
                with suppress(psutil.NoSuchProcess):
                    await asyncio.sleep(0.1)


class _KillDaemon(Fault):
    """SIGKILL of one of Ray's processes: open streams finish, the server ends and starts again."""

    needs_rank_processes = True
    limit_s = 180.0
    pairs_with_others = False
    daemon: ClassVar[str]
    """A word of its command line."""

    async def inject(self) -> None:
        # Without this process of Ray, a server cannot go on for long.
        self._awaited = self._scene.target.servers()
        for process in named(self._scene.target.family(), self.daemon):
            process.kill()


class KillGcs(_KillDaemon):
    """Ray's global control service ends."""

    name = "Ray's GCS is killed"
    daemon = "gcs_server"


class KillRaylet(_KillDaemon):
    """The raylet ends, the parent of all ranks of its node."""

    name = "Ray's raylet is killed"
    daemon = "raylet/raylet"


class _HangDaemon(Fault):
    """SIGSTOP and SIGCONT: streams go on, and the server is not ready meanwhile."""

    needs_rank_processes = True
    # A rank that dies meanwhile cannot be replaced.
    pairs_with_others = False
    daemon: ClassVar[str]
    """A word of its command line."""

    async def inject(self) -> None:
        processes = named(self._scene.target.family(), self.daemon)
        # Longer than it takes to notice, shorter than it takes until the server gives up.
        await pause(self._scene, processes, seconds=20.0)


class HangGcs(_HangDaemon):
    """Ray's global control service hangs."""

    name = "Ray's GCS hangs"
    daemon = "gcs_server"


class HangRaylet(_HangDaemon):
    """The raylet hangs, the parent of all ranks of its node."""

    name = "Ray's raylet hangs"
    daemon = "raylet/raylet"


class KillReplica(Fault):
    """SIGKILL of a replica, with the controller of its engine."""

    name = "a Serve replica is killed"
    targets = frozenset({"serve"})
    limit_s = 120.0

    async def inject(self) -> None:
        self._scene.generator.choice(self._scene.target.servers()).kill()


class HangReplica(Fault):
    """SIGSTOP of a replica, without SIGCONT: Serve has to replace it."""

    name = "a Serve replica hangs"
    targets = frozenset({"serve"})
    limit_s = 180.0
    pause_limit_s = 30.0
    pairs_with_others = False

    async def inject(self) -> None:
        server = self._scene.generator.choice(self._scene.target.servers())
        server.suspend()
        self._awaited.append(server)


class KillServeController(Fault):
    """SIGKILL of the actor that starts, watches and scales replicas; Ray starts it again."""

    name = "Serve's controller is killed"
    targets = frozenset({"serve"})

    async def inject(self) -> None:
        for controller in named(self._scene.target.family(), "ServeController"):
            controller.kill()


class FillDisk(Fault):
    """Not a byte is left for temporary files and Ray's files while a rank is killed."""

    name = "the disk is full"
    needs_rank_processes = True
    needs_disk = True
    pairs_with_others = False

    async def inject(self) -> None:
        disk = self._scene.target.disk
        assert disk is not None
        disk.fill()
        try:
            self._scene.generator.choice(self._scene.target.ranks()).kill()
            await asyncio.sleep(8.0)
        finally:
            disk.empty()


# More than one, since a host may have half of the connections. All of 127.0.0.0/8 is the loopback.
_HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
# As gRPC's clients begin.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_CONNECT_TIMEOUT_S = 2.0
_NUM_AT_ONCE = 32
_NUM_ROUNDS = 40


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
                await asyncio.sleep(0.1)
                taken = max((server.num_fds() for server in target.servers()), default=0)
                if taken > 7 * limit // 8:
                    break
            assert taken > 3 * limit // 4, f"Only {taken} of {limit} descriptors are taken."
            self._scene.generator.choice(target.ranks()).kill()
            await asyncio.sleep(8.0)


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


class _RawStream:
    """An HTTP stream of many tokens on a plain socket, which no client library reads."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._socket = socket.socket()
        # The server's output soon fills a small buffer.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.setblocking(False)

    async def open(self, *, num_sequences: int) -> None:
        """Send the request and wait for the first bytes; a server that restarts sends none."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                await self._open(num_sequences)

    async def _open(self, num_sequences: int) -> None:
        body = json.dumps(
            {
                "model": self._scene.target.model,
                "prompt": "import os\n",
                "n": num_sequences,
                "max_tokens": 400,
                "ignore_eos": True,
                "logprobs": 5,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: chaos\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {self._scene.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        host, _, port = self._scene.target.url.removeprefix("http://").partition(":")
        await loop.sock_connect(self._socket, (host, int(port)))
        await loop.sock_sendall(self._socket, head.encode() + body)
        await loop.sock_recv(self._socket, 1024)

    def reset(self) -> None:
        """Close the connection with a TCP reset."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class DisconnectClients(Fault):
    """Streams that are closed or reset after a random time."""

    name = "clients disconnect"
    targets = frozenset({"server", "serve"})

    async def inject(self) -> None:
        await asyncio.gather(*(self._disconnect() for _ in range(16)))

    async def _disconnect(self) -> None:
        stream = _RawStream(self._scene)
        await stream.open(num_sequences=2)
        await asyncio.sleep(self._scene.generator.random())
        if self._scene.generator.random() < 0.5:
            stream.reset()
        else:
            stream.close()


class StallReaders(Fault):
    """Streams with small receive buffers that are not read for a few seconds."""

    name = "readers stall"
    targets = frozenset({"server", "serve"})

    async def inject(self) -> None:
        streams = [_RawStream(self._scene) for _ in range(4)]
        for stream in streams:
            await stream.open(num_sequences=4)
        await asyncio.sleep(15.0)
        for stream in streams:
            stream.close()


class CutConnections(Fault):
    """Resets of all relayed connections, a few times; clients resume their streams."""

    name = "connections are cut"

    async def inject(self) -> None:
        for _ in range(4):
            for relay in self._scene.relays:
                relay.cut()
            await asyncio.sleep(self._scene.generator.random() * 2.0)


class HostileInput(Fault):
    """Mutated bodies to every endpoint and method, from one tenant."""

    name = "hostile input"
    targets = frozenset({"server", "serve"})
    _seconds: ClassVar[float] = 5.0

    async def inject(self) -> None:
        end_s = time.monotonic() + self._seconds
        await asyncio.gather(self._over_http(end_s), self._over_grpc(end_s))

    async def _over_http(self, end_s: float) -> None:
        scene = self._scene
        good = json_bodies(scene.target.model)
        port = int(scene.target.url.rpartition(":")[2])
        connection = KeepAlive(port, headers={"authorization": f"Bearer {scene.key}"})
        while time.monotonic() < end_s:
            kind = scene.generator.choice(list(good))
            body = mutated_json(good[kind], scene.generator)
            try:
                async with asyncio.timeout(_OPEN_TIMEOUT_S):
                    await connection.post(kind.partition(" ")[0], body)
            except (OSError, EOFError, TimeoutError):
                # The connection has the rest of an answer, or the server restarts.
                connection.close()
        connection.close()

    async def _over_grpc(self, end_s: float) -> None:
        scene = self._scene
        good = protobuf_bodies(scene.target.model)
        metadata = (("authorization", f"Bearer {scene.key}"),)
        async with grpc.aio.insecure_channel(scene.target.grpc_target) as channel:
            while time.monotonic() < end_s:
                kind = scene.generator.choice(list(good))
                method = f"/pagedray.v1.GenerationService/{kind.partition(' ')[0]}"
                body = mutated_protobuf(good[kind], scene.generator)
                call = channel.unary_stream(method)(  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
                    body, timeout=_OPEN_TIMEOUT_S, metadata=metadata
                )
                try:
                    async for _ in call:
                        pass
                except grpc.aio.AioRpcError:
                    continue


FAULTS: tuple[type[Fault], ...] = (
    *(KillRank, KillTwoRanks, KillDuringReplacement, StopRank, PauseEverything),
    *(DisconnectClients, CutConnections, StallReaders, HostileInput, Terminate, HangRank),
    *(FillDisk, ExhaustDescriptors, HangReplica, KillGcs, KillRaylet, HangGcs, HangRaylet),
    *(KillReplica, KillServeController),
)
