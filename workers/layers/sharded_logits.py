"""The logits of some tokens; each rank holds its part of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from workers.parallel.group import ParallelGroup

__all__ = ["ShardedLogits"]


class ShardedLogits:
    """One rank's part of the logits. All ranks gather the same, in the same order."""

    def __init__(
        self, padded: torch.Tensor, *, first_id: int, vocab_size: int, group: ParallelGroup
    ) -> None:
        """`padded` is `[num_tokens, num_ids]`; its ids begin at `first_id`, padding included."""
        self._padded = padded
        self._vocab_size = vocab_size
        self._group = group
        self.first_id = first_id

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold a part too."""
        return self._group.size > 1

    @property
    def part(self) -> torch.Tensor:
        """Return this rank's logits, `[num_tokens, num_ids]`, without padding."""
        num_ids = max(0, min(self._padded.shape[1], self._vocab_size - self.first_id))
        return self._padded.narrow(1, 0, num_ids)

    def cut(self, vocab_size: int) -> ShardedLogits:
        """Return the logits of the first tokens, at most `vocab_size`."""
        return ShardedLogits(
            self._padded,
            first_id=self.first_id,
            vocab_size=min(vocab_size, self._vocab_size),
            group=self._group,
        )

    def whole(self) -> torch.Tensor:
        """Return the logits of all ranks, `[num_tokens, vocab_size]`, equal on all of them."""
        return self._group.all_gather_last(self._padded).narrow(1, 0, self._vocab_size)

    def gather(self, found: torch.Tensor) -> torch.Tensor:
        """Return the findings of each rank in its part, `[num_tokens]`, as `[num_tokens, size]`."""
        return self._group.all_gather_last(found.unsqueeze(1))
