"""What the products of `bench.products` leave possible: bounds of the workloads of `bench.engine`.

    python -m bench.product_bounds bench/results/products.json

A bound counts the products of the layers for random numbers, as they were measured, and the time in
which memory can be read for keys and values of decodes. Nothing else takes time: no head, no
attention of prompts, no kernel between products, no all-reduce, no host. All prompts are computed
first, in the last layer only their queries, keys and values. Then all sequences decode together.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from bench.account.kernel_rows import READ_BYTES_PER_S
from bench.engine import SHAPES, WORKLOADS, Workload

_SHAPE = "llama-8b"


def main() -> int:
    """Print the bound of each workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("products", type=Path, help="the output of bench.products")
    parser.add_argument("--read-rate", type=float, default=READ_BYTES_PER_S, help="in bytes/s")
    options = parser.parse_args()
    layer_us: dict[int, float] = defaultdict(float)
    qkv_us: dict[int, float] = {}
    weight_bytes: dict[str, int] = {}
    for row in json.loads(options.products.read_text())["rows"]:
        weight_bytes[row["product"]] = 2 * row["out_size"] * row["in_size"]
        if row["data"] == "random":
            layer_us[row["num_rows"]] += row["microseconds"]
            if row["product"] == "qkv":
                qkv_us[row["num_rows"]] = row["microseconds"]
    # Even few rows need all weights.
    layer_us[0] = 1e6 * sum(weight_bytes.values()) / options.read_rate
    for workload in WORKLOADS[_SHAPE]:
        figure = workload.figure(bound_s(workload, layer_us, qkv_us, options.read_rate))
        unit = "ms/token" if workload.name == "latency" else "tokens/s"
        print(f"{workload.name:10} {workload.num_requests:5} requests {figure:12,.2f} {unit}")
    return 0


def bound_s(
    workload: Workload, layer_us: dict[int, float], qkv_us: dict[int, float], read_rate: float
) -> float:
    """Return the least seconds of a workload.

    `layer_us` are microseconds of the products of a layer by number of rows, and `qkv_us` those of
    the product for queries, keys and values among them.
    """
    config = SHAPES[_SHAPE]
    num_layers = config["num_hidden_layers"]
    head_size = config["hidden_size"] // config["num_attention_heads"]
    # Keys and values in bfloat16.
    token_bytes = 4 * num_layers * config["num_key_value_heads"] * head_size
    sizes = sorted(layer_us)
    lengths = np.array(workload.lengths())
    prompts, new = lengths[:, 0], lengths[:, 1]
    most = sizes[-1]
    seconds = prompts.sum() / most * ((num_layers - 1) * layer_us[most] + qkv_us[most]) * 1e-6
    # The first new token of a sequence comes from its prompt.
    for step in range(1, new.max()):
        is_running = new > step
        products_us = np.interp(is_running.sum(), sizes, [layer_us[size] for size in sizes])
        num_read = (prompts[is_running] + step).sum()
        seconds += num_layers * products_us * 1e-6 + num_read * token_bytes / read_rate
    return float(seconds)


if __name__ == "__main__":
    sys.exit(main())
