"""What the router of Ray Serve costs for a request, by the number of replicas.

    python -m bench.router --output bench/results/router.json

CPU time of one process: the key of a prompt of 256 tokens and the choice of replicas; and what it
takes Serve's controller to encode, and a router to decode, the records of all replicas, which every
router gets whenever loads have changed.
"""

from __future__ import annotations

import argparse
import json
import pickle
import platform
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ray.serve._private.common import DeploymentID, ReplicaID, RunningReplicaInfo

from bench.records.command import command_and_date
from cluster.serving.ray_serve.placement import Placement, RoutingKey, prefix_key

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_ROUNDS = 15


def main() -> int:
    """Measure each number of replicas and print a table."""
    parser = argparse.ArgumentParser(description="CPU time of the router for a request.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    print(
        "| replicas | us | requests per second and core | records, KB | encoded, ms | decoded, ms |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for num_replicas in (1, 10, 100, 1000):
        seconds = min(_seconds(num_replicas) for _ in range(NUM_ROUNDS))
        num_bytes, encoded_s, decoded_s = _records(num_replicas)
        print(
            f"| {num_replicas} | {seconds * 1e6:.1f} | {1.0 / seconds:,.0f} | "
            f"{num_bytes / 1e3:.1f} | {encoded_s * 1e3:.2f} | {decoded_s * 1e3:.2f} |"
        )
        rows.append(
            {
                "replicas": num_replicas,
                "us": round(seconds * 1e6, 1),
                "record_bytes": num_bytes,
                "encoded_ms": round(encoded_s * 1e3, 3),
                "decoded_ms": round(decoded_s * 1e3, 3),
            }
        )
    if options.output:
        report = {
            **command_and_date(),
            "python": platform.python_version(),
            "rows": rows,
        }
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _seconds(num_replicas: int) -> float:
    """Return the mean CPU time of a request."""
    draws = random.Random(1)
    loads = {f"replica {number}": draws.random() for number in range(num_replicas)}
    prompts = [tuple(draws.randrange(100_000) for _ in range(256)) for _ in range(20)]
    placement = Placement(draws=draws)
    placement.set_replicas(loads)
    began_s = time.process_time()
    for prompt in prompts:
        key = prefix_key(prompt)
        assert key is not None
        placement.choose_replicas(RoutingKey(key, "owner"))
    return (time.process_time() - began_s) / len(prompts)


def _records(num_replicas: int) -> tuple[int, float, float]:
    """Return the bytes of all replicas' records, and the times to encode and to decode them."""
    draws = random.Random(1)
    records = [
        RunningReplicaInfo(
            ReplicaID(f"{draws.randrange(36**8):08x}", DeploymentID("PagedRay", "pagedray")),
            node_id=f"{number // 8:056x}",
            node_ip=f"10.0.{number // 2000}.{number // 8 % 250}",
            availability_zone=None,
            actor_name=f"SERVE_REPLICA::pagedray#PagedRay#{number:08x}",
            max_ongoing_requests=10**6,
            routing_stats={"load": draws.random(), "reported_s": draws.random()},
        )
        for number in range(num_replicas)
    ]
    encoded = pickle.dumps(records)
    encoded_s = min(_timed(lambda: pickle.dumps(records)) for _ in range(NUM_ROUNDS))
    decoded_s = min(_timed(lambda: pickle.loads(encoded)) for _ in range(NUM_ROUNDS))
    return len(encoded), encoded_s, decoded_s


def _timed(run: Callable[[], object]) -> float:
    began_s = time.process_time()
    run()
    return time.process_time() - began_s


if __name__ == "__main__":
    sys.exit(main())
