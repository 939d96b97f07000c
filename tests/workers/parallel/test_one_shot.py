"""Sums over the GPUs of two processes, each of which sees only its own, against NCCL's."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.parallel.all_reduce import PeerSums
from workers.parallel.peer_memory import RowShape

ROOT = Path(__file__).parents[3]


def _free_ports(number: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has saved."""
    folder = tmp_path_factory.mktemp("ranks")
    ports = _free_ports(5)
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.workers.parallel.one_shot_process"),
                *(str(rank), "2", str(folder), *map(str, ports)),
            ],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-5000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("max_begun_rows", "mebibytes"), [(2048, 64), (4096, 128), (8192, 128)])
def test_sums_have_memory_for_four_of_the_largest(max_begun_rows: int, mebibytes: int) -> None:
    num_bytes = PeerSums.num_bytes(RowShape(4096, torch.bfloat16), max_begun_rows)
    assert 0 <= num_bytes - mebibytes * 2**20 < 1024


@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_sums_norms_replays_and_sums_after_an_abort_equal_those_of_nccl(
    results: list[dict[str, Any]],
) -> None:
    assert len(results[0]) == 38
    for name, mine in results[0].items():
        theirs = results[1][name]
        half = len(mine) // 2
        # Every rank has the same bits, and the sum of two rows is rounded only once.
        for got, expected, other in zip(mine[:half], mine[half:], theirs[:half], strict=True):
            assert torch.equal(got, other), name
            assert torch.equal(got, expected), name
