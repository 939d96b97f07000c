"""The longest cached prefix, beside a look-up of one block after the other."""

from array import array

import hypothesis.strategies as st
from hypothesis import given

from cluster.scheduling.prefix_cache import BlockKey, PrefixCache

BLOCK_SIZE = 2
ROOT = b"root"


def found_one_by_one(
    cache: PrefixCache, token_ids: "array[int]", num_blocks: int
) -> tuple[list[BlockKey], list[int]]:
    """Return the keys that are looked up, and the blocks that are found."""
    keys: list[BlockKey] = []
    hits: list[int] = []
    parent = ROOT
    for first in range(0, num_blocks * BLOCK_SIZE, BLOCK_SIZE):
        keys.append(cache.key_after(parent, token_ids[first : first + BLOCK_SIZE]))
        block = cache.find_block(keys[-1])
        if block is None:
            break
        parent = keys[-1].digest
        hits.append(block)
    return keys, hits


@given(
    st.lists(st.integers(0, 1), min_size=2, max_size=13),
    st.lists(st.integers(0, 1), max_size=13),
    st.integers(0, 6),
    st.none() | st.integers(0, 5),
    st.none() | st.integers(0, 5),
)
def test_prefix_is_what_single_look_ups_find(
    cached: list[int],
    wanted: list[int],
    num_known: int,
    renewed: int | None,
    forged: int | None,
) -> None:
    cache = PrefixCache(b"key", num_blocks=16, is_enabled=True)
    parent = ROOT
    for block in range(len(cached) // BLOCK_SIZE):
        tokens = array("I", cached[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE])
        key = cache.key_after(parent, tokens)
        if block == renewed:
            cache.invalidate_key(parent, key)
            key = cache.key_after(parent, tokens)
        # Other tokens with the same digest.
        content = b"other" if block == forged else key.token_bytes
        assert cache.add_block(BlockKey(key.digest, content), block)
        parent = key.digest
    token_ids = array("I", wanted)
    num_blocks = len(token_ids) // BLOCK_SIZE
    keys, hits = found_one_by_one(cache, token_ids, num_blocks)
    known = keys[:num_known]
    assert hits == cache.find_prefix(
        known, ROOT, token_ids, num_blocks=num_blocks, block_size=BLOCK_SIZE
    )
    assert known == keys
