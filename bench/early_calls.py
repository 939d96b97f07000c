"""How long single prompts take in the first seconds after an engine is ready.

    python -m bench.early_calls --num-ranks 2 --seconds 15 --output early_calls.json
    python -m bench.early_calls --model examples/tiny-llama --num-tokens 128

What an engine leaves to the background of its start (the CPU pool is pinned, a spare rank imports,
memory is given back) runs beside its first calls. Prompts are computed one after the other, each
for one token, and take turns if they have several lengths. A spell is a run of calls that took half
as long again as the median of their length, or longer; it is printed with what used the CPUs
meanwhile, and how long the kernel held this control group back because its quota was used up.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from bench.engine import MAX_TOKEN_ID, SHAPES, save_model, write_results
from pagedray import LLM, SamplingParams

_SLOW = 1.5
"""A call is slow if it takes this many times the median."""
_NUM_SHOWN = 4
"""Processes of a spell."""
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_CPU_STAT = (Path("/sys/fs/cgroup/cpu.stat"), Path("/sys/fs/cgroup/cpu/cpu.stat"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One prompt."""

    begun_s: float
    """Since the engine was ready."""
    num_tokens: int
    duration_ms: float
    throttled_ms: float
    cpu_s: dict[int, float]
    """CPU time since the call before, by the id of a process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The calls of one length in a start, or a spell of slow ones."""

    kind: str
    num_tokens: tuple[int, ...]
    begun_s: float
    ended_s: float
    num_calls: int
    median_ms: float
    longest_ms: float
    throttled_ms: float
    cpu_s: dict[str, float]
    """CPU time of the busiest processes, by their ids and names."""


def main() -> int:
    """Measure each start, print its spells, and write if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b", help="with random weights")
    parser.add_argument("--model", type=Path, help="a folder with weights, in place of a shape")
    parser.add_argument("--num-ranks", type=int, default=1)
    parser.add_argument(
        "--num-tokens", type=int, action="append", help="of a prompt; repeatable (1024)"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="of calls, each start (15)")
    parser.add_argument("--starts", type=int, default=2, help="of an engine, in turn (2)")
    parser.add_argument("--spare-ranks", type=int, help="(as the engine chooses)")
    parser.add_argument("--num-cpu-blocks", type=int, help="(as the engine chooses)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            save_model(Path(folder), SHAPES[options.shape])
        for number in range(options.starts):
            found = measure(options.model or Path(folder), options)
            print(f"start {number + 1}", *map(_line, found), sep="\n", flush=True)
            rows += found
    if options.output is not None:
        shape = options.shape if options.model is None else options.model.name
        write_results(options.output, shape, rows=rows)
    return 0


def measure(folder: Path, options: argparse.Namespace) -> list[Row]:
    """Return the rows of one start."""
    random_source = random.Random(0)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    calls: list[Call] = []
    with LLM(
        folder,
        load_format="dummy" if options.model is None else "auto",
        tensor_parallel_size=options.num_ranks,
        spare_ranks=options.spare_ranks,
        num_cpu_blocks=options.num_cpu_blocks,
        max_num_batched_tokens=8192,
        show_progress=False,
    ) as llm:
        ready_s = time.perf_counter()
        used_s, throttled_ms = cpu_times(), throttled()
        for num_tokens in itertools.cycle(options.num_tokens or [1024]):
            if time.perf_counter() - ready_s >= options.seconds:
                break
            prompt = [
                random_source.randrange(min(MAX_TOKEN_ID, llm.vocab_size))
                for _ in range(num_tokens)
            ]
            begun_s = time.perf_counter()
            llm.generate([prompt], sampling, use_tqdm=False)
            ended_s = time.perf_counter()
            before_s, used_s = used_s, cpu_times()
            before_ms, throttled_ms = throttled_ms, throttled()
            calls.append(
                Call(
                    begun_s=begun_s - ready_s,
                    num_tokens=num_tokens,
                    duration_ms=(ended_s - begun_s) * 1e3,
                    throttled_ms=throttled_ms - before_ms,
                    cpu_s={
                        process: total - before_s.get(process, 0.0)
                        for process, total in used_s.items()
                        if total > before_s.get(process, 0.0)
                    },
                )
            )
        return rows_of(calls)


def cpu_times() -> dict[int, float]:
    """Return the CPU seconds of every process, by its id."""
    times = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        times[int(folder.name)] = (int(fields[11]) + int(fields[12])) * _TICK_S
    return times


def name_of(process: int) -> str:
    """Return the id and the name of a process, or the id of one that has ended."""
    try:
        return f"{process} {Path(f'/proc/{process}/comm').read_text().strip()}"
    except OSError:
        return str(process)


def throttled() -> float:
    """Return for how many milliseconds the quota of CPU time has held processes back."""
    for path in _CPU_STAT:
        if path.exists():
            counts = dict(line.split() for line in path.read_text().splitlines())
            # Nanoseconds in the first version of control groups.
            old = int(counts.get("throttled_time", 0)) / 1e6
            return int(counts.get("throttled_usec", 0)) / 1e3 or old
    return 0.0


def rows_of(calls: list[Call]) -> list[Row]:
    """Return a row for the calls of each length, and one for each spell."""
    by_length: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        by_length[call.num_tokens].append(call)
    limits_ms = {
        num_tokens: _SLOW * statistics.median(call.duration_ms for call in same)
        for num_tokens, same in by_length.items()
    }
    spells: list[list[Call]] = []
    was_slow = False
    for call in calls:
        is_slow = call.duration_ms >= limits_ms[call.num_tokens]
        if is_slow and was_slow:
            spells[-1].append(call)
        elif is_slow:
            spells.append([call])
        was_slow = is_slow
    return [
        *(_row("all", same) for same in by_length.values()),
        *(_row("spell", spell) for spell in spells),
    ]


def _row(kind: str, calls: list[Call]) -> Row:
    used_s: Counter[int] = Counter()
    for call in calls:
        used_s.update(call.cpu_s)
    last = calls[-1]
    return Row(
        kind=kind,
        num_tokens=tuple(sorted({call.num_tokens for call in calls})),
        begun_s=round(calls[0].begun_s, 3),
        ended_s=round(last.begun_s + last.duration_ms / 1e3, 3),
        num_calls=len(calls),
        median_ms=round(statistics.median(call.duration_ms for call in calls), 2),
        longest_ms=round(max(call.duration_ms for call in calls), 2),
        throttled_ms=round(sum(call.throttled_ms for call in calls), 1),
        cpu_s={
            name_of(process): round(total, 2) for process, total in used_s.most_common(_NUM_SHOWN)
        },
    )


def _line(row: Row) -> str:
    used = ", ".join(f"{name} {total:.2f}" for name, total in row.cpu_s.items())
    lengths = ", ".join(map(str, row.num_tokens))
    return (
        f"{row.kind:5} {row.begun_s:7.3f} to {row.ended_s:7.3f} s  {row.num_calls:5} calls of "
        f"{lengths} tokens  median {row.median_ms:.2f} ms  longest {row.longest_ms:.2f} ms  "
        f"throttled {row.throttled_ms:.1f} ms  CPU s: {used}"
    )


if __name__ == "__main__":
    sys.exit(main())
