"""A server that may open no more files goes on, and replaces a dead rank once it may again."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.fakes import wait_for
from tests.system.grpc_streams import GrpcStream, GrpcStreams
from tests.system.server_process import ServerProcess

pytestmark = pytest.mark.slow

NUM_OLDEST = 16
"""A limit that is reached, as the first files of a server stay open; poll() takes so many."""


@contextmanager
def no_more_files(process_id: int) -> Iterator[None]:
    """Let a process open no file or socket until the end of the block."""
    limits = resource.prlimit(process_id, resource.RLIMIT_NOFILE)
    resource.prlimit(process_id, resource.RLIMIT_NOFILE, (NUM_OLDEST, limits[1]))
    yield
    resource.prlimit(process_id, resource.RLIMIT_NOFILE, limits)


def test_a_rank_that_dies_is_replaced_once_files_can_be_opened(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--tensor-parallel-size=2", "--num-threads=1", "--log-level=warning")
    with (
        ServerProcess(options, log=log) as server,
        GrpcStreams(server, num_streams=4, num_tokens=600) as streams,
        httpx.Client(base_url=server.url) as client,
    ):
        assert client.get("/health").status_code == 200
        streams.start()
        with no_more_files(server.pid):
            server.ranks()[1].kill()
            wait_for(lambda: "Ranks could not be started: [Errno 24]" in log.read_text())
            structure = {"structured_outputs": {"choice": ["yes", "no"]}}
            body = {"model": "tiny-llama", "prompt": "x", **structure}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 503
            assert "Too many open files. Retry later." in answer.text
        finished = GrpcStream(num_tokens=600, end="FINISH_REASON_LENGTH")
        assert streams.ended(120.0) == [finished] * 4
        answer = client.post("/v1/completions", json=body)
        assert answer.json()["choices"][0]["text"] in ("yes", "no")
    assert "Traceback" not in log.read_text()
