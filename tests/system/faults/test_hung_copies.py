"""A rank whose block copies do not end is replaced, although its steps do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes import wait_for
from tests.system.grpc_streams import GrpcStreams
from tests.system.server_process import ServerProcess

HANGS = 'pagedray_hangs_total{kind="rank"}'
REPLACEMENTS = 'pagedray_rank_replacements_total{cause="hang"}'
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
