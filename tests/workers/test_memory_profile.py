"""The host memory that pools may take."""

from __future__ import annotations

import pytest

from cluster.engine.options import EngineOptions, engine_config
from pagedray.system.host_memory import available_host_bytes
from tests.system.server_process import TINY_LLAMA
from workers.memory_profile import (
    free_host_bytes,
    host_pool_bytes,
)

GIB = 2**30


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
