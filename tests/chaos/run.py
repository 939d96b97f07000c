"""One run: undisturbed texts, then clients and faults together, then what is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.serving.auth.key_file import digest_of, new_key
from tests.chaos.clients.frontends import Frontend, GrpcFrontend, HttpFrontend
from tests.chaos.clients.references import undisturbed
from tests.chaos.clients.relay import Relay
from tests.chaos.clients.requests import make_specs
from tests.chaos.clients.resuming import ResumingGrpcFrontend, ResumingHttpFrontend
from tests.chaos.clients.streams import Clients
from tests.chaos.faults.fault import Fault, Scene
from tests.chaos.history.events import Leftovers, Reference, Resources, RunEnded, RunStarted
from tests.chaos.injector import Injector
from tests.chaos.readiness import ReadinessWatch
from tests.chaos.resources import SharedMemoryWatch, num_descriptors, rss_mib, shared_memory_of
from tests.chaos.schedule import schedule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.chaos.clients.requests import Spec
    from tests.chaos.history.writer import History
    from tests.chaos.targets.target import Target

__all__ = ["Run", "RunOptions", "write_keys"]

_TENANTS = ("ann", "ben", "cid")
_HOSTILE = "mal"
_ADMIN = "root"
_QUIET_TIMEOUT_S = 60.0
_WATCH_PERIOD_S = 2.0
_KEEP_ALIVE_S = 1.0
_POLL_S = 0.1


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
