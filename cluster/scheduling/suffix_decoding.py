"""Suffix decoding: guesses of the tokens that followed the longest suffix of a sequence before.

The suffix is looked for in the sequence itself, and in past answers to requests of its tenant with
the same salt. If it occurred several times, the most frequent tokens are guessed. Longer suffixes
allow more guesses.
"""

from __future__ import annotations

from array import array
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from cluster.scheduling.drafters import find_last
from pagedray.batch import TOKEN_ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.sequence import Sequence
    from pagedray.config import SpeculationConfig

__all__ = ["PastAnswers", "SuffixDrafter"]

_OWN_SIZES = 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64
"""Lengths of suffixes that are looked for in the sequence itself."""
_GRAM = 3
"""Tokens by which past answers are indexed; shorter suffixes are not found there."""
_MAX_PLACES = 8
"""Maximum number of places with equal tokens that are compared, the last first."""
_MAX_BYTES = 64 * 2**20
"""Maximum size of all past answers with their index."""
_FIRST_TABLE_SIZE = 2**10
_TABLE_GROWTH = 4
"""The size of each table of an index over that of the table before."""
_END = b"\xff" * TOKEN_ID_BYTES
"""Follows each past answer; no token has this id."""


class _Matches(NamedTuple):
    """The places of the longest suffix that was found."""

    num_tokens: int
    ends: list[int]
    """The bytes behind the suffix in packed tokens, the last place first."""


class _Answers:
    """Past answers that may draft for each other, with an index of their grams.

    Tokens are numbered in the order in which they were added. A gram is found by its hash, and its
    places form a chain.
    """

    __slots__ = ("_begin", "_earlier", "_first", "_packed", "_tables")

    def __init__(self) -> None:
        self._packed = bytearray()
        """The tokens of the answers, with an end behind each."""
        self._first = 0
        """The number of the first of these tokens."""
        self._begin = 0
        """The number of the first token of the first answer that is not dropped."""
        self._earlier = array("q")
        """For each token, the number of an earlier token behind a gram of the same hash, or -1."""
        self._tables = [_new_table(_FIRST_TABLE_SIZE)]
        """By hash, the number of the last token behind a gram, or -1. The last table has the grams
        since the table before was full, and is larger."""

    @property
    def is_empty(self) -> bool:
        """Whether all answers are dropped."""
        return self._begin == self._first + len(self._earlier)

    @property
    def num_bytes(self) -> int:
        """The size of the answers and of their index."""
        num_numbers = len(self._earlier) + sum(map(len, self._tables))
        return len(self._packed) + num_numbers * self._earlier.itemsize

    def add(self, token_ids: array[int]) -> None:
        """Add an answer, with tokens of its prompt before it."""
        earlier = self._earlier
        first = self._first + len(earlier) + _GRAM
        self._packed += token_ids.tobytes() + _END
        earlier.extend([-1] * min(_GRAM, len(token_ids) + 1))
        if len(earlier) > 2 * len(self._tables[-1]):
            self._tables.append(_new_table(len(self._tables[-1]) * _TABLE_GROWTH))
        table = self._tables[-1]
        mask = len(table) - 1
        grams = zip(*(islice(token_ids, place, None) for place in range(_GRAM)), strict=False)
        for number, digest in enumerate(map(hash, grams), first):
            last = table[digest & mask]
            earlier.append(self._last_number(digest) if last < 0 else last)
            table[digest & mask] = number

    def drop(self, num_tokens: int) -> None:
        """Forget the first answer, which has so many tokens with its end."""
        self._begin += num_tokens
        num_dropped = self._begin - self._first
        # Removing tokens at the beginning moves all others.
        if 4 * num_dropped > len(self._earlier):
            del self._packed[: num_dropped * TOKEN_ID_BYTES]
            del self._earlier[:num_dropped]
            self._first = self._begin

    def find(self, suffix: bytes, gram: tuple[int, ...]) -> _Matches:
        """Return the places of the longest part of a suffix that ends with `gram`, its end."""
        num_best, ends = _GRAM, list[int]()
        wanted = int.from_bytes(suffix, "big")
        number = self._last_number(hash(gram))
        for _ in range(_MAX_PLACES):
            if number < self._begin:
                break
            end = (number - self._first) * TOKEN_ID_BYTES
            num_common = _num_common(self._packed[max(0, end - len(suffix)) : end], wanted)
            if num_common > num_best:
                num_best, ends = num_common, [end]
            elif num_common == num_best:
                ends.append(end)
            number = self._earlier[number - self._first]
        return _Matches(num_best, ends)

    def tokens_from(self, begin: int, num_bytes: int) -> bytes:
        """Return the packed tokens of an answer from a byte on, at most `num_bytes`."""
        return bytes(self._packed[begin : begin + num_bytes]).partition(_END)[0]

    def _last_number(self, digest: int) -> int:
        for table in reversed(self._tables):
            number = table[digest & (len(table) - 1)]
            if number >= 0:
                return number
        return -1


def _new_table(size: int) -> array[int]:
    return array("q", [-1]) * size


class PastAnswers:
    """The last answers, apart for each tenant and salt, and no more than fit into the limits."""

    def __init__(self, *, max_answers: int, context: int, max_bytes: int = _MAX_BYTES) -> None:
        """Up to `context` tokens of the prompt are kept with an answer."""
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._context = context
        self._answers: dict[tuple[str, str], _Answers] = {}
        self._order: deque[tuple[tuple[str, str], int]] = deque()
        """The owners of the answers, and numbers of tokens with the end; the first ended first."""
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self._order)

    def add(self, sequence: Sequence) -> None:
        """Add the answer of a sequence that ends, unless it has no tokens."""
        num_prompt_tokens = sequence.num_prompt_tokens
        if len(sequence.token_ids) == num_prompt_tokens or not self._max_answers:
            return
        token_ids = sequence.token_ids[max(0, num_prompt_tokens - self._context) :]
        owner = _owner_of(sequence)
        answers = self._answers.get(owner)
        if answers is None:
            answers = self._answers[owner] = _Answers()
            self.num_bytes += answers.num_bytes
        self.num_bytes -= answers.num_bytes
        answers.add(token_ids)
        self.num_bytes += answers.num_bytes
        self._order.append((owner, len(token_ids) + 1))
        while self._order and (
            len(self._order) > self._max_answers or self.num_bytes > self._max_bytes
        ):
            self._drop_first()

    def find(self, sequence: Sequence) -> _Answers | None:
        """Return the answers that may draft for a sequence."""
        return self._answers.get(_owner_of(sequence))

    def _drop_first(self) -> None:
        owner, num_tokens = self._order.popleft()
        answers = self._answers[owner]
        self.num_bytes -= answers.num_bytes
        answers.drop(num_tokens)
        if answers.is_empty:
            del self._answers[owner]
        else:
            self.num_bytes += answers.num_bytes


def _owner_of(sequence: Sequence) -> tuple[str, str]:
    request = sequence.active.request
    return request.tenant, request.cache_salt


class SuffixDrafter:
    """Guesses the tokens that most often followed the longest suffix of the tokens before."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._max_suffix = config.suffix_decoding_max_tree_depth
        self._factor = config.suffix_decoding_max_spec_factor
        self._min_probability = config.suffix_decoding_min_token_prob
        self.answers = PastAnswers(
            max_answers=config.suffix_decoding_max_cached_requests, context=self._max_suffix
        )
        self._sizes = [size for size in _OWN_SIZES if size <= self._max_suffix]

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        token_ids = sequence.token_ids
        packed = token_ids.tobytes()
        num_tokens, ends = self._find_own(packed)
        width = min(limit, int(self._factor * num_tokens)) * TOKEN_ID_BYTES
        # Behind the last token, the tokens before it are guessed to repeat.
        repeats = [packed[end:] * (1 + width // (len(packed) - end)) for end in ends]
        guesses, score = self._choose([one[:width] for one in repeats])
        answers = self.answers.find(sequence)
        if answers is not None:
            suffix = packed[-self._max_suffix * TOKEN_ID_BYTES :]
            num_tokens, ends = answers.find(suffix, tuple(token_ids[-_GRAM:]))
            width = min(limit, int(self._factor * num_tokens)) * TOKEN_ID_BYTES
            others = self._choose([answers.tokens_from(end, width) for end in ends])
            if others[1] > score:
                guesses = others[0]
        return array("I", guesses)

    def _find_own(self, packed: bytes) -> _Matches:
        """Return the places of the longest suffix within the tokens themselves."""
        found, end = 0, len(packed) - TOKEN_ID_BYTES
        for size in self._sizes:
            # A longer suffix ends only where the shorter ends too.
            place = find_last(packed, packed[-size * TOKEN_ID_BYTES :], end)
            if place < 0:
                break
            found, end = size, (place + size) * TOKEN_ID_BYTES
        ends = list[int]()
        suffix = packed[len(packed) - found * TOKEN_ID_BYTES :]
        while found and len(ends) < _MAX_PLACES:
            ends.append(end)
            place = find_last(packed, suffix, end - TOKEN_ID_BYTES)
            if place < 0:
                break
            end = (place + found) * TOKEN_ID_BYTES
        return _Matches(found, ends)

    def _choose(self, followed: list[bytes]) -> tuple[bytes, float]:
        """Return the most frequent of packed tokens, and how many are expected to be right."""
        place, score, probability = 0, 0.0, 1.0
        while len(followed) > 1:
            votes: dict[bytes, int] = {}
            for one in followed:
                token = one[place : place + TOKEN_ID_BYTES]
                votes[token] = votes.get(token, 0) + 1
            token = max(votes, key=votes.__getitem__)
            likely = probability * votes[token] / len(followed)
            if not token or likely < self._min_probability:
                return followed[0][:place], score
            if len(votes) > 1:
                probability = likely
                followed = [one for one in followed if one.startswith(token, place)]
            place += TOKEN_ID_BYTES
            score += probability
        if not followed:
            return b"", 0.0
        return followed[0], score + probability * (len(followed[0]) - place) / TOKEN_ID_BYTES


def _num_common(packed: bytearray, wanted: int) -> int:
    """Return how many packed tokens are the last bytes of a big-endian number."""
    different = int.from_bytes(packed, "big") ^ wanted
    num_bytes = ((different & -different).bit_length() - 1) // 8 if different else len(packed)
    return min(num_bytes, len(packed)) // TOKEN_ID_BYTES
