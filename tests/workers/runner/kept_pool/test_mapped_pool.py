"""CPU pools in memory that outlives their rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from pagedray.node_memory import MemoryAddress, NodeMemory
from workers.runner.host_pool import HostPool
from workers.runner.persistent_pool import MappedPool

ORIGIN = bytes(range(32))
OTHER = bytes(range(1, 33))


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
