"""How many blocks the pools of a rank have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.config import CacheSize
from pagedray.errors import DeviceError
from pagedray.machine import available_host_bytes
from tests.system.server_process import TINY_LLAMA
from workers.memory_profile import cache_size, free_host_bytes, host_pool_bytes
from workers.models.self_attention import attention_spec
from workers.parallel.group import SoloGroup
from workers.runner.kv_cache import block_bytes

GIB = 2**30


BESIDE_GPU = EngineOptions(device="cuda", executor="ray", block_size=16, max_model_len=256)


def gpu_cache_size(num_fitting: int, options: EngineOptions) -> CacheSize:
    """Return the pools beside a GPU whose memory has room for so many blocks."""
    config = engine_config(TINY_LLAMA, options)
    spec = attention_spec(
        config.model, SoloGroup(), block_size=16, device=torch.device("cuda"), max_seq_len=256
    )
    num_bytes = num_fitting * block_bytes(spec)
    return cache_size(config, spec, free_bytes=lambda: num_bytes, num_neighbors=1)


# A sequence has at most 16 blocks, and one block in 32 is for evicted content.
@pytest.mark.parametrize(
    ("max_num_seqs", "num_blocks"), [(1, 32), (3, 96), (7, 224), (8, 248), (64, 248)]
)
def test_staging_blocks_take_place_only_where_memory_limits_the_pool(
    max_num_seqs: int, num_blocks: int
) -> None:
    options = replace(BESIDE_GPU, max_num_seqs=max_num_seqs)
    assert gpu_cache_size(256, options).num_blocks == num_blocks


@pytest.mark.parametrize(
    "options",
    [
        replace(BESIDE_GPU, enable_prefix_cache=False),
        replace(BESIDE_GPU, enable_cpu_prefix_cache=False),
        replace(BESIDE_GPU, num_cpu_blocks=0),
    ],
)
def test_a_pool_has_no_staging_blocks_if_no_prefix_goes_to_the_cpu(options: EngineOptions) -> None:
    assert gpu_cache_size(256, replace(options, max_num_seqs=64)).num_blocks == 256


def test_pools_of_given_sizes_are_not_measured() -> None:
    size = gpu_cache_size(1, replace(BESIDE_GPU, max_num_seqs=64, num_blocks=100, num_cpu_blocks=7))
    assert (size.num_blocks, size.num_cpu_blocks, size.limits.max_num_seqs) == (100, 7, 64)


def test_pool_beside_a_gpu_has_at_most_four_times_its_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.memory_profile.available_host_bytes", lambda: 2**40)
    assert gpu_cache_size(256, replace(BESIDE_GPU, max_num_seqs=1)).num_cpu_blocks == 4 * 32


def test_memory_of_less_than_two_blocks_is_rejected() -> None:
    with pytest.raises(DeviceError, match=r"Only \d+ bytes of cuda memory are left for the KV cac"):
        gpu_cache_size(1, BESIDE_GPU)


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
