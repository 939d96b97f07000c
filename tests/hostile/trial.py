"""An attack on a real server beside an honest tenant and health checks, and its outcome."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.hostile.attack import Attack, Findings, Target
from tests.load.measured_server import MeasuredServer, write_keys
from tests.load.report import times_ms
from tests.orphan_guard import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Trial", "attacker_process"]

# In bfloat16 the next two tokens' logits are often a rounding apart, so that the honest tenant's
# text depends on how many rows its steps have.
_COMMON = ("--dtype=float32", "--num-blocks=128", "--max-num-seqs=16", "--log-level=warning")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What attacks must have in common to share a server."""

    arguments: tuple[str, ...]
    has_keys: bool
    max_descriptors: int | None

    @classmethod
    def of(cls, attack: Attack) -> ServerOptions:
        """Return the options of an attack."""
        return cls(
            arguments=attack.arguments,
            has_keys=attack.has_keys,
            max_descriptors=attack.max_descriptors,
        )


class HostileServer:
    """A server with the tenants `honest` and `hostile`, as a context manager."""

    def __init__(self, options: ServerOptions, *, has_rank_processes: bool = False) -> None:
        self._stack = ExitStack()
        self.keys: dict[str, str] = {}
        """The tenants' keys; empty if the server requires none."""
        arguments = [*_COMMON, *options.arguments]
        if options.has_keys:
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            self.keys = write_keys(folder / "keys.toml", "honest", "hostile")
            arguments.append(f"--api-keys={folder / 'keys.toml'}")
        self.measured = MeasuredServer(
            *arguments,
            has_rank_processes=has_rank_processes,
            max_descriptors=options.max_descriptors,
        )

    def __enter__(self) -> Self:
        self._stack.enter_context(self.measured)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


PROMPT = "def read(path):"
NUM_TOKENS = 48
_TENANT_TIMEOUT_S = 60.0


@dataclass(slots=True)
class Streamed:
    """The results of the tenant in a period."""

    num_requests: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Times between messages of a stream."""
    first_s: list[float] = field(default_factory=list)
    """Times to the first token."""
    lost: list[str] = field(default_factory=list)
    """Requests that ended with an error, or with other tokens than the first one."""


class HonestTenant:
    """Sends the same greedy request over gRPC, whose tokens must always be the same."""

    def __init__(self, target: str, key: str | None) -> None:
        self._target = target
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        self._expected: tuple[int, ...] | None = None

    async def stream_until(self, ended: asyncio.Event) -> Streamed:
        """Stream until the event is set, and at least once."""
        found = Streamed()
        async with grpc.aio.insecure_channel(self._target) as channel:
            # Any: the generated stub is not async to mypy.
            stub: Any = pagedray_pb2_grpc.GenerationServiceStub(channel)
            while not found.num_requests or not ended.is_set():
                await self._stream(stub, found)
        return found

    async def _stream(self, stub: Any, found: Streamed) -> None:  # Any: see `stream_until`
        sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
        request = pb.GenerateRequest(text=PROMPT, sampling=sampling)
        token_ids: list[int] = []
        last_s = time.perf_counter()
        found.num_requests += 1
        try:
            async for answer in stub.Generate(
                request, metadata=self._metadata, timeout=_TENANT_TIMEOUT_S, wait_for_ready=True
            ):
                now_s = time.perf_counter()
                (found.gaps_s if token_ids else found.first_s).append(now_s - last_s)
                last_s = now_s
                for sequence in answer.sequences:
                    token_ids += sequence.token_ids
        except grpc.aio.AioRpcError as error:
            found.lost.append(f"{error.code().name}: {error.details()}")
            return
        if self._expected is None:
            self._expected = tuple(token_ids)
        if tuple(token_ids) != self._expected:
            found.lost.append(f"{len(token_ids)} tokens differ from those without the attack")


_TIMEOUT_S = 30.0
_REQUEST = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


@dataclass(slots=True)
class Probed:
    """The answers in a period."""

    seconds: list[float] = field(default_factory=list)
    """From connecting to the answer, of both frontends."""
    failed: list[str] = field(default_factory=list)
    """Checks that were not answered with success."""


class HealthProbe:
    """Checks both frontends of a server in turns, without a key."""

    def __init__(self, http_port: int, grpc_port: int) -> None:
        self._http_port = http_port
        self._grpc_target = f"127.0.0.1:{grpc_port}"

    async def probe_until(self, ended: asyncio.Event) -> Probed:
        """Check until the event is set, and at least once."""
        found = Probed()
        while True:
            for check in (self._check_http, self._check_grpc):
                started_s = time.perf_counter()
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        await check()
                except (OSError, grpc.aio.AioRpcError, AssertionError) as error:
                    found.failed.append(f"{check.__name__}: {error!r:.200}")
                found.seconds.append(time.perf_counter() - started_s)
            if ended.is_set():
                return found
            await asyncio.sleep(_EVERY_S)

    async def _check_http(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._http_port)
        try:
            writer.write(_REQUEST)
            answer = await reader.readline()
            assert answer.startswith(b"HTTP/1.1 200"), answer
        finally:
            writer.close()

    async def _check_grpc(self) -> None:
        async with grpc.aio.insecure_channel(self._grpc_target, _OWN_CONNECTION) as channel:
            # Any: the stub is not async to mypy.
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, answer


_EVERY_S = 0.05


class MemoryWatch:
    """Samples the resident memory of processes, in MiB."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = processes
        self.peak_mib = 0.0
        """The most since the watch was made."""

    def sample_mib(self) -> float:
        """Return the memory."""
        total = 0
        for process in self._processes:
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        mib = total / 2**20
        self.peak_mib = max(self.peak_mib, mib)
        return mib

    async def watch(self) -> None:
        """Sample until it is cancelled."""
        while True:
            self.sample_mib()
            await asyncio.sleep(_EVERY_S)


TABLE_HEAD = f"{'attack':28} {'gap p99 ms':>18} {'health p99 ms':>20} {'RSS MiB':>16}  held"

_MAX_GAP_RATIO = 5.0
_MAX_HEALTH_P99_MS = 250.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """The results of honest clients in a period."""

    streamed: Streamed
    probed: Probed

    def gap_p99_ms(self) -> float:
        """Return the 99th percentile of the tenant's time between tokens."""
        return times_ms(self.streamed.gaps_s).get("p99_ms", 0.0)

    def health_p99_ms(self) -> float:
        """Return the 99th percentile of a health check's time."""
        return times_ms(self.probed.seconds).get("p99_ms", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An attack's figures, and what did not hold."""

    attack: Attack
    server_command: str
    """The equivalent shell command."""
    findings: Findings
    before: Period
    beside: Period
    rss_before_mib: float
    rss_peak_mib: float
    rss_after_mib: float
    num_log_lines: int
    """Written during the attack and after it."""
    num_tracebacks: int

    def damage(self) -> list[str]:
        """Return what did not hold, except times and memory afterwards, as sentences."""
        attack = self.attack
        found = list(self.findings.broken)
        found += [f"The honest tenant lost a request: {text}" for text in self._lost()[:3]]
        failed = self.beside.probed.failed
        if failed and attack.is_bounded:
            found.append(f"{len(failed)} health checks failed, such as: {failed[0]}")
        growth_mib = self.rss_peak_mib - self.rss_before_mib
        if growth_mib > attack.max_growth_mib and attack.is_bounded:
            found.append(f"Memory grew by {growth_mib:.0f} MiB.")
        if self.num_log_lines > attack.max_log_lines:
            found.append(f"The server logged {self.num_log_lines} lines.")
        if self.num_tracebacks:
            found.append(f"The log has {self.num_tracebacks} tracebacks.")
        return found

    def not_held(self) -> list[str]:
        """Return all that did not hold, with times and memory afterwards, as sentences."""
        found = self.damage()
        if not self.attack.is_bounded:
            return found
        before, beside = self.before.gap_p99_ms(), self.beside.gap_p99_ms()
        if beside > _MAX_GAP_RATIO * before:
            found.append(f"The time between tokens rose from {before} to {beside} ms (p99).")
        if self.beside.health_p99_ms() > _MAX_HEALTH_P99_MS:
            found.append(f"Health checks took {self.beside.health_p99_ms()} ms (p99).")
        left_mib = self.rss_after_mib - self.rss_before_mib
        if left_mib > self.attack.max_left_mib:
            found.append(f"{left_mib:.0f} MiB were still held after the attack.")
        return found

    def figures(self) -> dict[str, object]:
        """Return everything for the report."""
        return {
            "server": self.server_command,
            "attack": dict(self.findings.figures),
            "gaps_before": times_ms(self.before.streamed.gaps_s),
            "gaps_beside": times_ms(self.beside.streamed.gaps_s),
            "first_token_before": times_ms(self.before.streamed.first_s),
            "first_token_beside": times_ms(self.beside.streamed.first_s),
            "health_before": times_ms(self.before.probed.seconds),
            "health_beside": times_ms(self.beside.probed.seconds),
            "requests_beside": self.beside.streamed.num_requests,
            "rss_mib": [
                round(mib) for mib in (self.rss_before_mib, self.rss_peak_mib, self.rss_after_mib)
            ],
            "log_lines": self.num_log_lines,
            "not_held": self.not_held(),
        }

    def row(self) -> str:
        """Return a line of the table whose head is `TABLE_HEAD`."""
        rss = f"{self.rss_before_mib:.0f}/{self.rss_peak_mib:.0f}/{self.rss_after_mib:.0f}"
        gaps = f"{self.before.gap_p99_ms()} -> {self.beside.gap_p99_ms()}"
        health = f"{self.before.health_p99_ms()} -> {self.beside.health_p99_ms()}"
        held = "; ".join(self.not_held()) or "yes"
        return f"{self.attack.name:28} {gaps:>18} {health:>20} {rss:>16}  {held}"

    def _lost(self) -> list[str]:
        return self.before.streamed.lost + self.beside.streamed.lost


@contextmanager
def attacker_process() -> Iterator[ProcessPoolExecutor]:
    """Start a process for attacks."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_give_way) as attacker:
        yield attacker


class Trial:
    """Measures honest clients of one server before, beside and after an attack."""

    def __init__(self, server: HostileServer, attacker: ProcessPoolExecutor) -> None:
        self._server = server
        self._attacker = attacker
        measured = server.measured
        self._honest = HonestTenant(measured.grpc_target, server.keys.get("honest"))
        self._probe = HealthProbe(measured.http_port, measured.grpc_port)
        self._target = Target(
            http_port=measured.http_port,
            grpc_port=measured.grpc_port,
            key=server.keys.get("hostile"),
        )

    async def warm_up(self, seconds: float) -> None:
        """Let honest clients use the server, whose memory grows with its first requests."""
        await self._observe(asyncio.create_task(asyncio.sleep(seconds)))

    async def run(
        self,
        attack: Attack,
        *,
        seconds: float,
        before_s: float,
        after_s: float,
    ) -> Outcome:
        """Attack for `seconds`, after `before_s` and before `after_s` without it."""
        measured = self._server.measured
        before = await self._observe(asyncio.create_task(asyncio.sleep(before_s)))
        old_log = measured.log()
        memory = MemoryWatch(measured.processes())
        rss_before_mib = memory.sample_mib()
        watching = asyncio.create_task(memory.watch())
        attacking = asyncio.create_task(self._attack(attack, seconds))
        beside = await self._observe(attacking)
        await asyncio.sleep(after_s)
        log = measured.log()[len(old_log) :]
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        return Outcome(
            attack=attack,
            server_command=measured.command,
            findings=await attacking,
            before=before,
            beside=beside,
            rss_before_mib=rss_before_mib,
            rss_peak_mib=memory.peak_mib,
            rss_after_mib=memory.sample_mib(),
            num_log_lines=log.count("\n"),
            num_tracebacks=log.count("Traceback"),
        )

    async def _attack(self, attack: Attack, seconds: float) -> Findings:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._attacker, attack.run, self._target, seconds)

    async def _observe(self, meanwhile: asyncio.Task[Findings] | asyncio.Task[None]) -> Period:
        """Return the results of honest clients until a task is done."""
        ended = asyncio.Event()
        meanwhile.add_done_callback(lambda _: ended.set())
        streamed, probed = await asyncio.gather(
            self._honest.stream_until(ended), self._probe.probe_until(ended)
        )
        return Period(streamed=streamed, probed=probed)


def _give_way() -> None:
    """Let the honest clients interrupt this process at any time, as if it were on another machine.

    A niceness does not suffice: such a process may go on until the next tick of its core.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    end_with_parent()
