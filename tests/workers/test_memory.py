"""Memory of a rank, the size of its cache and the roofline of its GPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from attention.abstract import AttentionSpec, StateTensor
from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.batch import StepPlan
from pagedray.config import CacheSize, EngineConfig
from pagedray.errors import DeviceError
from pagedray.machine import available_host_bytes
from pagedray.rank_progress import ProgressWord
from tests.system.server_process import TINY_LLAMA
from tests.workers.reference import BLOCK_SIZE, CPU, loaded_model, save_checkpoint
from workers.decoder_worker import (
    _MATRIX_SIZE,
    attention_work,
    measure_roofline,
    product_speed,
)
from workers.memory_profile import (
    NO_GRAPHS,
    GraphSizes,
    MemoryProfile,
    cache_size,
    free_host_bytes,
    host_pool_bytes,
    num_rows_with_states,
)
from workers.models.self_attention import attention_spec
from workers.parallel.group import SoloGroup
from workers.runner.model_runner import ModelRunner

GIB = 2**30
BESIDE_GPU = EngineOptions(device="cuda", executor="ray", block_size=16, max_model_len=256)
TOTAL = 1000
WEIGHTS = 200
STEPS = 50
SHARED_BY_GRAPHS = 100
EACH_GRAPH = 10
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def gpu_cache_size(num_fitting: int, options: EngineOptions) -> CacheSize:
    """Return the pools beside a GPU whose memory has room for so many blocks."""
    config = engine_config(TINY_LLAMA, options)
    spec = attention_spec(
        config.model, SoloGroup(), block_size=16, device=torch.device("cuda"), max_seq_len=256
    )
    num_bytes = num_fitting * spec.block_bytes
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


def with_state(num_blocks: int) -> AttentionSpec:
    """Return a spec of a model with a state of so many blocks, less a few bytes."""
    config = engine_config(TINY_LLAMA, BESIDE_GPU)
    spec = attention_spec(
        config.model, SoloGroup(), block_size=16, device=torch.device("cuda"), max_seq_len=256
    )
    num_bytes = num_blocks * spec.block_bytes - 32
    return replace(spec, states=((StateTensor((num_bytes,), torch.uint8),),))


def test_states_of_all_rows_take_memory_before_blocks() -> None:
    spec = with_state(3)
    assert spec.state_blocks == 3
    config = engine_config(
        TINY_LLAMA, replace(BESIDE_GPU, max_num_seqs=64, enable_prefix_cache=False)
    )

    def size(num_fitting: int, config: EngineConfig = config) -> CacheSize:
        free = num_fitting * spec.block_bytes
        return cache_size(config, spec, free_bytes=lambda: free, num_neighbors=1)

    assert size(64 * 3 + 100).num_blocks == 100
    assert size(64 * 3 + 100).state_blocks == 3
    # A step saves up to 8 states, and 3 blocks are for staging.
    with_cache = replace(config, cache=replace(config.cache, enable_prefix_cache=True))
    assert size(72 * 3 + 100, with_cache).num_blocks == 97
    with pytest.raises(DeviceError) as caught:
        size(64 * 3)
    numbers = (64 * 3 * spec.block_bytes, spec.block_bytes, 64, spec.state_bytes)
    assert all(str(number) in str(caught.value) for number in numbers)


def test_rows_have_at_most_half_of_the_memory_for_their_states() -> None:
    spec = with_state(3)
    size = 3 * spec.block_bytes
    # With the spare states: 5 + 5, 42 + 8.
    numbers = {0: 1, 20: 5, 100: 42, 9999: 256}
    for num_free, num_rows in numbers.items():
        assert num_rows_with_states(spec, 256, num_free * size) == num_rows
    assert num_rows_with_states(replace(spec, states=()), 256, 0) == 256


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


class CountingGpu:
    """Memory with the weights, and runners whose steps and graphs take some of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_used = self.peak = WEIGHTS
        for name, function in {
            "mem_get_info": lambda device: (TOTAL - self.num_used, TOTAL),
            "memory_reserved": lambda device: self.num_used,
            "max_memory_reserved": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: None,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr("workers.memory_profile.release_gpu_memory", self.release)

    def release(self) -> None:
        self.num_used = WEIGHTS

    def make_runner(self, sizes: GraphSizes) -> ModelRunner:
        def launch(plan: StepPlan) -> SimpleNamespace:
            self.peak = max(self.peak, WEIGHTS + STEPS)
            return SimpleNamespace(take_masks=lambda masks: None, output=lambda: None)

        captured: set[int] = set()

        def capture_graphs(*, only_largest: bool = False) -> None:
            # Of one kind.
            every = sizes.decodes or sizes.pieces
            for size in {every[-1]} if only_largest else set(every):
                if size not in captured:
                    self.num_used += EACH_GRAPH if captured else SHARED_BY_GRAPHS
                    captured.add(size)

        forward_pass = SimpleNamespace(capture_graphs=capture_graphs)
        runner = SimpleNamespace(launch=launch, forward_pass=forward_pass)
        return cast("ModelRunner", runner)


@pytest.mark.parametrize(
    ("sizes", "graph_bytes"),
    [
        (NO_GRAPHS, 0),
        (GraphSizes([1], []), 100),
        (GraphSizes([1, 2, 4, 8, 16], []), 140),
        # Each kind is measured alone, so that the pool of both counts twice.
        (GraphSizes([1, 2, 4], [16, 32]), 120 + 110),
    ],
)
def test_steps_and_graphs_of_all_sizes_have_room_beside_the_cache(
    sizes: GraphSizes, graph_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = CountingGpu(monkeypatch)
    options = EngineOptions(device="cuda", executor="ray", memory_fraction=0.75)
    config = engine_config(TINY_LLAMA, options)
    profile = MemoryProfile(config, torch.device("cuda"), ProgressWord(), gpu.make_runner)
    assert profile.free_bytes(sizes) == TOTAL - 250 - WEIGHTS - STEPS - graph_bytes


def test_a_full_gpu_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CountingGpu(monkeypatch)
    options = EngineOptions(device="cuda", executor="ray", memory_fraction=0.1)
    config = engine_config(TINY_LLAMA, options)
    profile = MemoryProfile(config, torch.device("cuda"), ProgressWord(), gpu.make_runner)
    assert profile.free_bytes(NO_GRAPHS) == 0


def test_attention_reads_what_the_cache_has_of_a_token(tmp_path: Path) -> None:
    save_checkpoint("gemma2-capped", tmp_path)
    model = loaded_model(tmp_path, SoloGroup())
    spec = attention_spec(model.config, SoloGroup(), block_size=BLOCK_SIZE, device=CPU)
    found = {work.window: work for work in attention_work(spec, model.config.cache_indices)}
    assert set(found) == {layer.sliding_window for layer in spec.layers}
    assert len(found) == 2
    assert sum(one.token_bytes for one in found.values()) * BLOCK_SIZE == spec.block_bytes
    heads = model.config.num_heads * model.config.head_size
    # Multiplication and addition, of a query with a key and of a weight with a value.
    assert sum(one.pair_flop for one in found.values()) == 2 * 2 * heads * len(spec.layers)


def test_layers_that_read_an_earlier_layer_read_as_much(tmp_path: Path) -> None:
    save_checkpoint("gemma4-shared-embeddings", tmp_path)
    config = loaded_model(tmp_path, SoloGroup()).config
    spec = attention_spec(config, SoloGroup(), block_size=BLOCK_SIZE, device=CPU)
    assert config.cache_indices == (0, 1, 2, 2, 1, 1)
    found = {one.window: one.token_bytes for one in attention_work(spec, config.cache_indices)}
    assert found == dict.fromkeys((None, 17), spec.block_bytes / BLOCK_SIZE)


def test_this_device_is_measured(tmp_path: Path) -> None:
    save_checkpoint("mixtral-window", tmp_path)
    model = loaded_model(tmp_path, SoloGroup())
    spec = attention_spec(model.config, SoloGroup(), block_size=BLOCK_SIZE, device=CPU)
    roofline = measure_roofline(model, spec)
    # From a hundredth of a slow machine to far above a fast one.
    assert 1e8 < roofline.speed.read_bytes_per_s < 1e14
    assert 1e8 < roofline.speed.flop_per_s < 1e17
    assert roofline.speed.fp8_flop_per_s is None
    assert roofline.experts is not None
    assert roofline.experts.expected_part(1.0) == pytest.approx(2 / 5)


def test_products_of_fp8_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a GPU, torch computes them on the CPU, on some CPUs very slowly.
    monkeypatch.setitem(_MATRIX_SIZE, DEVICE.type, 128)
    assert 1e6 < product_speed(torch.float8_e4m3fn, DEVICE) < 1e17


def test_too_little_memory_is_an_error_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*sizes: int, device: torch.device) -> torch.Tensor:
        raise torch.OutOfMemoryError

    save_checkpoint("llama-5-heads", tmp_path)
    model = loaded_model(tmp_path, SoloGroup())
    spec = attention_spec(model.config, SoloGroup(), block_size=BLOCK_SIZE, device=CPU)
    monkeypatch.setattr(torch, "ones", allocate)
    with pytest.raises(DeviceError, match="Too little GPU memory is free"):
        measure_roofline(model, spec)
