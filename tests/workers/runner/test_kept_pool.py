"""The pool of blocks in host memory: its mapping, origin and size."""

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention.abstract import AttentionSpec, StateTensor
from attention.params import AttentionParams
from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.config import EngineConfig
from pagedray.layout import cache_layout
from pagedray.node_memory import MemoryAddress, NodeMemory
from tests.small_models.checkpoints import CASES, save_checkpoint
from workers.runner.host_pool import HostPool
from workers.runner.kv_cache import make_host_pool
from workers.runner.persistent_pool import MappedPool, PoolMapper, PoolOrigin

ORIGIN = bytes(range(32))
OTHER = bytes(range(1, 33))
LAYOUT = (8, (2, 2, 4), torch.float32)


@pytest.fixture
def address() -> Iterator[MemoryAddress]:
    with closing(NodeMemory("cpu-pool")) as memory:
        yield memory.address


def mapped(
    address: MemoryAddress, *, num_bytes: int = 5000, origin: bytes = ORIGIN, timeout_s: float = 5.0
) -> MappedPool:
    return MappedPool(address, num_bytes=num_bytes, origin=origin, timeout_s=timeout_s)


def test_the_next_user_finds_what_the_last_one_wrote(address: MemoryAddress) -> None:
    pool = mapped(address)
    assert not pool.is_former
    pool.memory[:5] = b"block"
    pool.confirm()
    del pool
    again = mapped(address)
    assert again.is_former
    assert again.memory[:5] == b"block"


@pytest.mark.parametrize("change", [{"num_bytes": 9000}, {"origin": OTHER}])
def test_a_pool_of_something_else_starts_with_zeros(
    address: MemoryAddress, change: dict[str, int | bytes]
) -> None:
    pool = mapped(address)
    pool.memory[:5] = b"block"
    pool.confirm()
    del pool
    other = mapped(address, **change)  # type: ignore[arg-type]  # each has its own type
    assert not other.is_former
    assert not any(other.memory[:5000])
    other.confirm()
    del other
    assert not mapped(address).is_former


def test_a_new_pool_that_was_not_confirmed_is_new_to_the_next_user_too(
    address: MemoryAddress,
) -> None:
    pool = mapped(address)
    pool.confirm()
    del pool
    # It is new, but its user ends before anybody hears of that.
    assert not mapped(address, origin=OTHER).is_former
    assert not mapped(address, origin=OTHER).is_former
    assert not mapped(address).is_former


def test_nobody_else_maps_it_meanwhile(address: MemoryAddress) -> None:
    pool = mapped(address)
    with pytest.raises(TimeoutError, match="another process still uses the memory"):
        mapped(address, timeout_s=0.0)
    assert len(pool.memory) > 0


def test_blocks_are_as_the_last_pool_left_them(address: MemoryAddress) -> None:
    import torch

    num_bytes = 7 * 1024 * 2
    pool = mapped(address, num_bytes=num_bytes)
    blocks = HostPool(7, (1024,), torch.bfloat16, pinner=None, mapped=pool).blocks
    assert not blocks.any()
    blocks.fill_(1.0)
    pool.confirm()
    del pool, blocks
    again = mapped(address, num_bytes=num_bytes)
    assert again.is_former
    assert HostPool(7, (1024,), torch.bfloat16, pinner=None, mapped=again).blocks.eq(1.0).all()


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    save_checkpoint(CASES[0], tmp_path)
    return engine_config(tmp_path, EngineOptions(device="cpu"))


def origin(config: EngineConfig, *, layout: Sequence[object] = LAYOUT, rank: int = 0) -> bytes:
    return PoolOrigin(config, rank=rank).digest(layout)


def test_a_pool_of_other_groups_of_layers_or_other_states_is_not_kept(
    address: MemoryAddress, config: EngineConfig
) -> None:
    mapper = PoolMapper(config, address, rank=0)
    both, alone = cache_layout([None, 7], 16), cache_layout([7, None], 16)
    states = ((StateTensor((2, 3), torch.float32),),)
    wider = ((StateTensor((2, 4), torch.float32),),)
    for groups, of_layers, is_kept in (
        *((None, (), False), (both, (), False), (both, (), True), (alone, (), False)),
        *((alone, states, False), (alone, states, True), (alone, wider, False)),
    ):
        pool = mapper.map_pool(*LAYOUT, states=of_layers, groups=groups)
        assert pool is not None
        assert pool.is_former == is_kept
        pool.confirm()
        del pool


def test_the_same_rank_of_the_same_model_has_the_same_origin(config: EngineConfig) -> None:
    again = engine_config(config.model.folder, EngineOptions(device="cpu"))
    assert origin(config) == origin(again)
    # What does not change the content may change.
    assert origin(config) == origin(replace(config, enforce_eager=True))


def test_anything_that_changes_keys_and_values_changes_it(config: EngineConfig) -> None:
    model = replace(config.model, rope=None)
    found = {
        origin(config),
        origin(config, rank=1),
        origin(config, layout=(9, *LAYOUT[1:])),
        origin(config, layout=(*LAYOUT[:2], torch.float16)),
        origin(replace(config, model=model)),
        origin(replace(config, load_format="dummy")),
        origin(replace(config, load_format="dummy", load_seed=1)),
    }
    (weights,) = config.model.folder.glob("*.safetensors")
    os.utime(weights, (1, 1))
    found.add(origin(config))
    assert len(found) == 8


class FakePinner:
    """Pins so many chunks, then fails."""

    def __init__(self, num_chunks: int) -> None:
        self._num_left = num_chunks
        self.pinned: dict[int, int] = {}
        """Bytes by address."""
        self.last_error = threading.local()
        """As CUDA keeps it: for the thread whose call failed."""

    def pin(self, address: int, num_bytes: int) -> int:
        if not self._num_left:
            self.last_error.code = 2
            return 2
        self._num_left -= 1
        assert all(
            address + num_bytes <= start or start + size <= address
            for start, size in self.pinned.items()
        )
        self.pinned[address] = num_bytes
        return 0

    def unpin(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.mark.parametrize("block_shape", [(3,), (2, 7, 5), (64, 1024), (2**24,), (2**25 + 1,)])
def test_chunks_end_at_pages_and_between_blocks(block_shape: tuple[int, ...]) -> None:
    pool = HostPool(2, block_shape, torch.float16, pinner=None)
    chunk_bytes = pool.blocks_per_chunk * pool.blocks[0].nbytes
    assert chunk_bytes % mmap.PAGESIZE == 0
    assert pool.blocks.data_ptr() % mmap.PAGESIZE == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_a_pool_has_zeros_and_nothing_pinned_without_a_gpu(dtype: torch.dtype) -> None:
    pool = HostPool(5, (2, 3), dtype, pinner=None)
    assert torch.equal(pool.blocks, torch.zeros(5, 2, 3, dtype=dtype))
    assert pool.num_pinned_blocks == 0
    assert pool.has_layout(5, [2, 3], dtype)
    assert not pool.has_layout(6, [2, 3], dtype)


def test_a_pool_may_be_empty() -> None:
    assert HostPool(0, (2, 3), torch.float32, pinner=None).blocks.shape == (0, 2, 3)


def test_a_pool_is_pinned_whole_when_asked_and_released_with_its_end() -> None:
    pinner = FakePinner(9)
    # A chunk has 64 blocks of a MiB.
    pool = HostPool(100, (2**20,), torch.uint8, pinner=pinner)
    pool.wait_until_pinned()
    assert pool.num_pinned_blocks == 0
    for _ in range(2):
        pool.start_pinning()
        pool.wait_until_pinned()
    assert pool.num_pinned_blocks == 100
    first = pool.blocks.data_ptr()
    assert pinner.pinned == {first: 64 * 2**20, first + 64 * 2**20: 36 * 2**20}
    del pool
    assert pinner.pinned == {}


def test_a_pool_is_pinned_in_parts_and_the_rest_by_a_thread() -> None:
    pinner = FakePinner(9)
    pool = HostPool(300, (2**20,), torch.uint8, pinner=pinner)
    assert [(pool.pin_next(), pool.num_pinned_blocks) for _ in range(2)] == [
        (True, 64),
        (True, 128),
    ]
    pool.start_pinning()
    # A thread pins, or has pinned, what is left.
    assert not pool.pin_next()
    pool.wait_until_pinned()
    assert pool.num_pinned_blocks == 300
    assert len(pinner.pinned) == 5


def test_parts_end_with_the_pool_or_the_first_that_cannot_be_pinned() -> None:
    unpinned: list[int] = []
    for num_chunks, expected in ((9, 100), (1, 64)):
        pool = HostPool(
            100,
            (2**20,),
            torch.uint8,
            pinner=FakePinner(num_chunks),
            note_unpinned=unpinned.append,
        )
        assert [pool.pin_next() for _ in range(4)] == [True, True, False, False]
        assert pool.num_pinned_blocks == expected
    assert unpinned == [36]


def test_a_failed_part_leaves_no_error_in_the_thread_that_asked_for_it() -> None:
    # It runs the steps, and torch would raise the error at its next kernel.
    pinner = FakePinner(0)
    pool = HostPool(100, (2**20,), torch.uint8, pinner=pinner)
    assert pool.pin_next()
    assert not pool.pin_next()
    assert not hasattr(pinner.last_error, "code")


def test_memory_that_cannot_be_pinned_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    unpinned: list[int] = []
    pinner = FakePinner(2)
    pool = HostPool(300, (2**20,), torch.uint8, pinner=pinner, note_unpinned=unpinned.append)
    pool.start_pinning()
    pool.wait_until_pinned()
    assert pool.num_pinned_blocks == 128
    assert unpinned == [172]
    assert caplog.messages == [
        "Only 128 of 300 blocks of the CPU pool are pinned, and copies of the others are slower: "
        "CUDA returned error 2."
    ]


def test_a_pool_of_another_size_or_dtype_is_not_kept() -> None:
    params = AttentionParams(num_heads=2, num_kv_heads=1, head_size=8, scale=1.0)
    specs = [
        AttentionSpec(layers=(params,), dtype=dtype, device=torch.device("cpu"), block_size=4)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    former = make_host_pool(specs[0], 6)
    assert make_host_pool(specs[0], 6, former) is former
    assert len(make_host_pool(specs[0], 7, former).blocks) == 7
    assert make_host_pool(specs[1], 6, former).blocks.dtype == torch.bfloat16
