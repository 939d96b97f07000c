"""The request and tokens of a call, held in a proxy so that another replica can continue."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from cluster.serving.continuation import SequenceProgress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["HeldBytes", "HeldCall"]

_MAX_HELD_BYTES = 256 * 2**20


class HeldBytes:
    """The bytes that all calls of a proxy hold to continue elsewhere."""

    def __init__(self) -> None:
        self.number = 0

    def take(self, number: int) -> bool:
        """Count more bytes, if there is room."""
        if self.number + number > _MAX_HELD_BYTES:
            return False
        self.number += number
        return True


class _Tokens:
    """The tokens of one sequence."""

    __slots__ = ("is_finished", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.is_finished = False


class HeldCall:
    """The bytes and tokens of one call, as long as there is room for all of them."""

    def __init__(self, held: HeldBytes) -> None:
        """`held` counts the bytes of all calls."""
        self._held = held
        self._num_bytes = 0
        self._sequences: dict[int, _Tokens] = {}
        self.is_complete = True
        """Whether all that another replica needs is held."""

    def hold(self, num_bytes: int) -> None:
        """Count bytes of the request until `release`."""
        if self.is_complete and self._held.take(num_bytes):
            self._num_bytes += num_bytes
        else:
            self.is_complete = False

    def add_tokens(self, sequences: Iterable[tuple[int, Sequence[int], bool]]) -> None:
        """Add tokens, as the fields of a SequenceProgress for each sequence."""
        if not self.is_complete:
            return
        num_tokens = 0
        for number, token_ids, is_finished in sequences:
            tokens = self._sequences.get(number)
            if tokens is None:
                tokens = self._sequences[number] = _Tokens()
            tokens.token_ids.extend(token_ids)
            tokens.is_finished = tokens.is_finished or is_finished
            num_tokens += len(token_ids)
        self.hold(4 * num_tokens)

    def sequence(self, number: int) -> SequenceProgress:
        """Return the tokens of one sequence."""
        tokens = self._sequences.get(number)
        if tokens is None:
            return SequenceProgress(number, (), False)
        return SequenceProgress(number, tuple(tokens.token_ids), tokens.is_finished)

    def forgo(self) -> None:
        """Hold no more than so far, since the call will not continue."""
        self.is_complete = False

    def release(self) -> None:
        """Release everything."""
        self._held.number -= self._num_bytes
        self._num_bytes = 0
        self.is_complete = False
        self._sequences.clear()
