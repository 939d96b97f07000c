"""A disk without space: the start reports it, and a dead rank is replaced all the same."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.system.grpc_streams import GrpcStream, GrpcStreams
from tests.system.server_process import TINY_LLAMA, ServerProcess, run_pagedray

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small disk, on which Ray writes."""
    # A short path: Ray creates sockets under it.
    with TemporaryDirectory(prefix="disk", dir="/tmp") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", folder]
        if subprocess.run(mount, check=False).returncode:
            pytest.skip("mounting a disk requires root")
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> None:
    # A buffer would keep the end of the last write, and raise when it is closed.
    with (disk / "large").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**16))


def test_start_on_a_full_disk_is_rejected(disk: Path) -> None:
    fill(disk)
    done = run_pagedray("serve", str(TINY_LLAMA), "--device=cpu", "--grpc-port=0", "--http-port=0")
    assert done.code == 2
    assert "Could not start Ray" in done.err
    assert f"{disk}, with 0 MiB free" in done.err
    assert "Traceback" not in done.err


def test_rank_is_replaced_while_the_disk_is_full(disk: Path) -> None:
    with (
        ServerProcess(("--tensor-parallel-size=2",)) as server,
        GrpcStreams(server, num_streams=8, num_tokens=600) as streams,
    ):
        streams.start()
        fill(disk)
        server.ranks()[0].kill()
        finished = GrpcStream(num_tokens=600, end="FINISH_REASON_LENGTH")
        assert streams.ended(120.0) == [finished] * 8
