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
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import psutil

from bench.engine import MAX_TOKEN_ID, SHAPES, write_results
from bench.engine.random_checkpoint import write_checkpoint
from bench.machine import free_port
from pagedray.v1 import pagedray_pb2, pagedray_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
NUM_PROMPT_TOKENS = 64
NUM_TOKENS_BEFORE_KILL = 64
START_TIMEOUT_S = 400.0
STREAM_TIMEOUT_S = 120.0
SPARE_TIMEOUT_S = 60.0
DIED = "A rank died"
HEALED = re.compile(r"Replaced ranks? .*")


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
    """Of the stream with the longest."""
    median_pause_s: float
    noticed_s: float
    """From the kill to the server's log line that a rank died."""
    phases: str
    """The server's account."""


@dataclass(slots=True)
class Stream:
    """What arrived of one stream."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """When each message arrived."""
    is_complete: bool = False

    def pause_s(self, killed_s: float) -> float:
        """Return the time from the kill to the end of the gap that it caused."""
        ends = zip(self.times_s, self.times_s[1:], strict=False)
        gaps = [(end - begin, end) for begin, end in ends if end > killed_s]
        return max(gaps)[1] - killed_s if gaps else 0.0


class Server:
    """`pagedray serve` in a process of its own, whose log is kept."""

    def __init__(self, folder: Path, log: Path, arguments: list[str]) -> None:
        self.port = free_port()
        self.lines: list[tuple[float, str]] = []
        """With the time at which each was read."""
        self._is_ready = threading.Event()
        self._log = log.open("a")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "cluster.cli", "serve", str(folder)),
                *(f"--grpc-port={self.port}", "--http-port=0", "--log-level=info"),
                *arguments,
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready.wait(0.2):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("The server did not start; see its log.")

    def processes(self, method: str = "") -> list[psutil.Process]:
        """Return the processes of ranks and spares that run a method, oldest first."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if f"GpuWorker{method}" in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return sorted(found, key=lambda process: process.create_time())

    def healed_line(self, number: int) -> str:
        """Return the server's account of a replacement; waits for it."""
        deadline_s = time.monotonic() + STREAM_TIMEOUT_S
        while time.monotonic() < deadline_s:
            found = [match[0] for _, line in self.lines if (match := HEALED.search(line))]
            if len(found) > number:
                return found[number]
            time.sleep(0.1)
        return ""

    def noticed_s(self, killed_s: float) -> float:
        """Return the time from a kill to the line that reports it, or infinity."""
        after = (at_s for at_s, line in self.lines if at_s > killed_s and DIED in line)
        return next(after, float("inf")) - killed_s

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))
            self._log.write(line)
            self._log.flush()
            if line.startswith("Ready:"):
                self._is_ready.set()


def main() -> int:
    """Kill ranks, print a table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
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
        return asyncio.run(_streams(*arguments))

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


async def _streams(
    server: Server, number: int, num_tokens: int, kill_index: int | None
) -> tuple[list[Stream], float]:
    """Read streams to their ends; kill a rank once all of them have begun."""
    streams = [Stream() for _ in range(number)]
    chance = random.Random(0)
    prompts = [
        [chance.randrange(2, MAX_TOKEN_ID) for _ in range(NUM_PROMPT_TOKENS)] for _ in streams
    ]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        service = pagedray_pb2_grpc.GenerationServiceStub(channel)
        readers = [
            asyncio.create_task(_read(service, stream, prompt, num_tokens))
            for stream, prompt in zip(streams, prompts, strict=True)
        ]
        killed_s = 0.0
        if kill_index is not None:
            while min(len(stream.token_ids) for stream in streams) < NUM_TOKENS_BEFORE_KILL:
                await asyncio.sleep(0.005)
            victim = server.processes(".serve_controller")[kill_index]
            killed_s = time.monotonic()
            victim.kill()
        await asyncio.gather(*readers)
    return streams, killed_s


async def _read(service: Any, stream: Stream, prompt: list[int], num_tokens: int) -> None:
    request = pagedray_pb2.GenerateRequest(
        token_ids=pagedray_pb2.TokenIds(ids=prompt),
        sampling=pagedray_pb2.SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True
        ),
    )
    try:
        async for response in service.Generate(request, timeout=STREAM_TIMEOUT_S):
            for sequence in response.sequences:
                stream.token_ids += sequence.token_ids
            stream.times_s.append(time.monotonic())
    except grpc.aio.AioRpcError as error:
        print(f"A stream failed: {error.code().name}: {error.details()}", file=sys.stderr)
    stream.is_complete = len(stream.token_ids) == num_tokens


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
