"""How long the scheduler takes where much waits; ranks are not simulated."""

from __future__ import annotations

import itertools
import statistics
import time
import tracemalloc
from dataclasses import dataclass

import msgspec

from cluster.scheduling.fair_queue import FairQueue, Share
from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.scheduler import Scheduler
from pagedray.batch import StepOutput
from pagedray.config import SchedulerConfig
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams

__all__ = [
    "fork_figures",
    "lookup_times",
    "start_times",
    "stats_times",
    "tenant_times",
    "waiting_times",
]

_BLOCK_SIZE = 16
_NUM_ROWS = 64
_NUM_PROMPT_TOKENS = 127_000
_NUM_WAITING = 100_000
_NUM_STEPS = 200


class _Steps:
    """A scheduler, its requests and their steps."""

    def __init__(self, *, num_blocks: int) -> None:
        self.scheduler = Scheduler(
            config=SchedulerConfig(
                max_num_seqs=_NUM_ROWS,
                max_num_batched_tokens=8192,
                max_queued_requests=10**6,
                max_queued_tokens=10**9,
            ),
            kv=KvOptions(
                block_size=_BLOCK_SIZE,
                num_blocks=num_blocks,
                num_cpu_blocks=0,
                enable_cpu_prefix_cache=False,
            ),
            max_model_len=2 * _NUM_PROMPT_TOKENS,
        )
        self._numbers = itertools.count()

    def add(self, prompt: tuple[int, ...], *, tenant: str = "", max_tokens: int = 1) -> None:
        """Queue a request."""
        self.scheduler.add_request(self.make_request(prompt, tenant=tenant, max_tokens=max_tokens))

    def make_request(
        self, prompt: tuple[int, ...], *, tenant: str = "", max_tokens: int = 1
    ) -> Request:
        """Return a request with an id and a seed of its own."""
        number = next(self._numbers)
        return Request(
            id=f"{number:032x}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0),
            seed=number,
            tenant=tenant,
        )

    def run(self) -> None:
        """Make a plan and apply its output."""
        plan = self.scheduler.schedule()
        assert plan is not None
        num_sampled = plan.num_sampled
        self.scheduler.update(StepOutput(plan.step, [7] * num_sampled))
        self.scheduler.acknowledge(plan.step)


def tenant_times(num_tenants: int) -> list[float]:
    """Return the times of steps that start and end 64 requests of waiting tenants."""
    steps = _Steps(num_blocks=1024)
    tenants = itertools.cycle([f"tenant {number}" for number in range(num_tenants)])
    prompt = tuple(range(8))
    for _ in range(2 * num_tenants):
        steps.add(prompt, tenant=next(tenants))
    times = []
    for _ in range(_NUM_STEPS // 4):
        began_s = time.perf_counter()
        steps.run()
        times.append(time.perf_counter() - began_s)
        assert steps.scheduler.num_running == 0
        for _ in range(_NUM_ROWS):
            steps.add(prompt, tenant=next(tenants))
    return times


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """An item of a fair queue."""

    order: tuple[int, ...]
    share: Share[_Item]


def lookup_times() -> list[float]:
    """Return the times of 64 turns of a fair queue of 10 000 tenants."""
    queue = FairQueue[_Item]()
    for number in range(10_000):
        queue.insert(_Item((number,), queue.open_share(f"tenant {number}")))
    times = []
    numbers = itertools.count(10_000)
    for _ in range(_NUM_STEPS):
        began_s = time.perf_counter()
        for _ in range(_NUM_ROWS):
            item = queue.first
            queue.remove(item)
            queue.charge(item.share, 17)
            queue.insert(_Item((next(numbers),), item.share))
        times.append(time.perf_counter() - began_s)
    return times


def waiting_times() -> list[float]:
    """Return the times of steps with one running request, and no room for the next one."""
    num_blocks = _NUM_PROMPT_TOKENS // _BLOCK_SIZE
    steps = _Steps(num_blocks=num_blocks + 4)
    prompt = tuple(range(_NUM_PROMPT_TOKENS))
    steps.add(prompt)
    while steps.scheduler.num_open:
        steps.run()
    steps.add((1,) * 8 * _BLOCK_SIZE, max_tokens=_NUM_STEPS + 1)
    steps.run()
    steps.add(prompt)
    times = []
    for _ in range(_NUM_STEPS):
        began_s = time.perf_counter()
        steps.run()
        times.append(time.perf_counter() - began_s)
        assert steps.scheduler.num_waiting == 1
    return times


def start_times(*, is_prepared: bool) -> list[float]:
    """Return the times to queue a long prompt, which is cached, and to make its first step."""
    times = []
    for number in range(10):
        steps = _Steps(num_blocks=_NUM_PROMPT_TOKENS // _BLOCK_SIZE + 4)
        prompt = tuple(range(number, number + _NUM_PROMPT_TOKENS))
        steps.add(prompt)
        while steps.scheduler.num_open:
            steps.run()
        request = steps.make_request(prompt)
        prepared = steps.scheduler.prepare_prompt(request) if is_prepared else None
        began_s = time.perf_counter()
        steps.scheduler.add_request(request, prepared)
        steps.run()
        times.append(time.perf_counter() - began_s)
    return times


def fork_figures() -> dict[str, float]:
    """Return what 128 completions of a prompt of 131 072 tokens cost."""
    num_tokens, n = 131_072, 128
    scheduler = Scheduler(
        config=SchedulerConfig(
            max_num_seqs=n, max_num_batched_tokens=num_tokens, max_queued_tokens=10**9
        ),
        kv=KvOptions(
            block_size=_BLOCK_SIZE,
            num_blocks=2 * num_tokens // _BLOCK_SIZE,
            num_cpu_blocks=0,
            enable_cpu_prefix_cache=False,
        ),
        max_model_len=num_tokens + 100,
    )
    request = Request(
        id="a",
        prompt_token_ids=tuple(range(1000, 1000 + num_tokens)),
        sampling=SamplingParams(n=n, max_tokens=50, ignore_eos=True, temperature=0.0),
        seed=0,
    )
    add_times = []
    for _ in range(20):
        prepared = scheduler.prepare_prompt(request)
        began_s = time.perf_counter()
        scheduler.add_request(request, prepared)
        add_times.append(time.perf_counter() - began_s)
        scheduler.abort_request(request.id)
    tracemalloc.start()
    scheduler.add_request(request)
    num_bytes = 0
    while scheduler.num_running < n:
        plan = scheduler.schedule()
        assert plan is not None
        num_bytes = max(num_bytes, len(msgspec.msgpack.encode(plan)))
        num_sampled = plan.num_sampled
        scheduler.update(StepOutput(plan.step, [7] * num_sampled))
        scheduler.acknowledge(plan.step)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "n = 128 of a prompt of 131 072 tokens: add, ms": statistics.median(add_times) * 1e3,
        "its peak memory, MB": peak / 1e6,
        "its largest plan, MB": num_bytes / 1e6,
    }


def stats_times() -> list[float]:
    """Return the times to count the requests where 100 000 wait."""
    steps = _Steps(num_blocks=1024)
    for _ in range(_NUM_WAITING):
        steps.add((1, 2, 3))
    times = []
    for _ in range(_NUM_STEPS):
        began_s = time.perf_counter()
        steps.scheduler.stats()
        times.append(time.perf_counter() - began_s)
    return times
