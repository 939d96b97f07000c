"""The device pool and its prefix cache: common prefixes of sequences are computed once.

The key of a full block is a digest over its tokens and the digest of the block before it,
hence over all tokens up to its end. The chain starts with the tenant and the client's salt,
under a key that only this process knows: clients can neither craft a collision nor reach
another tenant's blocks.

A block is verified once logits that depend on it were finite. If they are not, the tokens of the
first block that is not verified get another key, and so does every continuation of them:
no new sequence finds what others computed on top of its values.
"""

from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from cluster.scheduling.block_pool import BlockPool
from pagedray.batch import BlockCopy

if TYPE_CHECKING:
    from array import array

__all__ = ["BlockKey", "DeviceTier", "PromptKeys", "group_key", "state_key"]

_MAX_INVALIDATED = 4096
_DIGEST_BYTES = 32
_MANY_BLOCKS = 64


# Each block has a key, which is never part of a reference cycle and need not be tracked.
class BlockKey(msgspec.Struct, frozen=True, gc=False):
    """The content of a full block."""

    digest: bytes
    """Digest over the tenant and all tokens up to the block's end."""
    token_bytes: bytes
    """The block's tokens as uint32, compared on a hit."""


def group_key(key: BlockKey, group: int) -> BlockKey:
    """Return the key of a block with the same tokens in another group than the first."""
    return BlockKey(key.digest + bytes((group,)), key.token_bytes) if group else key


def state_key(key: BlockKey, part: int) -> BlockKey:
    """Return the key of a part of the recurrent state after the tokens of a block.

    Its length differs from the lengths of keys of groups.
    """
    return BlockKey(key.digest + part.to_bytes(2), key.token_bytes)


class PromptKeys(NamedTuple):
    """The keys of a prompt's full blocks."""

    keys: list[BlockKey]
    revision: int
    """The prefix cache's when the first was hashed; they are valid as long as it is the same."""


class DeviceTier:
    """Maps the contents of full blocks to blocks of the device pool."""

    __slots__ = (
        "_block_of",
        "_invalidated",
        "_is_verified",
        "_keyed_hash",
        "_keys",
        "_loads",
        "_save",
        "arriving",
        "is_enabled",
        "num_forgotten",
        "pool",
        "revision",
    )

    def __init__(
        self,
        hash_key: bytes,
        *,
        num_blocks: int,
        is_enabled: bool,
        save: Callable[[BlockKey, int], None],
    ) -> None:
        """`save` gets the verified blocks that are evicted, with their keys."""
        self.pool = BlockPool(num_blocks, on_evict=self._evict)
        self._save = save
        self._loads: list[BlockCopy] = []
        """The copies from the CPU pool in the plan that is being made."""
        self.arriving: set[int] = set()
        """Blocks that copies from the CPU pool have not filled yet."""
        self.is_enabled = is_enabled
        """Whether blocks are looked up and added; if not, it stays empty."""
        # BLAKE2 needs no HMAC. A copy of this costs less than a hash that begins with the key.
        self._keyed_hash = blake2b(hash_key, digest_size=_DIGEST_BYTES)
        self._block_of: dict[bytes, int] = {}
        # By block: the blocks of a sequence are far apart in a hash table, and often looked up.
        # Its last item belongs to `NO_BLOCK`.
        self._keys: list[BlockKey | None] = [None] * (num_blocks + 1)
        self._is_verified = bytearray(num_blocks) + b"\1"
        self._invalidated: dict[bytes, bytes] = {}
        """New digests in place of invalidated digests."""
        self.num_forgotten = 0
        """Blocks that were removed so far."""
        self.revision = 0
        """Changes when keys are renewed; a lookup needs keys of the current revision."""

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def num_loads(self) -> int:
        """Blocks that the plan being made copies from the CPU pool."""
        return len(self._loads)

    def root(self, tenant: str, salt: str = "") -> bytes:
        """Return the digest before the first block of a tenant's requests with the same salt."""
        digest = self._digest(tenant.encode("utf-8", "surrogatepass"))
        # A salt itself might be the tokens of a first block.
        return self._digest(digest + self._digest(salt.encode())) if salt else digest

    def key_after(self, parent: bytes, token_ids: "array[int]") -> BlockKey:
        """Return the key of a full block that follows the block with digest `parent`.

        `token_ids` are uint32.
        """
        token_bytes = token_ids.tobytes()
        # As `_digest`, without a call for each block.
        keyed_hash = self._keyed_hash.copy()
        keyed_hash.update(parent + token_bytes)
        digest = keyed_hash.digest()
        if self._invalidated:
            digest = self._invalidated.get(digest, digest)
        return BlockKey(digest, token_bytes)

    def hash_prompt(
        self, token_ids: "array[int]", *, block_size: int, tenant: str, salt: str
    ) -> PromptKeys:
        """Return the keys of a prompt's full blocks. May be called from any thread."""
        revision, parent = self.revision, self.root(tenant, salt)
        keys: list[BlockKey] = []
        for first in range(0, len(token_ids) - block_size + 1, block_size):
            keys.append(self.key_after(parent, token_ids[first : first + block_size]))
            parent = keys[-1].digest
        return PromptKeys(keys, revision)

    def invalidate_key(self, parent: bytes, key: BlockKey) -> None:
        """Give the tokens of a key that follows `parent`, and all that follow them, other keys.

        Blocks that have the old keys are not found by them, and are evicted in time.
        """
        if len(self._invalidated) >= _MAX_INVALIDATED:
            # This renews every key.
            self._keyed_hash = blake2b(self._digest(b""), digest_size=_DIGEST_BYTES)
            self._invalidated.clear()
        else:
            self._invalidated[self._digest(parent + key.token_bytes)] = self._digest(key.digest)
        # Last: keys that another thread hashes meanwhile are of the revision before.
        self.revision += 1

    def find_block(self, key: BlockKey) -> int | None:
        """Return the block with this key, or None."""
        block = self._block_of.get(key.digest)
        if block is None:
            return None
        found = self._keys[block]
        assert found is not None
        return block if found.token_bytes == key.token_bytes else None

    def find_prefix(
        self,
        keys: list[BlockKey],
        root: bytes,
        token_ids: "array[int]",
        *,
        num_blocks: int,
        block_size: int,
    ) -> list[int]:
        """Return the blocks of the longest prefix that is in the cache, at most `num_blocks`.

        `token_ids` are uint32 and fill `num_blocks`. `keys` belong to the first blocks, and grow as
        blocks are looked up; `root` is the digest before them, used if there are none. A single
        loop does all of it, since a prompt has hundreds of blocks and the step waits.
        """
        block_of, cached_keys, renewed = self._block_of, self._keys, self._invalidated
        num_keys = len(keys)
        block_bytes = block_size * token_ids.itemsize
        token_bytes = token_ids.tobytes() if num_keys < num_blocks else b""
        parent = keys[-1].digest if keys else root
        hits: list[int] = []
        for index in range(num_blocks):
            if index < num_keys:
                key = keys[index]
            else:
                first = index * block_bytes
                content = token_bytes[first : first + block_bytes]
                keyed_hash = self._keyed_hash.copy()
                keyed_hash.update(parent + content)
                parent = keyed_hash.digest()
                if renewed:
                    parent = renewed.get(parent, parent)
                key = BlockKey(parent, content)
                keys.append(key)
            block = block_of.get(key.digest)
            if block is None:
                break
            found = cached_keys[block]
            assert found is not None
            if found.token_bytes != key.token_bytes:
                break
            hits.append(block)
        return hits

    def add_block(self, key: BlockKey, block: int) -> bool:
        """Add an owned block; return False if another block has the same key."""
        if key.digest in self._block_of:
            # A sequence has computed its tokens again, and its next turn needs it.
            self.pool.touch(self._block_of[key.digest])
            return False
        assert self._keys[block] is None
        self._block_of[key.digest] = block
        self._keys[block] = key
        self.pool.keep(block)
        return True

    def load_blocks(self, keys: Sequence[BlockKey], sources: Sequence[int]) -> list[int]:
        """Copy the first `keys` from pinned blocks of the CPU pool; return the device blocks.

        The device pool has room for them. They are pinned until `end_copies`.
        """
        targets = self.pool.allocate_all(len(sources))
        for key, source, target in zip(keys, sources, targets, strict=False):
            self.add_block(key, target)
            self.pool.pin(target)
            self._loads.append(BlockCopy(source, target))
        self.mark_verified(targets)
        self.arriving.update(targets)
        return targets

    def take_loads(self) -> list[BlockCopy]:
        """Return the copies from the CPU pool for the plan that is being made."""
        loads, self._loads = self._loads, []
        return loads

    def end_copies(self, blocks: Sequence[int]) -> None:
        """Unpin blocks that every rank has copied from or to the CPU pool."""
        for block in reversed(blocks):
            self.pool.unpin(block)
        self.arriving.difference_update(blocks)

    def mark_verified(self, blocks: Collection[int]) -> None:
        """Record that logits which depend on blocks were finite; ignore uncached blocks."""
        keys, is_verified = self._keys, self._is_verified
        if len(blocks) > _MANY_BLOCKS:
            # The first sibling verifies the blocks that siblings share.
            ids = np.asarray(blocks, np.int32)
            blocks = ids[np.frombuffer(is_verified, np.uint8)[ids] == 0].tolist()
        for block in blocks:
            if keys[block] is not None:
                is_verified[block] = True

    def unverified_key(self, block: int) -> BlockKey | None:
        """Return the key of a block, or None if it is verified or not in the cache."""
        return None if self._is_verified[block] else self._keys[block]

    def mark_released(self, released: Sequence[tuple[int, BlockKey]]) -> None:
        """Do the same as `mark_verified` for released blocks that still have their keys."""
        for block, key in released:
            if self._keys[block] is key:
                self._is_verified[block] = True

    def release_unlikely(self, block: int) -> None:
        """Release a block that few look-ups need: once idle, it is evicted first, and not saved."""
        self.pool.release(block)
        if block in self.pool.idle_blocks:
            self.pool.age(block)
            self._is_verified[block] = False

    def is_verified(self, block: int) -> bool:
        """Return whether logits that depend on a block were finite."""
        return bool(self._is_verified[block])

    def num_verified(self, blocks: Sequence[int]) -> int:
        """Return how many leading `blocks` are verified, or places without a block."""
        is_verified = self._is_verified
        for index, block in enumerate(blocks):
            if not is_verified[block]:
                return index
        return len(blocks)

    def forget_block(self, block: int) -> None:
        """Remove a block, if it is in the cache."""
        key, self._keys[block] = self._keys[block], None
        if key is not None:
            del self._block_of[key.digest]
            self.num_forgotten += 1
            self._is_verified[block] = False
        self.pool.discard(block)

    def clear(self) -> None:
        """Free all blocks; their contents are lost."""
        num_blocks = self.pool.num_blocks
        self._block_of.clear()
        self._keys = [None] * (num_blocks + 1)
        self._is_verified = bytearray(num_blocks) + b"\1"
        self.pool.clear()
        self._loads.clear()
        self.arriving.clear()

    def _evict(self, block: int) -> None:
        """Forget a block, and save it if it is verified."""
        key = self._keys[block]
        if key is not None and self._is_verified[block]:
            self._save(key, block)
        self.forget_block(block)

    def _digest(self, content: bytes) -> bytes:
        """Return the digest of a content under the key of this process."""
        keyed_hash = self._keyed_hash.copy()
        keyed_hash.update(content)
        return keyed_hash.digest()
