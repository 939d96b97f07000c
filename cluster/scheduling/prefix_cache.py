"""Maps the tokens of full blocks to blocks, so that common prefixes are computed once.

The key of a full block is a digest over its tokens and the digest of the block before it,
hence over all tokens up to its end. The chain starts with the tenant, under a key that only
this process knows: clients can neither craft a collision nor reach another tenant's blocks.

Ownership of blocks is the pool's concern.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

__all__ = ["BlockKey", "PrefixCache"]

_INT32 = "i"
assert array(_INT32).itemsize == 4


class BlockKey(NamedTuple):
    """The content of a full block."""

    digest: bytes
    """Digest over the tenant and all tokens up to the block's end."""
    token_bytes: bytes
    """The block's tokens as int32, compared on a hit."""


class PrefixCache:
    """Maps the content of full blocks to blocks, one to one."""

    __slots__ = ("_block_of", "_hash_key", "_key_of")

    def __init__(self, hash_key: bytes) -> None:
        self._hash_key = hash_key
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def root(self, tenant: str) -> bytes:
        """Return the digest before a tenant's first block."""
        return sha256(self._hash_key + tenant.encode("utf-8", "surrogatepass")).digest()

    def key_after(self, parent: bytes, token_ids: Sequence[int]) -> BlockKey:
        """Return the key of a full block that follows the block with digest `parent`."""
        token_bytes = array(_INT32, token_ids).tobytes()
        return BlockKey(sha256(self._hash_key + parent + token_bytes).digest(), token_bytes)

    def find_block(self, key: BlockKey) -> int | None:
        """Return the block with this key, or None."""
        block = self._block_of.get(key.digest)
        if block is None or self._key_of[block].token_bytes != key.token_bytes:
            return None
        return block

    def add_block(self, key: BlockKey, block: int) -> bool:
        """Add a block; return False if another block has the same key."""
        if key.digest in self._block_of:
            return False
        assert block not in self._key_of
        self._block_of[key.digest] = block
        self._key_of[block] = key
        return True

    def forget_block(self, block: int) -> None:
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key.digest]

    def clear(self) -> None:
        self._block_of.clear()
        self._key_of.clear()
