"""The whole engine at the shapes of large models: scheduler, controller, ranks, sampling.

    python -m bench.engine --backend torch_sdpa --backend flashinfer --output engine.json

Weights are random, which does not change the speed; requests are token ids, submitted at once, and
outputs have a fixed length. Each combination of backend and executor runs in a process of its own
and starts with free memory. `latency` is the time of one request over its tokens; `throughput` is
the generated tokens of all requests over the time of the call; `mixed` is the same for prompts and
outputs of many lengths, so that prompts join a running batch; `prefill` is prompt tokens over the
time of a call for one token each. `sampled` is `throughput` of the most requests with a temperature
of 0.7, and `prefix` that of requests with common prefixes, which `--prefix-cache` keeps.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bench.engine.measurement import measure_engine
from bench.engine.shapes import SHAPES
from bench.records.run_record import write_results

if TYPE_CHECKING:
    from bench.engine.measurement import Row


def main() -> int:
    """Measure every combination, print a table and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--backend", action="append", help="may be given several times (auto)")
    parser.add_argument("--executor", action="append", help="local or ray, or both (local)")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--num-ranks", type=int, default=1)
    parser.add_argument(
        "--expert-parallel", action="store_true", help="each rank has whole experts (no)"
    )
    parser.add_argument("--quantization", help="fp8 quantizes the weights (none)")
    parser.add_argument("--all-reduce", default="auto", help="auto or nccl (auto)")
    parser.add_argument(
        "--workload",
        action="append",
        choices=["latency", "throughput", "mixed", "prefill", "sampled", "prefix"],
        help="repeatable (the first four)",
    )
    parser.add_argument("--max-num-seqs", type=int, help="(as the engine chooses)")
    parser.add_argument("--max-num-batched-tokens", type=int, help="(as the engine chooses)")
    parser.add_argument(
        "--max-graph-tokens",
        type=int,
        default=2048,
        help="largest step with prompts that runs as CUDA graphs (2048)",
    )
    parser.add_argument(
        "--prefix-cache",
        action="store_true",
        help="keep the blocks of prompts, which are different ones in each round (no)",
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    for backend, executor in itertools.product(
        options.backend or ["auto"], options.executor or ["local"]
    ):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=measure_engine, args=(options, backend, executor, sender.send)
        )
        process.start()
        sender.close()
        # A run that is interrupted leaves the rows of the workloads before.
        with suppress(EOFError):
            while True:
                rows.append(receiver.recv())
                if options.output is not None:
                    write_results(options.output, options.shape, rows=rows)
        process.join()
        if process.exitcode:
            print(f"{backend} on {executor} failed.", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
