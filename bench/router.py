"""What the router of Ray Serve costs for a request, by the number of replicas.

    python -m bench.router --output bench/results/router.json

CPU time of one process: the key of a prompt of 256 tokens, and the order of the replicas.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from cluster.serving.ray_serve.routing.affinity import prefix_key, routing_order

NUM_ROUNDS = 15


def main() -> int:
    """Measure each number of replicas and print a table."""
    parser = argparse.ArgumentParser(description="CPU time of the router for a request.")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    print("| replicas | us | requests per second and core |")
    print("| ---: | ---: | ---: |")
    for num_replicas in (1, 10, 100, 1000):
        seconds = min(_seconds(num_replicas) for _ in range(NUM_ROUNDS))
        print(f"| {num_replicas} | {seconds * 1e6:.1f} | {1.0 / seconds:,.0f} |")
        rows.append({"replicas": num_replicas, "us": round(seconds * 1e6, 1)})
    if options.output:
        report = {
            "command": " ".join(["python -m bench.router", *sys.argv[1:]]),
            "date": datetime.now(UTC).date().isoformat(),
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
    began_s = time.process_time()
    for prompt in prompts:
        routing_order(prefix_key(prompt), loads, slack=1.25, calm=0.25)
    return (time.process_time() - began_s) / len(prompts)


if __name__ == "__main__":
    sys.exit(main())
