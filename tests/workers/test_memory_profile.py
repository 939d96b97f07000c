"""The host memory that pools may take."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.engine.options import EngineOptions, engine_config
from tests.system.server_process import TINY_LLAMA
from workers.memory_profile import (
    available_host_bytes,
    free_host_bytes,
    host_memory_bytes,
    host_pool_bytes,
)

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: 9 kB\nMemAvailable:  {GIB // 1024} kB\nBuffers: 1 kB\n")
    return path


def test_available_memory_is_that_of_the_machine_without_a_limit(
    meminfo: Path, tmp_path: Path
) -> None:
    assert available_host_bytes(meminfo, tmp_path / "none") == GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes(meminfo, tmp_path) == GIB


@pytest.mark.parametrize(("limit", "left"), [(2**20, 2**20 - 5000 + 4096), (4000, 3096), (10, 0)])
def test_a_container_has_what_is_left_of_its_limit(
    meminfo: Path, tmp_path: Path, limit: int, left: int
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nfile 9999\ninactive_file 4096\n")
    assert host_memory_bytes(tmp_path) == limit
    assert available_host_bytes(meminfo, tmp_path) == left


def test_pool_beside_a_gpu_is_a_part_of_the_memory_that_the_ranks_share() -> None:
    sizes = []
    for num_ranks in (1, 4):
        options = EngineOptions(device="cuda", executor="ray", tensor_parallel_size=num_ranks)
        sizes.append(host_pool_bytes(engine_config(TINY_LLAMA, options)))
    available = available_host_bytes()
    assert 0 < sizes[1] <= sizes[0] <= available // 3
    assert sizes[0] <= 64 * GIB


def test_pool_of_a_cpu_stays_small() -> None:
    config = engine_config(TINY_LLAMA, EngineOptions(device="cpu"))
    assert host_pool_bytes(config) == GIB
    assert free_host_bytes(config) <= 4 * GIB


@pytest.mark.parametrize(("num_ranks", "gib"), [(1, 3.0), (2, 1.5)])
def test_cache_of_a_cpu_takes_half_of_the_memory_that_the_kernel_can_free(
    num_ranks: int, gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Most of it may be cached pages, as after a checkpoint was read.
    monkeypatch.setattr("workers.memory_profile.available_host_bytes", lambda: 6 * GIB)
    options = EngineOptions(device="cpu", memory_fraction=0.5, tensor_parallel_size=num_ranks)
    assert free_host_bytes(engine_config(TINY_LLAMA, options)) == int(gib * GIB * 0.5)
