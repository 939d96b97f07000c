"""How long streams pause when a rank is killed, and where the seconds go.

    python -m bench.rank_death --num-ranks 2 --output bench/results/rank_death.json

Starts `pagedray serve` with ranks as Ray actors on a checkpoint of random values, which is written
to `--folder` as safetensors files, so that weights are loaded as those of a real model are; it
stays in the page cache. Clients read streams over gRPC. While they all run, one rank is killed with
SIGKILL. The pause of a stream is the time between the kill and the next token that arrives after
the longest gap of that stream; the phases are those that the server logs. Each kill is of
another rank and has streams of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.engine import SHAPES, write_results
from bench.engine.random_checkpoint import write_checkpoint
from bench.rank_death.server import Server
from bench.rank_death.streams import read_streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.rank_death.streams import Stream

SPARE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One killed rank."""

    spare_ranks: int
    num_streams: int
    num_complete: int
    """Streams that ended with all their tokens."""
    num_equal: int
    """Streams with the same tokens as without a kill; rounding of recomputed keys may differ."""
    pause_s: float
    """The longest pause of any stream."""
    median_pause_s: float
    noticed_s: float
    """From the kill to the server's log line that a rank died."""
    phases: str
    """The server's account."""


def main() -> int:
    """Kill ranks, print a table and write the results."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rank_death", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--num-streams", type=int, default=64)
    parser.add_argument("--num-tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--kills", type=int, default=3, help="with each number of spares")
    parser.add_argument("--spare-ranks", type=int, action="append", help="several times (1 and 0)")
    parser.add_argument("--folder", type=Path, help="for the checkpoint, which is kept there")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="of the servers")
    parser.add_argument("--server-flag", action="append", default=[], help="passed to serve")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    kills: list[Kill] = []
    with _folder(options.folder) as folder:
        write_checkpoint(folder, SHAPES[options.shape])
        for spare_ranks in options.spare_ranks or [1, 0]:
            arguments = [
                f"--tensor-parallel-size={options.num_ranks}",
                f"--spare-ranks={spare_ranks}",
                *options.server_flag,
            ]
            server = Server(folder, options.log, arguments)
            try:
                server.wait_until_ready()
                for kill in _kills(server, spare_ranks, options):
                    kills.append(kill)
                    _print(kill)
                    if options.output is not None:
                        write_results(options.output, options.shape, kills=kills)
            finally:
                server.close()
    return 0


def _kills(server: Server, spare_ranks: int, options: argparse.Namespace) -> Iterator[Kill]:
    def streams(kill_index: int | None) -> tuple[list[Stream], float]:
        arguments = server, options.num_streams, options.num_tokens, kill_index
        return asyncio.run(read_streams(*arguments))

    # The first streams compile kernels.
    streams(None)
    undisturbed, _ = streams(None)
    for number in range(options.kills):
        _wait_for_spares(server, options.num_ranks, spare_ranks)
        disturbed, killed_s = streams(number % options.num_ranks)
        pauses = [stream.pause_s(killed_s) for stream in disturbed]
        yield Kill(
            spare_ranks=spare_ranks,
            num_streams=len(disturbed),
            num_complete=sum(stream.is_complete for stream in disturbed),
            num_equal=sum(
                one.token_ids == other.token_ids
                for one, other in zip(disturbed, undisturbed, strict=True)
            ),
            pause_s=round(max(pauses), 2),
            median_pause_s=round(statistics.median(pauses), 2),
            noticed_s=round(server.noticed_s(killed_s), 2),
            phases=server.healed_line(number),
        )


def _wait_for_spares(server: Server, num_ranks: int, spare_ranks: int) -> None:
    """Wait until the spares have done their imports, that is until they are idle."""
    deadline_s = time.monotonic() + SPARE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        idle = len(server.processes()) - len(server.processes(".import_libraries"))
        if idle >= num_ranks + spare_ranks:
            return
        time.sleep(0.5)
    print("The spares were not ready in time.", file=sys.stderr)


def _print(kill: Kill) -> None:
    print(
        f"spares {kill.spare_ranks}: pause {kill.pause_s:.2f} s "
        f"(median {kill.median_pause_s:.2f}, noticed after {kill.noticed_s:.2f}), "
        f"{kill.num_complete} of {kill.num_streams} streams complete, {kill.num_equal} equal. "
        f"{kill.phases}",
        flush=True,
    )


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


if __name__ == "__main__":
    sys.exit(main())
