"""Streamed tokens per second over each frontend, with engines that compute nothing.

    python -m bench.frontends --output bench/results/frontends.json

The frontends run in a process of their own on one core, and clients that only count tokens in
another. The engine is a thread of the frontends' process: its CPU time is included, and also
reported alone. Ray Serve runs its proxy, its replica and the clients on all cores.

A step produces one token per stream. Steps run either as soon as clients have read so much that at
most `lead` tokens per stream are unread, so that with a lead of 1 every message has one token, or
at a fixed rate, as on ranks. All tokens that a stream has not sent yet go in one message.

    python -m bench.frontends --beside FOLDER

compares with another checkout instead, without Ray Serve. Its server and that of this checkout take
turns on the core, so that both see what else the machine does; the table shows the median tokens
per CPU second of each, and the geometric mean of the rounds' ratios with its standard error, which
the last row has of all rounds. Both run in this Python environment, and `FOLDER` must have
a `bench.frontend_server` that is driven in the same way.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING

from bench.frontends.kinds import KINDS, NUM_STREAMS, SERVE_KINDS, open_clients
from bench.frontends.process import FrontendProcess
from bench.frontends.serve_cluster import ServeCluster
from bench.frontends.token_counter import TokenCounter
from bench.records.command import command_and_date
from bench.records.machine import cpu_and_cores

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.frontends.clients import Counts
    from bench.frontends.kinds import Kind

CLIENT_CORE = 1
LEADS = (1, 2, 8)
OFFERED_TOKENS_PER_S = 25_000
MOST_LEAD = 64
SERVE_STEPS_S = (0.008, 0.004)
WARM_UP_S = 0.7
SECONDS = 2.5
TURN_LEADS = (1, 8)
TURN_WARM_UP_S = 0.4
TURN_S = 1.2
NUM_ROUNDS = 5
SERVE_WARM_UP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    frontend: str
    connections: int
    lead: int | None
    """Unread tokens allowed per stream; None is no limit."""
    offered: float | None
    """Tokens/s that the steps produce; None is as many as clients read."""
    tokens_per_s: float
    """Tokens read per second of wall time."""
    tokens_per_cpu_s: float
    """Tokens read per CPU second of the server's process, its engine included."""
    tokens_per_message: float
    server_cores: float
    engine_cores: float | None
    """The engine's part of these; unknown for a replica of Ray Serve."""
    client_cores: float
    target: float | None
    """The required tokens/s."""


def main() -> int:
    """Measure every frontend, or compare it with another checkout, and print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.frontends",
        description="Streamed tokens per second over each frontend.",
    )
    parser.add_argument("--streams", type=int, default=NUM_STREAMS)
    parser.add_argument("--seconds", type=float, help="of each measurement")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="compare with a checkout")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="of a comparison")
    options = parser.parse_args()
    if options.beside is not None:
        if options.output is not None:
            parser.error("--beside only prints its table; omit --output.")
        _compare(
            options.beside.resolve(),
            num_streams=options.streams,
            num_rounds=options.rounds,
            seconds=options.seconds or TURN_S,
        )
        return 0
    rows = []
    print("| frontend | connections | lead | offered | tokens/s | per CPU s | per message |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for row in _rows(options.streams, options.seconds or SECONDS):
        offered = "" if row.offered is None else f"{row.offered:.0f}"
        print(
            f"| {row.frontend} | {row.connections} | {row.lead or ''} | {offered} "
            f"| {row.tokens_per_s:.0f} | {row.tokens_per_cpu_s:.0f} "
            f"| {row.tokens_per_message:.2f} |",
            flush=True,
        )
        rows.append(row)
    if options.output:
        _write(options.output, rows)
    return 0


def _compare(beside: Path, *, num_streams: int, num_rounds: int, seconds: float) -> None:
    """Print the tokens per CPU second of this checkout and of another one."""
    print("| frontend | connections | lead | beside | here | here / beside | in single rounds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    all_ratios: list[float] = []
    with _counter_file() as path:
        os.sched_setaffinity(0, {CLIENT_CORE})
        with FrontendProcess(path, beside) as theirs, FrontendProcess(path) as ours:
            for kind in KINDS:
                for lead in TURN_LEADS:
                    rates: dict[FrontendProcess, list[float]] = {theirs: [], ours: []}
                    for turn in range(2 * num_rounds):
                        # Each leads every other round.
                        server = ours if turn % 4 in (1, 2) else theirs
                        server.set_pace(step_s=0.0, lead=lead)
                        used_s, counts = _measured(
                            kind, server, path, num_streams, TURN_WARM_UP_S, seconds
                        )
                        rates[server].append(counts.num_tokens / used_s[0])
                    ratios = [a / b for a, b in zip(rates[ours], rates[theirs], strict=True)]
                    all_ratios += ratios
                    medians = median(rates[theirs]), median(rates[ours])
                    print(
                        f"| {kind.name} | {kind.connections(num_streams)} | {lead} "
                        f"| {medians[0]:.0f} | {medians[1]:.0f} {_columns(ratios)}",
                        flush=True,
                    )
    print(f"| all | | | | {_columns(all_ratios)}")


def _columns(ratios: list[float]) -> str:
    """Return the columns of ratios: their geometric mean with its error, and their range."""
    logs = [math.log(ratio) for ratio in ratios]
    error = stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    mean = math.exp(fmean(logs))
    return f"| {mean:.3f} +- {mean * error:.3f} | {min(ratios):.2f} to {max(ratios):.2f} |"


@contextmanager
def _counter_file() -> Iterator[Path]:
    """Yield the path of a file for a TokenCounter."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(TokenCounter.NUM_BYTES))
        file.flush()
        yield Path(file.name)


def _measured(
    kind: Kind,
    server: FrontendProcess,
    counter_path: Path,
    num_streams: int,
    warm_up_s: float,
    seconds: float,
) -> tuple[tuple[float, float], Counts]:
    """Return the CPU seconds of a server and of its engine, and what clients read meanwhile."""
    port = server.grpc_port if kind.is_grpc else server.http_port
    with open_clients(kind, port, num_streams, TokenCounter(counter_path)) as clients:
        clients.read(warm_up_s)
        cpu_s, engine_s = server.usage()
        counts = clients.read(seconds)
        after_s, engine_after_s = server.usage()
    return (after_s - cpu_s, engine_after_s - engine_s), counts


def _rows(num_streams: int, seconds: float) -> Iterator[Row]:
    with _counter_file() as path:
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {CLIENT_CORE})
        with FrontendProcess(path) as server:
            for kind in KINDS:
                paces = [(0.0, lead) for lead in LEADS]
                for step_s, lead in (*paces, (num_streams / OFFERED_TOKENS_PER_S, MOST_LEAD)):
                    server.set_pace(step_s=step_s, lead=lead)
                    (cpu_s, engine_s), counts = _measured(
                        kind, server, path, num_streams, WARM_UP_S, seconds
                    )
                    yield _row(
                        kind,
                        counts,
                        num_streams=num_streams,
                        lead=lead,
                        step_s=step_s,
                        cpu_s=cpu_s,
                        engine_s=engine_s,
                    )
        os.sched_setaffinity(0, cores)
        yield from _serve_rows(num_streams, seconds, TokenCounter(path))


def _serve_rows(num_streams: int, seconds: float, counter: TokenCounter) -> Iterator[Row]:
    with ServeCluster() as cluster:
        for step_s in SERVE_STEPS_S:
            for kind in SERVE_KINDS:
                # Another one: what was aborted may still run in the last.
                model = cluster.deploy(step_s)
                port = cluster.grpc_port if kind.is_grpc else cluster.http_port
                with open_clients(kind, port, num_streams, counter, model=model) as clients:
                    clients.read(SERVE_WARM_UP_S)
                    cpu_s = cluster.cpu_s()
                    counts = clients.read(seconds)
                    after_s = cluster.cpu_s()
                yield _row(
                    kind,
                    counts,
                    num_streams=num_streams,
                    lead=None,
                    step_s=step_s,
                    cpu_s=after_s - cpu_s,
                    engine_s=None,
                )


def _row(
    kind: Kind,
    counts: Counts,
    *,
    num_streams: int,
    lead: int | None,
    step_s: float,
    cpu_s: float,
    engine_s: float | None,
) -> Row:
    seconds = counts.seconds
    return Row(
        frontend=kind.name,
        connections=kind.connections(num_streams),
        lead=lead,
        offered=round(num_streams / step_s, 1) if step_s else None,
        tokens_per_s=counts.num_tokens / seconds,
        tokens_per_cpu_s=counts.num_tokens / cpu_s,
        tokens_per_message=counts.num_tokens / counts.num_messages,
        server_cores=cpu_s / seconds,
        engine_cores=None if engine_s is None else engine_s / seconds,
        client_cores=counts.cpu_s / seconds,
        target=kind.target,
    )


def _write(path: Path, rows: list[Row]) -> None:
    report = {
        **command_and_date(),
        "machine": cpu_and_cores(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("grpcio", "protobuf", "ray", "uvicorn")},
        },
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
