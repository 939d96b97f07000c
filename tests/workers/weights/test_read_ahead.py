"""What the kernel is asked for before it is read."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from workers.layers.weight import WeightShard
from workers.weights import tensor_reader
from workers.weights.checkpoint import Checkpoint
from workers.weights.tensor_reader import FileRange, ReadAhead

_WHOLE = (slice(None), slice(None))
LIMIT_S = 60.0


class Advice:
    """Keeps what the kernel is asked for, in place of asking it."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.asked: list[tuple[int, int, int]] = []

    def ask(self, descriptor: int, position: int, num_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        with self._condition:
            self.asked.append((descriptor, position, num_bytes))
            self._condition.notify()

    def wait_for(self, num_bytes: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self.num_bytes >= num_bytes, LIMIT_S)

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, _, num_bytes in self.asked)


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> Iterator[Advice]:
    advice = Advice()
    monkeypatch.setattr(os, "posix_fadvise", advice.ask)
    monkeypatch.setattr(tensor_reader, "_STEP_BYTES", 4)
    monkeypatch.setattr(tensor_reader, "_MOST_BYTES", 16)
    monkeypatch.setattr(tensor_reader, "_FEW_BYTES", 8)
    yield advice
    assert not any(thread.name == "pagedray-read-ahead" for thread in threading.enumerate())


def test_ranges_are_asked_for_in_order_and_whole(advice: Advice) -> None:
    ahead = ReadAhead(
        [
            FileRange(descriptor=3, first_byte=10, num_bytes=6),
            FileRange(descriptor=3, first_byte=40, num_bytes=0),
            FileRange(descriptor=5, first_byte=0, num_bytes=3),
        ]
    )
    advice.wait_for(9)
    ahead.close()
    assert advice.asked == [(3, 10, 4), (3, 14, 2), (5, 0, 3)]


def test_no_more_is_asked_for_than_the_bound_until_much_was_read(advice: Advice) -> None:
    ahead = ReadAhead([FileRange(descriptor=3, first_byte=0, num_bytes=100)])
    advice.wait_for(16)
    ahead.note_read(8)
    # 8 are ahead, which is not less than a few.
    ahead.note_read(1)
    advice.wait_for(28)
    ahead.close()
    assert advice.num_bytes == 28


def test_closing_ends_a_thread_that_waits(advice: Advice) -> None:
    ahead = ReadAhead([FileRange(descriptor=3, first_byte=0, num_bytes=100)])
    advice.wait_for(16)
    ahead.close()
    assert advice.num_bytes == 16


def test_a_checkpoint_asks_for_what_its_shards_read(
    advice: Advice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_reader, "_MOST_BYTES", 2**20)
    tensors = {"a": torch.randn(40, 6), "b": torch.randn(9), "c": torch.randn(7, 5)}
    save_file(tensors, tmp_path / "model.safetensors")
    shards = [
        WeightShard(name="c", shape=(7, 5), part=_WHOLE, target=torch.empty(7, 5)),
        WeightShard(
            name="a", shape=(40, 6), part=(slice(3, 30), slice(None)), target=torch.empty(27, 6)
        ),
        WeightShard(name="b", shape=(9,), part=_WHOLE[:1], target=torch.empty(9)),
    ]
    num_bytes = sum(shard.target.nbytes for shard in shards)
    read: list[int] = []
    read_into = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], position: int) -> int:
        read.extend(range(position, position + sum(len(buffer) for buffer in buffers)))
        return read_into(descriptor, buffers, position)

    with Checkpoint(tmp_path) as checkpoint:
        in_order = checkpoint.in_file_order(shards)
        checkpoint.read_ahead(in_order)
        advice.wait_for(num_bytes)
        monkeypatch.setattr(os, "preadv", counted)
        for shard in in_order:
            checkpoint.fill_shard(shard)
    asked = [at for _, first, size in advice.asked for at in range(first, first + size)]
    assert len(asked) == num_bytes
    assert asked == read
