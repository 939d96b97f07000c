"""A rank that hangs is found within seconds and replaced, while its streams stay open."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest

from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.fakes import wait_for
from tests.system.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psutil

NOTICED_S = 20.0
"""It takes 7 s; on a busy machine the watchdog counts only the time that it ran."""
HALF_LIMIT_S = 3.0
PROMPTS = ("def read(path):", "import os", "class A:", "for i in range(10):\n")
HANGS = 'pagedray_hangs_total{kind="rank"}'
REPLACEMENTS = 'pagedray_rank_replacements_total{cause="hang"}'
DEATHS = 'pagedray_rank_replacements_total{cause="death"}'


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(
        ("--tensor-parallel-size=2", "--num-threads=1", "--dtype=float32")
    ) as server:
        yield server


class Streams:
    """Streams of all prompts, with the tokens of each."""

    def __init__(self, server: ServerProcess, num_tokens: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")
        self._service = pagedray_pb2_grpc.GenerationServiceStub(self._channel)
        self._num_tokens = num_tokens
        self._readers = ThreadPoolExecutor(len(PROMPTS))
        self.is_flowing = threading.Event()
        self._results = [self._readers.submit(self._read, prompt) for prompt in PROMPTS]

    def tokens(self) -> list[list[int]]:
        """Return the tokens of each stream once all have ended."""
        try:
            return [result.result(120.0) for result in self._results]
        finally:
            self._channel.close()
            self._readers.shutdown()

    def _read(self, prompt: str) -> list[int]:
        sampling = pb.SamplingParams(max_tokens=self._num_tokens, ignore_eos=True, temperature=0.0)
        tokens: list[int] = []
        for answer in self._service.Generate(pb.GenerateRequest(text=prompt, sampling=sampling)):
            for sequence in answer.sequences:
                tokens += sequence.token_ids
            self.is_flowing.set()
        return tokens


def ranks(server: ServerProcess) -> list[psutil.Process]:
    return [process for process in server.family() if "GpuWorker" in " ".join(process.cmdline())]


def is_ready(server: ServerProcess) -> bool:
    return httpx.get(f"{server.url}/ready").status_code == 200


def test_streams_go_on_after_a_rank_was_stopped(server: ServerProcess) -> None:
    undisturbed = Streams(server, 300).tokens()
    before = server.metrics()
    streams = Streams(server, 300)
    assert streams.is_flowing.wait(30.0)
    victim = ranks(server)[-1]
    victim.suspend()
    stopped_s = time.monotonic()
    wait_for(lambda: not is_ready(server), NOTICED_S)
    print(f"not ready after {time.monotonic() - stopped_s:.1f} s")
    assert server.metrics()["pagedray_healthy"] == 0.0
    wait_for(lambda: is_ready(server), 60.0)
    print(f"ready again after {time.monotonic() - stopped_s:.1f} s")
    assert streams.tokens() == undisturbed
    assert not victim.is_running()
    after = server.metrics()
    assert after[HANGS] == before[HANGS] + 1
    assert after[REPLACEMENTS] == before[REPLACEMENTS] + 1
    assert after[DEATHS] == before[DEATHS]


@pytest.mark.slow
def test_idle_rank_that_is_stopped_is_replaced(server: ServerProcess) -> None:
    before = server.metrics()
    ranks(server)[0].suspend()
    wait_for(lambda: not is_ready(server), NOTICED_S)
    wait_for(lambda: is_ready(server), 60.0)
    assert server.metrics()[REPLACEMENTS] == before[REPLACEMENTS] + 1


@pytest.mark.slow
def test_rank_that_continues_in_time_is_not_replaced(server: ServerProcess) -> None:
    undisturbed = Streams(server, 1000).tokens()
    before = server.metrics()
    for turn in range(3):
        streams = Streams(server, 1000)
        assert streams.is_flowing.wait(30.0)
        victim = ranks(server)[turn % 2]
        victim.suspend()
        time.sleep(HALF_LIMIT_S)
        victim.resume()
        assert streams.tokens() == undisturbed
        assert is_ready(server)
    assert server.metrics()[HANGS] == before[HANGS]


@pytest.mark.slow
def test_pauses_of_all_processes_are_nobodys_fault(server: ServerProcess) -> None:
    """As if the machine had been paused, for longer than any limit, under load."""
    undisturbed = Streams(server, 1000).tokens()
    before = server.metrics()
    for pause_s in (2.0, 15.0, 30.0):
        streams = Streams(server, 1000)
        assert streams.is_flowing.wait(30.0)
        # Ray's processes are in the same family.
        family = server.family()
        for process in family:
            process.send_signal(signal.SIGSTOP)
        time.sleep(pause_s)
        for process in family:
            process.send_signal(signal.SIGCONT)
        assert streams.tokens() == undisturbed
    after = server.metrics()
    assert after[HANGS] == before[HANGS]
    assert after[REPLACEMENTS] == before[REPLACEMENTS]
    assert after[DEATHS] == before[DEATHS]
