"""Looks up the leading blocks of sequences, in the device pool, in the CPU pool and on the disk.

It computes the keys of sequences as far as look-ups need them, and changes nothing else.
"""

from typing import TYPE_CHECKING

from cluster.scheduling.blocks.cpu_prefix_cache import CpuPrefixCache
from cluster.scheduling.blocks.disk_prefix_cache import DiskPrefixCache
from cluster.scheduling.blocks.prefix_cache import BlockKey, PrefixCache, PromptKeys
from cluster.scheduling.sequence import Sequence
from pagedray.request import Request

if TYPE_CHECKING:
    from array import array

__all__ = ["PrefixFinder"]

_MIN_HASHED_AHEAD = 1024
"""Prompt tokens from which on keys are computed before a request is queued, so that no step waits
for it; kept, they take up more memory than the tokens."""


class PrefixFinder:
    """Finds what is cached of a sequence."""

    __slots__ = ("_block_size", "_cache", "_cpu_cache")

    def __init__(
        self, cache: PrefixCache, cpu_cache: CpuPrefixCache | None, *, block_size: int
    ) -> None:
        self._cache = cache
        self._cpu_cache = cpu_cache
        self._block_size = block_size

    def hash_prompt(self, request: Request, prompt: "array[int]") -> PromptKeys | None:
        """Return the keys of a long prompt, which take milliseconds; None if it is short.

        May be called from any thread.
        """
        if not self._cache.is_enabled or len(prompt) < _MIN_HASHED_AHEAD:
            return None
        return self._cache.hash_prompt(
            prompt, block_size=self._block_size, tenant=request.tenant, salt=request.cache_salt
        )

    def find_blocks(self, sequence: Sequence) -> list[int]:
        """Return the longest prefix of a sequence that is cached on the device, in blocks."""
        blocks = sequence.blocks
        if blocks.keys_revision != self._cache.revision:
            blocks.keys = []
            blocks.keys_revision = self._cache.revision
        return self._cache.find_prefix(
            blocks.keys,
            b"" if blocks.keys else self.parent(sequence, 0),
            sequence.token_ids,
            num_blocks=self.num_shareable(sequence),
            block_size=self._block_size,
        )

    def find_cpu_blocks(self, sequence: Sequence, first: int) -> list[int]:
        """Return the blocks from index `first` on that are better copied back than computed.

        `find_blocks` has found those before them.
        """
        cpu_cache = self._cpu_cache
        if cpu_cache is None:
            return []
        found: list[int] = []
        num_shareable = self.num_shareable(sequence)
        for index in range(first, num_shareable):
            key = self.key_at(sequence, index)
            block = cpu_cache.find_block(key)
            # Those behind a missing one may be on the device, where none is twice.
            if block is None or self._cache.find_block(key) is not None:
                break
            found.append(block)
        end = first + len(found)
        while end < num_shareable:
            if not cpu_cache.worth.note_lookup(self.key_at(sequence, end).digest):
                break
            end += 1
        return found if found and cpu_cache.worth.is_restored(len(found), first=first) else []

    def find_disk_keys(
        self, sequence: Sequence, disk_cache: DiskPrefixCache
    ) -> tuple[list[BlockKey], int]:
        """Return the keys of blocks that are better read from the disk than computed.

        Also returns the last step that reads others that the sequence needs, or -1.
        """
        cpu_cache = self._cpu_cache
        assert cpu_cache is not None
        keys: list[BlockKey] = []
        first_read, num_kept, last_step = 0, 0, -1
        for index in range(len(self.find_blocks(sequence)), self.num_shareable(sequence)):
            key = self.key_at(sequence, index)
            if self._cache.find_block(key) is not None:
                break
            step = disk_cache.step_of_read(key)
            if step is not None:
                last_step = max(last_step, step)
            elif cpu_cache.find_block(key) is not None:
                # Those that are read must not take its place.
                cpu_cache.touch_key(key)
                num_kept += 1
            elif disk_cache.find_block(key) is not None and not cpu_cache.has_key(key):
                first_read = first_read if keys else index
                keys.append(key)
            else:
                break
        del keys[disk_cache.num_readable(num_kept) :]
        is_worth = keys and cpu_cache.worth.is_read(
            len(keys), num_reading=disk_cache.num_reading, first=first_read
        )
        return (keys if is_worth else []), last_step

    def num_shareable(self, sequence: Sequence) -> int:
        """Return the blocks of known tokens that may be shared: one token is left to compute.

        None may be shared by a sequence whose prompt's log-probabilities are to be computed.
        """
        if not self._cache.is_enabled:
            return 0
        if sequence.index == 0 and sequence.active.prompt_logprobs is not None:
            return 0
        return (len(sequence.token_ids) - 1) // self._block_size

    def key_at(self, sequence: Sequence, index: int) -> BlockKey:
        """Return the key of block `index`, whose predecessors have theirs."""
        keys = sequence.blocks.keys
        if index < len(keys):
            return keys[index]
        assert index == len(keys)
        parent = keys[-1].digest if keys else self.parent(sequence, 0)
        first = index * self._block_size
        tokens = sequence.token_ids[first : first + self._block_size]
        key = self._cache.key_after(parent, tokens)
        keys.append(key)
        return key

    def parent(self, sequence: Sequence, index: int) -> bytes:
        """Return the digest before that of block `index`."""
        if index:
            return sequence.blocks.keys[index - 1].digest
        request = sequence.active.request
        return self._cache.root(request.tenant, request.cache_salt)
