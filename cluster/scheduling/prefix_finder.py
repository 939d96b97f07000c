"""Looks up the leading blocks of sequences, in the device pool and in the CPU pool.

It computes the keys of sequences as far as look-ups need them, and changes nothing else.
"""

from typing import TYPE_CHECKING

from cluster.scheduling.blocks.cpu_prefix_cache import CpuPrefixCache
from cluster.scheduling.blocks.prefix_cache import PrefixCache, PromptKeys
from cluster.scheduling.sequence import Sequence
from pagedray.request import Request

if TYPE_CHECKING:
    from array import array

__all__ = ["PrefixFinder"]

_MIN_HASHED_AHEAD = 4096
"""Prompt tokens from which on keys are computed before a request is queued; kept, they take up
more memory than the tokens."""


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
        if len(prompt) < _MIN_HASHED_AHEAD:
            return None
        return self._cache.hash_prompt(
            prompt, block_size=self._block_size, tenant=request.tenant, salt=request.cache_salt
        )

    def find_blocks(self, sequence: Sequence) -> list[int]:
        """Return the longest prefix of a sequence that is cached on the device, in blocks."""
        hits: list[int] = []
        if sequence.keys_revision != self._cache.revision:
            sequence.keys = []
            sequence.keys_revision = self._cache.revision
        for index in range(self.num_shareable(sequence)):
            self.hash_up_to(sequence, index)
            block = self._cache.find_block(sequence.keys[index])
            if block is None:
                break
            hits.append(block)
        return hits

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
            self.hash_up_to(sequence, index)
            block = cpu_cache.find_block(sequence.keys[index])
            if block is None:
                break
            found.append(block)
        end = first + len(found)
        while end < num_shareable:
            self.hash_up_to(sequence, end)
            if not cpu_cache.worth.note_lookup(sequence.keys[end].digest):
                break
            end += 1
        return found if found and cpu_cache.worth.is_restored(len(found), first=first) else []

    def num_shareable(self, sequence: Sequence) -> int:
        """Return the blocks of known tokens that may be shared: one token is left to compute.

        None may be shared by a sequence whose prompt's log-probabilities are to be computed.
        """
        if sequence.index == 0 and sequence.active.prompt_logprobs is not None:
            return 0
        return (len(sequence.token_ids) - 1) // self._block_size

    def hash_up_to(self, sequence: Sequence, index: int) -> None:
        """Compute the key of block `index`, whose predecessors have theirs."""
        keys = sequence.keys
        if index < len(keys):
            return
        assert index == len(keys)
        parent = self.parent(sequence, index)
        first = index * self._block_size
        tokens = sequence.token_ids[first : first + self._block_size]
        keys.append(self._cache.key_after(parent, tokens))

    def parent(self, sequence: Sequence, index: int) -> bytes:
        """Return the digest before that of block `index`."""
        if index:
            return sequence.keys[index - 1].digest
        request = sequence.active.request
        return self._cache.root(request.tenant, request.cache_salt)

    def num_proven(self, blocks: list[int]) -> int:
        """Return how many leading ones of cached blocks are proven."""
        for number, block in enumerate(blocks):
            if not self._cache.is_proven(block):
                return number
        return len(blocks)
