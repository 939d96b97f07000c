r"""Tokens per second of a GGUF file on a CPU, beside llama.cpp, in one run.

    LLAMA_CPP_LIB_PATH=/tmp/llama/lib python -m bench.gguf --model SmolLM2.gguf \
        --llama-python /tmp/llama/bin/python --output bench/results/gguf.json

`--llama-python` is the interpreter of an environment with llama-cpp-python and gguf; the variable
names the folder of libllama.so, if that is not of the package. Each engine has a process of its
own, and they take turns; a waiting process sleeps. Eight clients are eight sequences in one batch
of llama.cpp. A rate is n - 1 tokens of all sequences over the time of a call for n tokens minus
that of a call for one, which is the prefill. The ratio is the median over rounds of the ratio
within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from bench.cpu.engines import EngineProcess, PagedRay
from bench.cpu_int4.__main__ import LlamaCpp, Timed
from bench.records.command import command_and_date
from bench.records.machine import cpu_name

PROMPT_TOKENS = 32
NEW_TOKENS = 65
CLIENTS = (1, 8)


def main() -> int:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gguf", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--model", type=Path, action="append", required=True)
    parser.add_argument("--llama-python", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows, about = [], {}
    print(
        "| file | clients | tok/s | llama.cpp, tok/s | ratio |\n| --- | ---: | ---: | ---: | ---: |"
    )
    for path in options.model:
        theirs = LlamaCpp(options.llama_python, None, path, options.threads)
        ours = EngineProcess(PagedRay, path, "bfloat16", options.threads)
        about[path.name] = theirs.about
        try:
            for row in _measure(ours, theirs, options.rounds):
                rows.append({"file": path.name, **row})
                print("| {file} | {clients} | {ours} | {llama_cpp} | {ratio} |".format(**rows[-1]))
        finally:
            ours.close()
            theirs.close()
    if options.output:
        results = {
            **command_and_date(),
            "cpu": cpu_name(),
            "threads": options.threads,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "llama_cpp": about,
            "rows": rows,
        }
        options.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _measure(ours: Timed, theirs: Timed, rounds: int) -> list[dict[str, Any]]:  # Any: JSON values
    rates: dict[tuple[int, Timed], list[float]] = {}
    for index in range(rounds + 1):
        for clients in CLIENTS:
            prompts = [list(range(100 + i, 100 + i + PROMPT_TOKENS)) for i in range(clients)]
            for engine in (ours, theirs):
                first_s = engine.seconds("generate", prompts, 1)
                all_s = engine.seconds("generate", prompts, NEW_TOKENS)
                rate = clients * (NEW_TOKENS - 1) / (all_s - first_s)
                # The first round warms up.
                if index:
                    rates.setdefault((clients, engine), []).append(rate)
    return [
        {
            "clients": clients,
            "ours": round(statistics.median(rates[clients, ours]), 1),
            "llama_cpp": round(statistics.median(rates[clients, theirs]), 1),
            "ratio": round(
                statistics.median(
                    one / two
                    for one, two in zip(rates[clients, ours], rates[clients, theirs], strict=True)
                ),
                3,
            ),
        }
        for clients in CLIENTS
    ]


if __name__ == "__main__":
    sys.exit(main())
