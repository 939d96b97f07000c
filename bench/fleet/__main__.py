"""What the router and the schedulers cost by the number of replicas, in the simulator.

    python -m bench.fleet --output bench/results/fleet.json --plot docs/fleet.svg

Every replica gets 100 requests a second, so that 1 000 of them get 100 000. The costs are CPU time
of this machine: what one router spends on a request and on a report of loads, and what each
replica's scheduler spends in a second. Latencies are in virtual time, on a model of Llama-8B on an
H200 for each replica.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.fleet.line_chart import Chart, draw_charts
from bench.records.command import command_and_date
from cluster.scheduling.kv_manager import KvOptions
from cluster.serving.ray_serve.placement import Placement, prefix_key
from cluster.simulation.fleet import Fleet
from cluster.simulation.step_cost import LLAMA_8B_H200
from cluster.simulation.virtual_replica import VirtualReplica
from cluster.simulation.workload import Workload
from pagedray.config import SchedulerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cluster.scheduling.scheduler import Scheduler
    from cluster.serving.ray_serve.placement import RoutingKey

_REQUESTS_PER_REPLICA = 100
"""In a second."""
_NUM_KEY_TOKENS = 256
_SECONDS = 1.0
_NUM_REPLICAS = (10, 30, 100, 300, 1000)
_TITLES = (
    "replicas",
    "requests/s",
    "router, us a request",
    "router cores",
    "report, us",
    "scheduler, core of each",
    "p99 TTFT, s",
)


class _TimedPlacement(Placement):
    """A placement that adds up what it costs."""

    def __init__(self) -> None:
        super().__init__(draws=random.Random(0))
        self.chosen_s = self.reported_s = 0.0
        self.num_reports = 0

    def set_replicas(self, loads: Mapping[str, float]) -> None:
        began_s = time.process_time()
        super().set_replicas(loads)
        self.reported_s += time.process_time() - began_s
        self.num_reports += 1

    def choose_replicas(self, key: RoutingKey | None) -> list[str]:
        began_s = time.process_time()
        chosen = super().choose_replicas(key)
        self.chosen_s += time.process_time() - began_s
        return chosen

    def add_load(self, name: str, load: float) -> None:
        began_s = time.process_time()
        super().add_load(name, load)
        self.chosen_s += time.process_time() - began_s


class _TimedScheduler:
    """A scheduler that adds up what it costs."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.used_s = 0.0
        self.schedule = self._timed(scheduler.schedule)
        self.update = self._timed(scheduler.update)
        self.add_request = self._timed(scheduler.add_request)

    def __getattr__(self, name: str) -> Any:  # Any: any attribute of the scheduler
        return getattr(self._scheduler, name)

    def _timed(self, method: Callable[[Any], Any]) -> Callable[[Any], Any]:  # Any: as above
        def timed(argument: Any) -> Any:  # Any: as above
            began_s = time.process_time()
            result = method(argument)
            self.used_s += time.process_time() - began_s
            return result

        return timed


def main() -> int:
    """Run each number of replicas, and print and draw what they cost."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet", description="Costs by the number of replicas."
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"| {' | '.join(_TITLES)} |\n|{' ---: |' * len(_TITLES)}")
    for num_replicas in _NUM_REPLICAS:
        row = _costs(num_replicas)
        rows.append(row)
        print(f"| {' | '.join(f'{value:,.4g}' for value in row.values())} |", flush=True)
    if options.output:
        report = {
            **command_and_date(),
            "python": platform.python_version(),
            "rows": rows,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    if options.plot:
        options.plot.write_text(draw_charts(_charts(rows), x_title="replicas"))
    return 0


def _costs(num_replicas: int) -> dict[str, float]:
    placement, schedulers = _TimedPlacement(), []

    def make_replica() -> VirtualReplica:
        replica = VirtualReplica(
            SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192),
            KvOptions(block_size=16, num_blocks=16_384, num_cpu_blocks=0),
            LLAMA_8B_H200,
            max_model_len=32_768,
        )
        scheduler = _TimedScheduler(replica.scheduler)
        replica.scheduler = scheduler  # type: ignore[assignment]  # it has the same methods
        schedulers.append(scheduler)
        return replica

    fleet = Fleet(make_replica, num_replicas=num_replicas, placement=placement)
    rate = num_replicas * _REQUESTS_PER_REPLICA
    workload = Workload(
        num_requests=int(rate * _SECONDS),
        request_rate=rate,
        input_len=200,
        output_len=50,
        range_ratio=0.5,
    )
    # A collection would walk the whole simulation, wherever it happened to begin.
    gc.disable()
    fleet.run(workload.arrivals())
    gc.enable()
    assert all(call.end_s is not None for call in fleet.calls)
    ttft_s = sorted(call.ttft_s for call in fleet.calls)
    router_us = (placement.chosen_s / len(fleet.calls) + _key_s()) * 1e6
    return {
        "replicas": num_replicas,
        "requests_per_s": rate,
        "router_us": router_us,
        "router_cores": router_us * rate / 1e6,
        "report_us": placement.reported_s / placement.num_reports * 1e6,
        "scheduler_cores": sum(one.used_s for one in schedulers) / num_replicas / _SECONDS,
        "p99_ttft_s": ttft_s[len(ttft_s) * 99 // 100],
    }


def _key_s() -> float:
    """Return what the key of a prompt of many tokens costs; in the simulation they are short."""
    draws = random.Random(1)
    prompts = [[draws.randrange(100_000) for _ in range(_NUM_KEY_TOKENS)] for _ in range(500)]
    began_s = time.process_time()
    for prompt in prompts:
        prefix_key(prompt)
    return (time.process_time() - began_s) / len(prompts)


def _charts(rows: Sequence[Mapping[str, float]]) -> list[Chart]:
    def points(name: str) -> list[tuple[float, float]]:
        return [(row["replicas"], row[name]) for row in rows]

    return [
        Chart(title="router, microseconds of a core for a request", points=points("router_us")),
        Chart(
            title="all routers together, cores, at 100 requests a second and replica",
            points=points("router_cores"),
        ),
        Chart(
            title="a report of all loads, microseconds of each router",
            points=points("report_us"),
        ),
        Chart(title="scheduler of each replica, part of a core", points=points("scheduler_cores")),
    ]


if __name__ == "__main__":
    sys.exit(main())
