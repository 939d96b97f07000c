"""Sequences without room for their blocks, whose cached prefix is not looked up at every step."""

from array import array

import hypothesis.strategies as st
from hypothesis import given, settings

from cluster.scheduling.device_tier import BlockKey, DeviceTier
from cluster.scheduling.kv_manager import KvManager, KvOptions
from cluster.scheduling.sequence import ActiveRequest, Sequence
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams
from tests.scheduling.kv_sequences import admit, swap_out

BLOCK_SIZE = 2
NUM_BLOCKS = 12


class WatchedTier(DeviceTier):
    """Counts look-ups."""

    __slots__ = ("num_lookups",)

    def __init__(self, kv: KvManager) -> None:
        save = kv.cpu.save_block
        super().__init__(b"key", num_blocks=NUM_BLOCKS, is_enabled=True, save=save)
        self.num_lookups = 0

    def find_block(self, key: BlockKey) -> int | None:
        self.num_lookups += 1
        return super().find_block(key)

    def find_prefix(
        self,
        keys: list[BlockKey],
        root: bytes,
        token_ids: "array[int]",
        *,
        num_blocks: int,
        block_size: int,
    ) -> list[int]:
        self.num_lookups += 1
        return super().find_prefix(
            keys, root, token_ids, num_blocks=num_blocks, block_size=block_size
        )


def make_manager() -> tuple[KvManager, WatchedTier]:
    options = KvOptions(
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        num_cpu_blocks=8,
        enable_cpu_prefix_cache=False,
    )
    kv = KvManager(options, costs=None, max_num_tokens=100)
    device = WatchedTier(kv)
    kv.device, kv.pool = device, device.pool
    return kv, device


def make_sequence(token_ids: tuple[int, ...]) -> Sequence:
    request = Request(
        id="r", prompt_token_ids=token_ids, sampling=SamplingParams(max_tokens=99), seed=0
    )
    return ActiveRequest(
        request, prompt=array("I", request.prompt_token_ids), arrival=0, max_model_len=100
    ).sequences[0]


def compute(kv: KvManager, sequence: Sequence) -> None:
    """Take all known tokens of an admitted sequence as computed."""
    sequence.blocks.extend(len(sequence.token_ids), kv.block_size)
    sequence.num_computed = len(sequence.token_ids)
    kv.register_blocks(sequence)


def has_room(kv: KvManager, sequence: Sequence, *, num_tokens: int, num_spare: int) -> bool:
    """Return whether a sequence can be admitted, by looking up its whole prefix."""
    cache = kv.device
    assert cache is not None
    parent, num_shared = cache.root(""), 0
    for first in range(0, len(sequence.token_ids) - BLOCK_SIZE, BLOCK_SIZE):
        key = cache.key_after(parent, sequence.token_ids[first : first + BLOCK_SIZE])
        block = cache.find_block(key)
        if block is None:
            break
        parent = key.digest
        num_shared += block not in kv.pool.idle_blocks
    return kv.blocks_for(num_tokens) - num_shared + num_spare <= kv.pool.num_free


PROMPTS = [(1, 1, 2, 2, 3, 3, 4), (1, 1, 2, 2, 5, 5, 6, 6, 7), (1, 1, 8, 8), (9,) * 11]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(0, 3), st.integers(0, 3)),
        min_size=30,
        max_size=60,
    )
)
def test_a_sequence_is_admitted_as_soon_as_there_is_room(
    events: list[tuple[int, int, int]],
) -> None:
    kv, _ = make_manager()
    waiting = [make_sequence((*prompt, 0)) for prompt in PROMPTS]
    running: list[Sequence] = []
    for event, which, amount in events:
        if event < 3:
            # Others come, and compute the same prefixes.
            other = make_sequence(PROMPTS[which])
            if admit(kv, other, num_tokens=len(other.token_ids)):
                compute(kv, other)
                running.append(other)
        elif event < 5 and running:
            kv.release(running.pop(which % len(running)))
        elif event == 5 and running:
            kv.append(running[which % len(running)])
        elif event == 6 and running and amount == 0:
            kv.forget_blocks(running[which % len(running)])
        elif event == 7 and running and kv.can_swap_out(running[-1]):
            # Its blocks are in transit until step 1 is acknowledged.
            swapped = running.pop()
            swap_out(kv, swapped, step=1)
            kv.release(swapped)
        elif event == 8:
            kv.acknowledge(1)
        for sequence in waiting:
            limits = {"num_tokens": len(sequence.token_ids), "num_spare": amount}
            expected = has_room(kv, sequence, **limits)
            assert bool(admit(kv, sequence, **limits)) == expected
            if expected:
                kv.release(sequence)


def test_a_waiting_sequence_looks_up_its_prefix_once() -> None:
    kv, cache = make_manager()
    first = make_sequence((1,) * 9)
    assert admit(kv, first, num_tokens=9)
    compute(kv, first)
    kv.release(first)
    running = make_sequence((2,) * 15)
    assert admit(kv, running, num_tokens=15)
    waiting = make_sequence((1,) * 10)
    assert not admit(kv, waiting, num_tokens=10)
    num_lookups = cache.num_lookups
    assert num_lookups > 0
    for _ in range(5):
        assert not admit(kv, waiting, num_tokens=10)
    assert cache.num_lookups == num_lookups
    kv.release(running)
    assert admit(kv, waiting, num_tokens=10)


def test_a_waiting_sequence_finds_blocks_under_renewed_keys() -> None:
    kv, _ = make_manager()
    bad, longer = make_sequence((1, 1, 2, 2, 3, 3, 4)), make_sequence((1, 1, 2, 2, 3, 3, 5, 5, 6))
    for sequence in (bad, longer):
        assert admit(kv, sequence, num_tokens=len(sequence.token_ids))
        compute(kv, sequence)
    waiting = make_sequence((1, 1, 2, 2, 3, 3, 5, 5, 7))
    kv.release(longer)
    kv.release(bad)
    assert not admit(kv, waiting, num_tokens=9, num_spare=9)
    # Three blocks are forgotten; of the fourth, which is not, only the key is renewed.
    kv.forget_blocks(bad)
    again = make_sequence((1, 1, 2, 2, 3, 3, 5, 5, 6))
    assert admit(kv, again, num_tokens=9)
    compute(kv, again)
    assert admit(kv, waiting, num_tokens=9, num_spare=6)
