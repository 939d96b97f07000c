"""A rank that hangs is found within seconds and replaced, while its streams stay open.

`tests/system/test_serve.py` stops a rank of a server that streams.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.fakes import wait_for
from tests.system.grpc_streams import GrpcStreams, check_streams_finish
from tests.system.server_process import ServerProcess

NOTICED_S = 20.0
"""It takes 7 s; on a busy machine the watchdog counts only the time that it ran."""
HALF_LIMIT_S = 3.0
PROMPTS = ("def read(path):", "import os", "class A:", "for i in range(10):\n")
HANGS = 'pagedray_hangs_total{kind="rank"}'
REPLACEMENTS = 'pagedray_rank_replacements_total{cause="hang"}'
DEATHS = 'pagedray_rank_replacements_total{cause="death"}'


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[ServerProcess]:
    options = ("--tensor-parallel-size=2", "--num-threads=1", "--dtype=float32")
    with ServerProcess((*options, "--log-level=warning"), log=log) as server:
        yield server


def make_streams(server: ServerProcess, num_tokens: int) -> GrpcStreams:
    return GrpcStreams(server, num_streams=len(PROMPTS), num_tokens=num_tokens, texts=PROMPTS)


def undisturbed_tokens(server: ServerProcess, num_tokens: int) -> list[tuple[int, ...]]:
    with make_streams(server, num_tokens) as streams:
        streams.start()
        return streams.finished_tokens()


def next_rank(server: ServerProcess, old: list[psutil.Process]) -> psutil.Process:
    """Return a rank that is not among the old ones as soon as its process exists."""
    while True:
        # A process may end while its name is read.
        with suppress(psutil.Error):
            for process in server.ranks():
                if process not in old:
                    return process


@pytest.mark.slow
def test_idle_rank_that_is_stopped_is_replaced(server: ServerProcess) -> None:
    before = server.metrics()
    server.ranks()[0].suspend()
    wait_for(lambda: not server.is_ready(), NOTICED_S)
    wait_for(server.is_ready, 60.0)
    assert server.metrics()[REPLACEMENTS] == before[REPLACEMENTS] + 1


@pytest.mark.slow
def test_replacement_that_is_stopped_while_it_starts_is_replaced(server: ServerProcess) -> None:
    undisturbed = undisturbed_tokens(server, 300)
    before = server.metrics()
    old = server.ranks()
    with make_streams(server, 300) as streams:
        streams.start()
        old[0].kill()
        started = next_rank(server, old)
        started.suspend()
        stopped_s = time.monotonic()
        assert streams.finished_tokens() == undisturbed
    print(f"streams ended after {time.monotonic() - stopped_s:.1f} s")
    assert not started.is_running()
    # One replacement, of a rank that died, in two attempts.
    assert server.metrics()[DEATHS] == before[DEATHS] + 1
    # A process that has not said where its heartbeat is would otherwise get minutes.
    assert time.monotonic() - stopped_s < 60.0


@pytest.mark.slow
def test_rank_that_continues_in_time_is_not_replaced(server: ServerProcess) -> None:
    undisturbed = undisturbed_tokens(server, 1000)
    before = server.metrics()
    for turn in range(3):
        with make_streams(server, 1000) as streams:
            streams.start()
            victim = server.ranks()[turn % 2]
            victim.suspend()
            time.sleep(HALF_LIMIT_S)
            victim.resume()
            assert streams.finished_tokens() == undisturbed
        assert server.is_ready()
    assert server.metrics()[HANGS] == before[HANGS]


@pytest.mark.slow
def test_pauses_of_all_processes_are_not_taken_for_hangs(server: ServerProcess) -> None:
    """As if the machine had been paused, for longer than any limit, under load."""
    undisturbed = undisturbed_tokens(server, 1000)
    before = server.metrics()
    for pause_s in (2.0, 15.0, 30.0):
        with make_streams(server, 1000) as streams:
            streams.start()
            # Ray's processes are in the same family.
            family = server.family()
            for process in family:
                process.send_signal(signal.SIGSTOP)
            time.sleep(pause_s)
            for process in family:
                process.send_signal(signal.SIGCONT)
            assert streams.finished_tokens() == undisturbed
    after = server.metrics()
    assert after[HANGS] == before[HANGS]
    assert after[REPLACEMENTS] == before[REPLACEMENTS]
    assert after[DEATHS] == before[DEATHS]


@pytest.mark.slow
def test_streams_finish_without_gcs(server: ServerProcess, log: Path) -> None:
    """The last test: it ends the server. Others that end Ray are in `test_ray_outage.py`."""
    check_streams_finish(
        server, log, lambda: server.named("gcs_server")[0].kill(), reason="has ended"
    )


PATCH = """
import importlib.util
import sys
from pathlib import Path

SWITCH = Path({switch!r})


class Finder:
    def find_spec(self, name, path, target=None):
        if name != "workers.runner.block_swaps":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_patch(module):
            execute(module)
            reached = module.SwapFence.is_reached.fget
            module.SwapFence.is_reached = property(
                lambda fence: bool(not SWITCH.exists() and reached(fence))
            )

        spec.loader.exec_module = execute_and_patch
        return spec


sys.meta_path.insert(0, Finder())
"""
"""Run at the start of each Python process: no copy ends while the file exists."""


@pytest.mark.slow
def test_copies_that_do_not_end_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = tmp_path / "copies do not end"
    (tmp_path / "sitecustomize.py").write_text(PATCH.format(switch=str(switch)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pools = ("--num-blocks=40", "--num-cpu-blocks=40", "--max-model-len=512", "--max-num-seqs=1")
    with ServerProcess((*pools, "--preemption=swap", "--dtype=float32")) as server:

        def tokens_of(text: str) -> tuple[int, ...]:
            with GrpcStreams(server, num_streams=1, num_tokens=200, texts=(text,)) as streams:
                streams.start()
                (stream,) = streams.ended(120.0)
            assert stream.end == "FINISH_REASON_LENGTH"
            return stream.token_ids

        texts = ("def read(path):", "import os", "class A:", "for i in range(10):\n")
        undisturbed = [tokens_of(text) for text in texts]
        before = server.metrics()
        switch.touch()
        # Nothing waits for the blocks that are evicted, so all streams end.
        assert [tokens_of(text) for text in texts[:2]] == undisturbed[:2]
        assert server.metrics()[HANGS] == before[HANGS]
        wait_for(lambda: server.metrics()[HANGS] > before[HANGS], 60.0)
        switch.unlink()
        wait_for(server.is_ready, 60.0)
        assert server.metrics()[REPLACEMENTS] == before[REPLACEMENTS] + 1
        assert [tokens_of(text) for text in texts] == undisturbed
