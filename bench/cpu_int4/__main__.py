r"""Tokens per second of int4 weights on a CPU, beside bfloat16 and llama.cpp's Q4_0, in one run.

    python -m bench.cpu_int4 --folder /tmp/llama-1b --llama-python /tmp/llama/bin/python \
        --output bench/results/cpu_int4.json

A random checkpoint of the shape of Llama-3.2-1B is written to the folder in bfloat16, and in int4
as compressed-tensors stores it, unless it is there: with the output head in bfloat16, which takes
as much as all other weights in int4, and with the head in int8. In llama.cpp's Q4_0 the head is in
Q6_K, of 6.6 bits. Each engine has a process of its own, and all
take turns with one request; a waiting process sleeps. `--llama-python` is the interpreter of an
environment with llama-cpp-python, compiled on this machine, for llama_cpp_server.py.

A rate is n - 1 tokens over the time of a call for n tokens minus that of a call for one, which is
the prefill. The ratio is the median over rounds of the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.cpu.engines import EngineProcess, PagedRay
from bench.cpu_int4.checkpoints import BFLOAT16, write_checkpoints
from bench.records.command import command_and_date
from bench.records.machine import cpu_name

PROMPT_TOKENS = 32
NEW_TOKENS = 48
LLAMA_CPP = "llama.cpp Q4_0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine."""

    engine: str
    tokens_per_s: float
    """The median over rounds."""
    over_bfloat16: float
    over_llama_cpp: float | None


class Timed(Protocol):
    """An engine in a process of its own."""

    def seconds(self, method: str, *arguments: object) -> float:
        """Return how long a call takes."""

    def close(self) -> None:
        """End the process."""


class LlamaCpp:
    """llama.cpp, which reads calls from a pipe."""

    def __init__(self, python: Path, checkpoint: Path | None, gguf: Path, threads: int) -> None:
        server = Path(__file__).with_name("llama_cpp_server.py")
        arguments = [f"--gguf={gguf}", f"--threads={threads}"]
        if checkpoint is not None:
            arguments.append(f"--checkpoint={checkpoint}")
        self._process = subprocess.Popen(
            [python, server, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.about: dict[str, Any] = json.loads(self._answer())  # Any: JSON values

    def seconds(self, method: str, *arguments: object) -> float:
        """Return how long a call takes."""
        assert method == "generate"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("llama_cpp_server.py ended; run it alone to see its errors")
        return line


def main() -> int:
    """Measure, print a table and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu_int4", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--folder", type=Path, required=True, help="for the checkpoints, is kept")
    parser.add_argument("--group-size", type=int, action="append", help="of int4 (32 128)")
    parser.add_argument("--llama-python", type=Path, help="leave out llama.cpp without it")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folders = write_checkpoints(options.folder, options.group_size or [32, 128])
    engines: dict[str, Timed] = {
        name: EngineProcess(PagedRay, folder, "bfloat16", options.threads)
        for name, folder in folders.items()
    }
    about = None
    if options.llama_python is not None:
        gguf = options.folder / "q4_0.gguf"
        llama_cpp = LlamaCpp(options.llama_python, folders[BFLOAT16], gguf, options.threads)
        engines[LLAMA_CPP] = llama_cpp
        about = llama_cpp.about
    try:
        rows = _measure(engines, options.rounds)
    finally:
        for engine in engines.values():
            engine.close()
    print("| engine | tok/s | over bfloat16 | over llama.cpp |\n| --- | ---: | ---: | ---: |")
    for row in rows:
        over_llama_cpp = "" if row.over_llama_cpp is None else f"{row.over_llama_cpp:.2f}"
        print(
            f"| {row.engine} | {row.tokens_per_s:.1f} | {row.over_bfloat16:.2f} | "
            f"{over_llama_cpp} |"
        )
    if options.output:
        _write(options.output, rows, options, about)
    return 0


def _measure(engines: dict[str, Timed], rounds: int) -> list[Row]:
    prompts = [list(range(2, 2 + PROMPT_TOKENS))]
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for index in range(rounds + 1):
        for name, engine in engines.items():
            first_s = engine.seconds("generate", prompts, 1)
            all_s = engine.seconds("generate", prompts, NEW_TOKENS)
            # The first round warms up.
            if index:
                rates[name].append((NEW_TOKENS - 1) / (all_s - first_s))
                print(f"{name:20} {rates[name][-1]:6.1f}", file=sys.stderr, flush=True)

    def over(name: str, other: str) -> float:
        return statistics.median(
            one / two for one, two in zip(rates[name], rates[other], strict=True)
        )

    return [
        Row(
            engine=name,
            tokens_per_s=round(statistics.median(found), 2),
            over_bfloat16=round(over(name, BFLOAT16), 3),
            over_llama_cpp=round(over(name, LLAMA_CPP), 3) if LLAMA_CPP in rates else None,
        )
        for name, found in rates.items()
    ]


def _write(
    path: Path,
    rows: list[Row],
    options: argparse.Namespace,
    about: dict[str, Any] | None,  # Any: JSON values
) -> None:
    results = {
        **command_and_date(),
        "cpu": cpu_name(),
        "threads": options.threads,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "llama_cpp": about,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
