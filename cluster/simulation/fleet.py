"""Replicas behind the router, in virtual time."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.serving.ray_serve.placement import (
    DEFAULT_CALL_LOAD,
    MAX_KEY_TOKENS,
    Placement,
    RoutingKey,
    prefix_key,
)
from cluster.simulation.virtual_replica import distinct_prompt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cluster.simulation.virtual_replica import VirtualCall, VirtualReplica
    from cluster.simulation.workload import Arrival

__all__ = ["Fleet", "Sample"]

_TICK_S = 0.1
_TICKS_PER_REPORT = 10
"""Ray Serve collects the loads of replicas once a second."""
_MOST_SAMPLES = 2000
_FIRST_PREFIX = 10**9
"""Token ids of prefixes start here, above the ids of prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state of all replicas together at one time."""

    time_s: float
    num_running: int
    num_waiting: int
    """Sequences that wait, including swapped sequences."""
    kv_use: float
    """The part of the blocks that is taken."""
    num_preemptions: int
    """Preemptions since the start."""
    num_generated_tokens: int
    """Tokens generated since the start."""


class Fleet:
    """Some replicas and their router, which sees loads that are up to a second old."""

    def __init__(
        self,
        make_replica: Callable[[], VirtualReplica],
        *,
        num_replicas: int,
        placement: Placement | None = None,
    ) -> None:
        """`placement` is the router's, by default with its default options."""
        self._replicas = {f"replica {number}": make_replica() for number in range(num_replicas)}
        self._placement = placement or Placement(draws=random.Random(0))
        self._tick = self._next_report = 0
        self._prefixes: dict[str, int] = {}
        self._samples: list[Sample] = []
        self._ticks_per_sample = 1
        self.calls: list[VirtualCall] = []
        """Calls by their time of arrival."""

    @property
    def replicas(self) -> tuple[VirtualReplica, ...]:
        """All replicas."""
        return tuple(self._replicas.values())

    @property
    def samples(self) -> tuple[Sample, ...]:
        """States at equal intervals, oldest first."""
        return tuple(self._samples)

    def run(self, arrivals: Iterable[Arrival]) -> None:
        """Run requests, which are sorted by time, until all have ended."""
        pending = iter(arrivals)
        arrival = next(pending, None)
        while True:
            if not any(one.has_work for one in self.replicas):
                if arrival is None:
                    return
                # Nothing happens until then.
                self._tick = max(self._tick, int(arrival.arrival_s / _TICK_S))
            until_s = self.begin_tick()
            while arrival is not None and arrival.arrival_s < until_s:
                self.calls.append(
                    self.submit(
                        self._prompt_of(arrival),
                        num_output_tokens=arrival.num_output_tokens,
                        arrival_s=arrival.arrival_s,
                        tenant=arrival.tenant,
                    )
                )
                arrival = next(pending, None)
            self.end_tick()

    def begin_tick(self) -> float:
        """Let the router take the loads of replicas if it is time; return when the tick ends."""
        if self._tick >= self._next_report:
            self._placement.set_replicas(
                {name: _load_of(one) for name, one in self._replicas.items()}
            )
            self._next_report = (self._tick // _TICKS_PER_REPORT + 1) * _TICKS_PER_REPORT
        self._tick += 1
        return self._tick * _TICK_S

    def submit(
        self, prompt: list[int], *, num_output_tokens: int, arrival_s: float, tenant: str
    ) -> VirtualCall:
        """Route a request that arrives before the tick ends."""
        name = next(iter(self._replicas))
        if len(self._replicas) > 1:
            text = prefix_key(prompt[:MAX_KEY_TOKENS])
            # Tenants have one credential each.
            key = None if text is None else RoutingKey(text, f"tenant {tenant}")
            name = self._placement.choose_replicas(key)[0]
            self._placement.add_load(name, DEFAULT_CALL_LOAD)
        return self._replicas[name].submit(
            prompt, num_output_tokens=num_output_tokens, arrival_s=arrival_s, tenant=tenant
        )

    def end_tick(self) -> None:
        """Run all replicas to the end of the tick."""
        until_s = self._tick * _TICK_S
        for replica in self.replicas:
            replica.run(until_s=until_s)
        if self._tick % self._ticks_per_sample == 0:
            self._take_sample(until_s)

    def _prompt_of(self, arrival: Arrival) -> list[int]:
        num_own = arrival.num_prompt_tokens - arrival.num_prefix_tokens
        own = distinct_prompt(len(self.calls), num_own)
        if not arrival.num_prefix_tokens:
            return own
        number = self._prefixes.setdefault(arrival.prefix, len(self._prefixes))
        return [_FIRST_PREFIX + number] * arrival.num_prefix_tokens + own

    def _take_sample(self, time_s: float) -> None:
        stats = [one.scheduler.stats() for one in self.replicas]
        num_blocks = sum(one.num_blocks for one in stats)
        self._samples.append(
            Sample(
                time_s=time_s,
                num_running=sum(one.num_running for one in stats),
                num_waiting=sum(one.num_waiting + one.num_swapped for one in stats),
                kv_use=1.0 - sum(one.num_free_blocks for one in stats) / num_blocks,
                num_preemptions=sum(
                    one.num_swap_preemptions + one.num_recompute_preemptions for one in stats
                ),
                num_generated_tokens=sum(one.num_generated_tokens for one in self.replicas),
            )
        )
        if len(self._samples) == _MOST_SAMPLES:
            self._samples = self._samples[1::2]
            self._ticks_per_sample *= 2


def _load_of(replica: VirtualReplica) -> float:
    """Return the load as a replica reports it: the part of its cache that tokens take."""
    stats = replica.scheduler.stats()
    num_slots = stats.num_blocks * replica.block_size
    num_taken = (stats.num_blocks - stats.num_free_blocks) * replica.block_size
    return (num_taken + stats.num_queued_tokens) / num_slots
