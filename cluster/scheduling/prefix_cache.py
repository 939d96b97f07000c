"""Which block holds which run of tokens, so that equal beginnings are computed once.

A full block is known by a digest over its tokens and the digest of the block before it,
hence over everything before it. The chain begins with the tenant, under a key that
only this process knows: nobody can craft a collision or reach another tenant's blocks.

The cache knows digests and block numbers; whether a block is owned is the pool's matter.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

__all__ = ["BlockKey", "PrefixCache"]

_INT32 = "i"
assert array(_INT32).itemsize == 4


class BlockKey(NamedTuple):
    """What a full block holds."""

    digest: bytes
    """Stands for the tenant, all tokens before the block, and its own."""
    token_bytes: bytes
    """Its own tokens as int32, compared on a hit."""


class PrefixCache:
    """Maps what a full block holds to the block, one to one."""

    __slots__ = ("_block_of", "_hash_key", "_key_of")

    def __init__(self, hash_key: bytes) -> None:
        self._hash_key = hash_key
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def root(self, tenant: str) -> bytes:
        """Return the digest that stands before a tenant's first block."""
        return sha256(self._hash_key + tenant.encode("utf-8", "surrogatepass")).digest()

    def key_after(self, parent: bytes, token_ids: Sequence[int]) -> BlockKey:
        """Return the key of a full block of tokens that follows the block of digest `parent`."""
        token_bytes = array(_INT32, token_ids).tobytes()
        return BlockKey(sha256(self._hash_key + parent + token_bytes).digest(), token_bytes)

    def find_block(self, key: BlockKey) -> int | None:
        """Return the block that holds what `key` says, or None."""
        block = self._block_of.get(key.digest)
        if block is None or self._key_of[block].token_bytes != key.token_bytes:
            return None
        return block

    def add_block(self, key: BlockKey, block: int) -> bool:
        """Remember what a block holds, and return False if another block is known for it."""
        if key.digest in self._block_of:
            return False
        assert block not in self._key_of
        self._block_of[key.digest] = block
        self._key_of[block] = key
        return True

    def forget_block(self, block: int) -> None:
        """Forget a block, if it is known."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key.digest]

    def clear(self) -> None:
        """Forget every block."""
        self._block_of.clear()
        self._key_of.clear()
