"""Several GPUs of one host in about ten minutes: engines, a killed rank, tests and all-reduces.

    python -m bench.several_gpus --num-ranks 2 --output bench/results/several_gpus_two_h200.json

Each stage is a command with a limit of its own, the most important first; a stage that fails or is
interrupted leaves its results so far, and does not stop the others. Stages of the same file that
are not run again stay in it. Weights are random, at the shapes of published models. `--dry-run`
prints the commands, and `--small` replaces the shapes by small ones, for CPUs. The table at the end
has the figures of vLLM for as many GPUs, where they were measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.records.command import command_and_date

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path(__file__).resolve().parents[1]
_STOP_S = 15.0
_LEAST_S = 20.0
"""A stage does not begin with less time."""
_DEFAULT_WORKLOADS = ("latency", "throughput")
_MORE_WORKLOADS = ("mixed", "prefill", "sampled", "prefix")
_SMALL = {
    "llama-8b": "small",
    "llama-70b": "small",
    "gpt-oss-120b": "small-gpt-oss",
    "qwen3.5-35b-a3b": "small-hybrid",
    "gemma-4-26b-a4b": "small",
    "qwen3-30b-a3b": "small-experts",
    "qwen3-235b-a22b": "small-experts",
}
_VLLM = {
    2: {
        ("llama_8b", "latency", 1): 3.53,
        ("llama_8b", "throughput", 256): 29389.0,
        ("llama_8b", "mixed", 1000): 19445.0,
        ("llama_8b", "prefill", 32): 70839.0,
        ("llama_70b", "latency", 1): 20.8,
        ("llama_70b", "throughput", 256): 5188.0,
    }
}
"""Figures of vLLM 0.20.2 on H200 by number of GPUs, stage, workload and requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A command, and how long it may take."""

    name: str
    limit_s: float
    arguments: tuple[str, ...]
    """Of Python, without `--output`."""
    min_ranks: int = 2
    """The weights do not fit into the memory of fewer H200."""
    needs_gpus: bool = False


def main() -> int:
    """Run the stages, write their results after each, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.several_gpus",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--stage", action="append", help="name of a stage, repeatable (all)")
    parser.add_argument("--limit-s", type=float, default=600.0, help="of all stages (600)")
    parser.add_argument("--small", action="store_true", help="small models, also on CPUs")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    parser.add_argument("--output", type=Path, help="JSON; the log is beside it")
    options = parser.parse_args()
    stages = [
        stage
        for stage in _stages(options.num_ranks, is_small=options.small)
        if stage.name in (options.stage or [stage.name])
    ]
    if options.dry_run:
        for stage in stages:
            print(f"{stage.name}, {stage.limit_s:.0f} s:\n    python {shlex.join(stage.arguments)}")
        return 0
    # Stages have sessions of their own, so no signal to this program reaches them.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results: dict[str, Any] = {}
    if options.output is not None and options.output.exists():
        results = json.loads(options.output.read_text())["stages"]
    is_failed = False
    end_s = time.monotonic() + options.limit_s
    for stage in stages:
        limit_s = min(stage.limit_s, end_s - time.monotonic() - _STOP_S)
        if limit_s < _LEAST_S:
            print(f"{stage.name} was not run, for lack of time.", flush=True)
            continue
        results[stage.name] = found = _run(stage, limit_s, options.output)
        is_failed = is_failed or found["exit_status"] != 0
        if options.output is not None:
            record = command_and_date() | {"num_ranks": options.num_ranks, "stages": results}
            options.output.write_text(json.dumps(record, indent=1) + "\n")
    _print_table(options.num_ranks, {stage.name: results.get(stage.name, {}) for stage in stages})
    return int(is_failed)


def _stages(num_ranks: int, *, is_small: bool) -> list[Stage]:
    """Return what can run on this number of GPUs, the most important first."""
    ranks = f"--num-ranks={num_ranks}"

    def engine(
        name: str,
        shape: str,
        limit_s: float,
        *more: str,
        workloads: tuple[str, ...] = _DEFAULT_WORKLOADS,
        min_ranks: int = 2,
    ) -> Stage:
        shape = _SMALL[shape] if is_small else shape
        arguments = ("-m", "bench.engine", "--executor=ray", ranks, f"--shape={shape}")
        flags = tuple(f"--workload={one}" for one in workloads)
        return Stage(
            name=name,
            limit_s=limit_s,
            arguments=(*arguments, *flags, *(more or ("--rounds=1",))),
            min_ranks=min_ranks,
        )

    death = ("--shape=small", "--num-tokens=300") if is_small else ()
    tests = ("-m", "pytest", "-m", "multigpu", "-q", "-rf", "-p", "no:cacheprovider")
    all_workloads = (*_DEFAULT_WORKLOADS, *_MORE_WORKLOADS)
    stages = [
        engine(
            *("llama_8b", "llama-8b", 150.0, "--prefix-cache", "--rounds=2"),
            workloads=all_workloads,
        ),
        engine("gpt_oss_120b", "gpt-oss-120b", 90.0),
        engine("qwen3_5_35b_a3b", "qwen3.5-35b-a3b", 90.0),
        engine("gemma_4_26b_a4b", "gemma-4-26b-a4b", 90.0),
        Stage(
            name="rank_death",
            limit_s=120.0,
            arguments=("-m", "bench.rank_death", ranks, "--kills=1", "--spare-ranks=1", *death),
        ),
        Stage(name="tests", limit_s=210.0, arguments=(*tests, *_test_files()), needs_gpus=True),
        engine("llama_70b", "llama-70b", 110.0),
        Stage(
            name="all_reduce",
            limit_s=60.0,
            arguments=("-m", "bench.all_reduce", ranks),
            needs_gpus=True,
        ),
        engine("qwen3_30b_experts", "qwen3-30b-a3b", 70.0, "--expert-parallel", "--rounds=1"),
        engine("qwen3_235b_a22b", "qwen3-235b-a22b", 120.0, min_ranks=4),
        engine(
            *("llama_70b_more", "llama-70b", 200.0, "--prefix-cache", "--rounds=1"),
            workloads=_MORE_WORKLOADS,
        ),
    ]
    fitting = [stage for stage in stages if num_ranks >= stage.min_ranks or is_small]
    return [stage for stage in fitting if not (is_small and stage.needs_gpus)]


def _test_files() -> Iterator[str]:
    """Yield the paths of tests that need several GPUs."""
    for path in sorted((_ROOT / "tests").rglob("test_*.py")):
        if "mark.multigpu" in path.read_text():
            yield str(path.relative_to(_ROOT))


def _run(stage: Stage, limit_s: float, output: Path | None) -> dict[str, Any]:  # Any: JSON values
    """Return the results of a stage, the last line of a test run included."""
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "results.json", Path(folder) / "log.txt"
        has_results = "pytest" not in stage.arguments
        command = [sys.executable, *stage.arguments]
        if has_results:
            command.append(f"--output={path}")
        with log.open("w") as stream:
            # NCCL and gloo need no host name of the machine.
            environment = {"NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", **os.environ}
            process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env=environment,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            status = _exit_status(process, limit_s)
        found = json.loads(path.read_text()) if path.exists() else {}
        text = log.read_text(errors="replace")
    seconds = round(time.monotonic() - begin_s, 1)
    lines = text.splitlines()
    print(f"{stage.name}: exit status {status}, {seconds} s", flush=True)
    if status or not has_results:
        print("\n".join(lines[-8:]), flush=True)
    if output is not None:
        with output.with_suffix(".log").open("a") as stream:
            stream.write(f"== {stage.name}: {shlex.join(command)}\n{text}\n")
    found |= {"exit_status": status, "seconds": seconds}
    return found if has_results else found | {"summary": lines[-1] if lines else ""}


def _exit_status(process: subprocess.Popen[bytes], limit_s: float) -> int:
    """Wait for a process; after the limit, interrupt it, so that it ends its ranks."""
    with suppress(subprocess.TimeoutExpired), _interrupting(process):
        return process.wait(limit_s)
    return 124


@contextmanager
def _interrupting(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Interrupt a process, and kill it if that does not end it, when the block raises an error."""
    try:
        yield
    except BaseException:
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def _print_table(num_ranks: int, results: dict[str, dict[str, Any]]) -> None:  # Any: JSON values
    """Print all figures of engines, with vLLM's and the ratio to them, and of killed ranks."""
    known = _VLLM.get(num_ranks, {}) if torch.cuda.is_available() else {}
    for name, found in results.items():
        rows = found.get("rows", ())
        if name == "all_reduce":
            print(*rows, sep="\n")
            continue
        for row in rows:
            load, figure = row["workload"], row["figure"]
            line = f"{name:18} {load['name']:10} {load['num_requests']:5} {figure:11.2f}"
            line = f"{line} {row['unit']:8}"
            peer = known.get((name, load["name"], load["num_requests"]))
            if peer is not None:
                ratio = peer / figure if load["name"] == "latency" else figure / peer
                line = f"{line} vLLM {peer:9.2f} ratio {ratio:.2f}"
            print(f"{line} start {row['start_s']} s, {row['num_cache_tokens']} cached tokens")
        for kill in found.get("kills", ()):
            print(
                f"{name:18} pause {kill['pause_s']} s, {kill['num_complete']} of "
                f"{kill['num_streams']} streams complete, {kill['num_equal']} equal"
            )


if __name__ == "__main__":
    sys.exit(main())
