"""Drafters: guesses of the next tokens of sequences."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

from pagedray.batch import TOKEN_ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.sequence import Sequence

__all__ = ["Drafter", "HeadDrafter", "NgramDrafter", "PredictionDrafter", "find_last"]

_LONGEST_ANCHOR = 4
"""Generated tokens that are looked for in a prediction; the next is their minimum."""
_SHORTEST_ANCHOR = 2
_MAX_PLACES = 64
"""Maximum number of places that a search looks at. A client can choose tokens of which the bytes
match at very many places that are not the beginning of a token."""


class Drafter(Protocol):
    """Guesses the next tokens of sequences."""

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        """Return guesses of the tokens that follow the known tokens, at most `limit`."""


class NgramDrafter:
    """Guesses the tokens that followed the last n-gram where it occurred before."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        """N-grams have `shortest` to `longest` tokens; longer n-grams are preferred."""
        self._sizes = range(shortest, longest + 1)

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        token_ids = sequence.token_ids
        packed = token_ids.tobytes()
        found, end = 0, len(packed) - TOKEN_ID_BYTES
        for size in self._sizes:
            if size >= len(token_ids):
                break
            # A longer n-gram ends only where the shorter ends too, so all searches together pass
            # over the tokens once.
            first = find_last(packed, packed[-size * TOKEN_ID_BYTES :], end)
            if first < 0:
                break
            found = first + size
            end = found * TOKEN_ID_BYTES
        return _continued(token_ids, found, limit) if found else ()


class HeadDrafter:
    """Returns the guesses of the draft head on the ranks, which came with the last tokens."""

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        drafts = sequence.drafts
        if drafts is None or drafts.num_known != len(sequence.token_ids):
            return ()
        return drafts.head_ids[:limit]


class PredictionDrafter:
    """Guesses the tokens of the prediction of a request."""

    def __init__(self, others: Drafter) -> None:
        """`others` guesses the tokens of sequences without a prediction."""
        self._others = others

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        prediction, drafts = sequence.active.request.prediction, sequence.drafts
        if not prediction or drafts is None:
            return self._others.propose(sequence, limit)
        first = sequence.num_prompt_tokens
        added = sequence.token_ids[first + drafts.num_followed :].tobytes()
        begin = drafts.place * TOKEN_ID_BYTES
        if not prediction.startswith(added, begin):
            found = self._find_again(sequence, prediction, begin)
            if found is None:
                return self._others.propose(sequence, limit)
            drafts.place = found
        else:
            drafts.place += len(added) // TOKEN_ID_BYTES
        drafts.num_followed = len(sequence.token_ids) - first
        begin = drafts.place * TOKEN_ID_BYTES
        return array("I", prediction[begin : begin + limit * TOKEN_ID_BYTES])

    @staticmethod
    def _find_again(sequence: Sequence, prediction: bytes, begin: int) -> int | None:
        """Return the place behind the last generated tokens, first behind the place so far."""
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        for size in range(min(_LONGEST_ANCHOR, len(output)), _SHORTEST_ANCHOR - 1, -1):
            pattern = output[-size:].tobytes()
            for start in (begin, 0):
                place = _find_first(prediction, pattern, start)
                if place >= 0:
                    return place + size
        return None


def _find_first(packed: bytes, pattern: bytes, start: int) -> int:
    """Return the token at which a pattern occurs first from a byte on in packed tokens, or -1."""
    for _ in range(_MAX_PLACES):
        place = packed.find(pattern, start)
        if place < 0 or place % TOKEN_ID_BYTES == 0:
            return place // TOKEN_ID_BYTES
        start = place + 1
    return -1


def find_last(packed: bytes, pattern: bytes, end: int) -> int:
    """Return the token at which a pattern occurs last before a byte of packed tokens, or -1."""
    for _ in range(_MAX_PLACES):
        place = packed.rfind(pattern, 0, end)
        if place < 0 or place % TOKEN_ID_BYTES == 0:
            return place // TOKEN_ID_BYTES
        end = place + len(pattern) - 1
    return -1


def _continued(token_ids: AnySequence[int], first: int, limit: int) -> AnySequence[int]:
    """Return `limit` tokens from `first` on; behind the last token, they are repeated."""
    tokens = list(token_ids[first : first + limit])
    period = len(tokens)
    while len(tokens) < limit:
        tokens.append(tokens[-period])
    return tokens
