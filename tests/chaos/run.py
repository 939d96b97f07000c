"""One run: undisturbed texts, then clients and faults together, then what is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster.serving.auth import digest_of, new_key
from pagedray.v1 import pagedray_pb2 as pb
from tests.chaos.clients import (
    Clients,
    Frontend,
    GrpcFrontend,
    HttpFrontend,
    Relay,
    ResumingGrpcFrontend,
    ResumingHttpFrontend,
)
from tests.chaos.events import (
    ClientLag,
    FaultHealed,
    FaultInjected,
    FaultSeen,
    History,
    Leftovers,
    Readiness,
    Reference,
    ReferenceSequence,
    Resources,
    RunEnded,
    RunStarted,
)
from tests.chaos.faults import Fault, Scene
from tests.chaos.requests import (
    LEAST_MARGIN,
    NUM_LOGPROBS,
    Spec,
    TokenScores,
    least_margin,
    make_specs,
)
from tests.chaos.targets import Target

_NUM_AT_ONCE = 8
_REFERENCE_TIMEOUT_S = 300.0
_TENANTS = ("ann", "ben", "cid")
_HOSTILE = "mal"
_ADMIN = "root"
_QUIET_TIMEOUT_S = 60.0
_WATCH_PERIOD_S = 2.0
_KEEP_ALIVE_S = 1.0
_POLL_S = 0.1
_PAIRS = 0.25
"""The part of the faults that come in pairs."""
_LONGEST_PAIR_DELAY_S = 2.0
_FEW_ARRIVALS = 32
_STEADY_S = 1.0
"""For how long all must be well before a fault counts as healed."""
_PATIENCE = 2.0
"""Times the limit of a fault, before the next one comes in any case."""
_PERIOD_S = 0.2
_PROBE_TIMEOUT_S = 2.0
_LEAST_LAG_S = 0.5

_SHARED_MEMORY = "/dev/shm/"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How much happens in a run."""

    seed: int
    seconds: float
    every_s: float
    num_streams: int
    num_specs: int
    max_tokens: int
    faults: tuple[type[Fault], ...]
    command: str


def write_keys(path: Path) -> dict[str, str]:
    """Write a key file, and return the key of each tenant."""
    keys = {name: new_key() for name in (*_TENANTS, _HOSTILE, _ADMIN)}
    path.touch(0o600)
    path.write_text(
        "\n".join(
            f'[tenants.{name}]\nkeys = ["sha256:{digest_of(key).hex()}"]\n'
            f"is_admin = {str(name == _ADMIN).lower()}\n"
            for name, key in keys.items()
        )
    )
    return keys


class Run:
    """A run against a target that has been started."""

    def __init__(
        self, target: Target, history: History, options: RunOptions, keys: Mapping[str, str]
    ) -> None:
        self._target = target
        self._history = history
        self._options = options
        self._keys = keys
        self._shared_memory = SharedMemoryWatch()

    async def run(self) -> None:
        """Run from the undisturbed texts to the last call, and close the clients."""
        async with AsyncExitStack() as stack:
            over_grpc, over_http = GrpcFrontend(self._target), HttpFrontend(self._target)
            frontends: list[Frontend] = [over_grpc, over_http]
            relays = []
            if self._target.can_resume:
                for address in (self._target.grpc_target, self._target.url):
                    relay = Relay(int(address.rpartition(":")[2]))
                    relays.append(await stack.enter_async_context(relay))
                frontends.append(ResumingGrpcFrontend(relays[0]))
                frontends.append(ResumingHttpFrontend(relays[1], self._target.model))
            for frontend in frontends:
                stack.push_async_callback(frontend.close)
            specs = await self._usable_specs(over_grpc)
            self._history.add(await self._resources("before"))
            self._history.add(
                RunStarted(
                    at_s=self._history.now_s,
                    command=self._options.command,
                    seed=self._options.seed,
                    target=self._target.name,
                )
            )
            await self._disturb(specs, frontends, relays)
        self._history.add(await self._resources("after"))
        self._history.add(RunEnded(at_s=self._history.now_s))

    def note_leftovers(self, names: Sequence[str]) -> None:
        """Write down what is still there after the target was stopped."""
        tracebacks = self._target.tracebacks()
        self._history.add(
            Leftovers(
                at_s=self._history.now_s,
                processes=tuple(names),
                shared_memory=self._shared_memory.left(),
                num_tracebacks=len(tracebacks),
                first_traceback=tracebacks[0] if tracebacks else "",
            )
        )

    async def _usable_specs(self, frontend: GrpcFrontend) -> list[Spec]:
        """Return requests whose undisturbed texts can be compared exactly; write these down."""
        specs = make_specs(
            self._options.num_specs, max_tokens=self._options.max_tokens, seed=self._options.seed
        )
        usable = await undisturbed(specs, frontend, key=self._keys[_ADMIN])
        for spec, sequences in usable.items():
            self._history.add(
                Reference(at_s=self._history.now_s, spec=spec.name, sequences=sequences)
            )
        return list(usable)

    async def _disturb(
        self, specs: Sequence[Spec], frontends: Sequence[Frontend], relays: Sequence[Relay]
    ) -> None:
        """Stream and inject faults; return when every call has ended."""
        options = self._options
        readiness = ReadinessWatch(self._target.url, self._history)
        watching = asyncio.gather(readiness.run(), self._watch_shared_memory())
        clients = Clients(
            specs,
            frontends,
            self._history,
            keys={name: self._keys[name] for name in _TENANTS},
            seed=options.seed,
        )
        scene = Scene(
            target=self._target,
            generator=random.Random(f"{options.seed} faults"),
            key=self._keys[_HOSTILE],
            relays=tuple(relays),
        )
        plan = schedule(options.faults, scene.generator)
        injector = Injector(plan, scene, readiness, self._history)
        streaming = asyncio.create_task(clients.run(options.num_streams))
        while clients.num_accepted < options.num_streams and not streaming.done():
            await asyncio.sleep(_POLL_S)
        injecting = asyncio.create_task(
            injector.run(every_s=options.every_s, for_s=options.seconds)
        )
        await asyncio.wait((streaming, injecting), return_when=asyncio.FIRST_COMPLETED)
        clients.stop()
        # A client that failed is an error of this program.
        await asyncio.gather(streaming, injecting)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    async def _resources(self, when: str) -> Resources:
        """Return what the target holds, once it is quiet or after some time."""
        deadline_s = time.monotonic() + _QUIET_TIMEOUT_S
        while not (held := await self._target.holdings(self._keys[_ADMIN])).is_quiet:
            if time.monotonic() > deadline_s:
                break
            await asyncio.sleep(_POLL_S)
        # Connections that the clients keep open are closed by then.
        await asyncio.sleep(_KEEP_ALIVE_S)
        family = self._target.family()
        self._shared_memory.look(self._target)
        return Resources(
            at_s=self._history.now_s,
            when=when,
            num_processes=len(family),
            num_descriptors=num_descriptors(self._target.servers()),
            num_shared_memory=len(shared_memory_of(family)),
            num_blocks=held.num_blocks,
            num_free_blocks=held.num_free_blocks,
            num_calls=held.num_calls,
            rss_mib=rss_mib(self._target.servers()),
        )

    async def _watch_shared_memory(self) -> None:
        while True:
            self._shared_memory.look(self._target)
            await asyncio.sleep(_WATCH_PERIOD_S)


def applicable(
    faults: Sequence[type[Fault]], *, target: str, has_rank_processes: bool, can_fill_disk: bool
) -> list[type[Fault]]:
    """Return the faults that can be injected into a target."""
    return [
        fault
        for fault in faults
        if target in fault.targets
        and (has_rank_processes or not fault.needs_rank_processes)
        and (can_fill_disk or not fault.needs_disk)
    ]


def schedule(
    faults: Sequence[type[Fault]], generator: random.Random
) -> Iterator[tuple[type[Fault], ...]]:
    """Yield single faults and pairs forever; each kind comes once before any comes again."""
    while True:
        waiting = generator.sample(faults, len(faults))
        while waiting:
            first = waiting.pop()
            others = [one for one in faults if one is not first and one.pairs_with_others]
            if first.pairs_with_others and others and generator.random() < _PAIRS:
                yield first, generator.choice(others)
            else:
                yield (first,)


class Injector:
    """Injects what a schedule yields."""

    def __init__(
        self,
        plan: Iterator[tuple[type[Fault], ...]],
        scene: Scene,
        readiness: ReadinessWatch,
        history: History,
    ) -> None:
        self._plan = plan
        self._scene = scene
        self._readiness = readiness
        self._history = history
        self._number = 0

    async def run(self, *, every_s: float, for_s: float) -> None:
        """Inject a fault at most every `every_s`, the next one when the last has healed."""
        end_s = time.monotonic() + for_s
        while time.monotonic() + every_s <= end_s:
            next_s = time.monotonic() + every_s
            await self.inject(next(self._plan))
            await asyncio.sleep(max(next_s - time.monotonic(), 0.0))

    async def inject(self, kinds: tuple[type[Fault], ...]) -> None:
        """Inject one fault or a pair, and wait until it has healed."""
        faults = [kind(self._scene) for kind in kinds]
        self._number += 1
        number, limit_s = self._number, sum(one.limit_s for one in faults)
        self._history.add(
            FaultInjected(
                at_s=self._history.now_s,
                number=number,
                faults=tuple(one.name for one in faults),
                may_end_streams=any(one.may_end_streams for one in faults),
                limit_s=limit_s,
                pause_limit_s=sum(one.pause_limit_s for one in faults),
            )
        )
        delays_s = [0.0, self._scene.generator.uniform(0.0, _LONGEST_PAIR_DELAY_S)]
        injecting = asyncio.gather(
            *(_inject(one, delay_s) for one, delay_s in zip(faults, delays_s, strict=False))
        )
        try:
            async with asyncio.timeout(limit_s * _PATIENCE):
                await self._until_healed(injecting, faults, number)
        except TimeoutError:
            # The checker finds that the fault has not healed.
            injecting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await injecting

    async def _until_healed(
        self, injecting: asyncio.Future[list[None]], faults: list[Fault], number: int
    ) -> None:
        is_seen = False
        well_s: float | None = None
        arrivals = 0
        while True:
            is_well = self._readiness.is_ready and self._scene.target.is_whole()
            if not is_well and not is_seen:
                is_seen = True
                self._history.add(FaultSeen(at_s=self._history.now_s, number=number))
            if injecting.done():
                injecting.result()
            if not (is_well and injecting.done() and all(one.is_over() for one in faults)):
                well_s = None
            elif well_s is None:
                well_s, arrivals = self._history.now_s, self._history.num_arrivals
            elif (
                self._history.now_s - well_s >= _STEADY_S
                and self._history.num_arrivals - arrivals >= _FEW_ARRIVALS
            ):
                if await self._scene.target.all_serve(self._scene.key):
                    self._history.add(FaultHealed(at_s=self._history.now_s, number=number))
                    return
                well_s = None
            await asyncio.sleep(_POLL_S)


async def _inject(fault: Fault, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    await fault.inject()


class ReadinessWatch:
    """Polls /ready and writes down each change; and notes when this process did not run."""

    def __init__(self, url: str, history: History) -> None:
        self._url = f"{url}/ready"
        self._history = history
        self.state = ""

    @property
    def is_ready(self) -> bool:
        """Whether the last answer was that it is ready."""
        return self.state == "ready"

    async def run(self) -> None:
        """Poll until cancelled."""
        await asyncio.gather(self._poll(), self._watch_lag())

    async def _poll(self) -> None:
        async with httpx.AsyncClient(timeout=_PROBE_TIMEOUT_S) as client:
            while True:
                asked_s = self._history.now_s
                try:
                    answer = await client.get(self._url)
                    state = "ready" if answer.status_code == 200 else "not_ready"
                except httpx.HTTPError:
                    state = "no_answer"
                if state != self.state:
                    # The server stopped answering before the request was sent.
                    at_s = asked_s if state == "no_answer" else self._history.now_s
                    self.state = state
                    self._history.add(Readiness(at_s=at_s, state=state))
                await asyncio.sleep(_PERIOD_S)

    async def _watch_lag(self) -> None:
        while True:
            slept_s = time.monotonic()
            await asyncio.sleep(_PERIOD_S)
            lag_s = time.monotonic() - slept_s - _PERIOD_S
            if lag_s > _LEAST_LAG_S:
                self._history.add(ClientLag(at_s=self._history.now_s, seconds=round(lag_s, 3)))


class SharedMemoryWatch:
    """Remembers the shared memory files that the processes of a server have used."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def look(self, target: Target) -> None:
        """Note the files in use."""
        self._seen |= shared_memory_of(target.family())

    def left(self) -> tuple[str, ...]:
        """Return those that still exist."""
        return tuple(sorted(name for name in self._seen if Path(name).exists()))


def shared_memory_of(processes: Iterable[psutil.Process]) -> set[str]:
    """Return the names of the shared memory files that processes have mapped or open."""
    found: set[str] = set()
    for process in processes:
        # A process that ends meanwhile has none.
        with contextlib.suppress(OSError):
            found |= _mapped(process.pid) | _opened(process.pid)
    return found


def num_descriptors(processes: Iterable[psutil.Process]) -> int:
    """Return the number of open descriptors of all processes."""
    number = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            number += process.num_fds()
    return number


def rss_mib(processes: Iterable[psutil.Process]) -> float:
    """Return the memory of all processes."""
    number = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            number += process.memory_info().rss
    return round(number / 2**20, 1)


def _mapped(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    # Address, permissions, offset, device, inode, path.
    paths = (line.split(maxsplit=5)[5] for line in lines if _SHARED_MEMORY in line)
    return {path for path in paths if path.startswith(_SHARED_MEMORY) and "(deleted)" not in path}


def _opened(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            path = os.readlink(link)  # noqa: PTH115  # Path.readlink gives a path, this a text
            if path.startswith(_SHARED_MEMORY) and "(deleted)" not in path:
                found.add(path)
    return found


class _Gained:
    """One sequence as it arrives."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.scores: list[TokenScores] = []
        self.text = ""
        self.reason = ""


async def undisturbed(
    specs: Sequence[Spec], frontend: GrpcFrontend, *, key: str
) -> dict[Spec, tuple[ReferenceSequence, ...]]:
    """Return what requests give, without those that cannot be compared exactly."""
    places = asyncio.Semaphore(_NUM_AT_ONCE)

    async def run(spec: Spec) -> tuple[tuple[ReferenceSequence, ...], float]:
        async with places:
            return await _undisturbed(spec, frontend, key)

    found = await asyncio.gather(*map(run, specs))
    return {
        spec: sequences
        for spec, (sequences, margin) in zip(specs, found, strict=True)
        if margin >= LEAST_MARGIN
    }


async def _undisturbed(
    spec: Spec, frontend: GrpcFrontend, key: str
) -> tuple[tuple[ReferenceSequence, ...], float]:
    message = spec.to_message(
        f"undisturbed-{spec.name}", num_logprobs=None if spec.is_structured else NUM_LOGPROBS
    )
    method = frontend.stub.Chat if spec.is_chat else frontend.stub.Generate
    metadata = (("authorization", f"Bearer {key}"),)
    sequences = [_Gained() for _ in range(spec.n)]
    num_prompt_tokens = 0
    async for answer in method(message, metadata=metadata, timeout=_REFERENCE_TIMEOUT_S):
        if answer.HasField("prompt_info"):
            num_prompt_tokens = answer.prompt_info.num_prompt_tokens
        for one in answer.sequences:
            _add(sequences[one.index], one)
    margin = min(
        least_margin(spec, index, one.token_ids, one.scores, num_prompt_tokens)
        for index, one in enumerate(sequences)
    )
    return tuple(
        ReferenceSequence(token_ids=tuple(one.token_ids), text=one.text, reason=one.reason)
        for one in sequences
    ), margin


def _add(sequence: _Gained, gained: Any) -> None:  # Any: one of two messages
    sequence.token_ids += gained.token_ids
    sequence.text += gained.text if isinstance(gained, pb.SequenceOutput) else gained.content
    sequence.scores += (
        tuple((top.token_id, top.logprob) for top in one.top_logprobs) for one in gained.logprobs
    )
    if gained.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
        name = pb.FinishReason.Name(gained.finish_reason)
        sequence.reason = name.removeprefix("FINISH_REASON_").lower()
