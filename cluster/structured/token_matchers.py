"""Matchers follow the tokens of a sequence through a grammar, and the vocabulary of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from copy import copy
from typing import TYPE_CHECKING, Protocol, Self

import msgspec
import numpy as np

from pagedray.request import ReasoningPlace, ReasoningTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from pagedray.request import Reasoning

__all__ = [
    "FreeMatcher",
    "MarkMatcher",
    "ReasoningBudget",
    "ReasoningMatcher",
    "TextMatcher",
    "TokenIndex",
    "TokenMatcher",
    "Vocabulary",
    "token_bits",
    "vocabulary_of",
]

_MAX_LINE_FEEDS = 2
"""Line feeds between the reasoning and the structure, as models write them."""


class TokenMatcher(ABC):
    """A position in a grammar, or in the text around it."""

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the tokens so far are a whole text."""

    @property
    def is_free(self) -> bool:
        """Whether it allows every token from here on."""
        return False

    @abstractmethod
    def accept_token(self, token_id: int) -> bool:
        """Advance by a token, or return False if it is not allowed."""

    @abstractmethod
    def copy(self) -> Self:
        """Return a matcher at the same position, which advances on its own."""

    @abstractmethod
    def forced_token(self, index: TokenIndex) -> int | None:
        """Return the longest token of the only text that may follow; None if there are several.

        Shorter tokens of that text may be allowed, too.
        """

    @abstractmethod
    def reset(self) -> None:
        """Return to the start."""

    @abstractmethod
    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        """Set the bits of the allowed tokens in a row of zeros, `[num_masks, num_words]`.

        Bit `i % 32` of word `i // 32` is token `i`.
        """


class TextMatcher(TokenMatcher):
    """A matcher that also accepts texts."""

    @abstractmethod
    def accept_text(self, text: str) -> bool:
        """Advance by a text, or return False if it is not allowed."""


class FreeMatcher(TokenMatcher):
    """Allows every token; it has no position."""

    is_complete = True
    is_free = True

    def accept_token(self, token_id: int) -> bool:
        return True

    def copy(self) -> Self:
        return self

    def forced_token(self, index: TokenIndex) -> int | None:
        return None

    def reset(self) -> None:
        """Do nothing."""

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        masks[row] = -1


class OuterMatcher(TokenMatcher):
    """Passes the tokens of a sequence to another matcher."""

    def __init__(self, matcher: TokenMatcher) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_complete

    def copy(self) -> Self:
        copied = copy(self)
        copied._matcher = self._matcher.copy()
        return copied


class MarkMatcher(OuterMatcher, TextMatcher):
    """Allows the token at the start of the grammar, or after free text."""

    _matcher: TextMatcher

    def __init__(
        self,
        matcher: TextMatcher,
        token_id: int,
        text: str,
        *,
        text_index: TokenIndex | None = None,
    ) -> None:
        """The token stands for `text`, with which a text of the grammar must begin.

        With `text_index`, free text may precede it; the index knows its tokens.
        """
        super().__init__(matcher)
        self._token_id = token_id
        self._text = text
        self._mark = text.encode()
        self._index = text_index
        self._is_expected = True
        """Whether the token may come next."""
        self._tail = b""
        """The end of the free text."""

    def accept_token(self, token_id: int) -> bool:
        if self._is_expected and token_id == self._token_id:
            self._is_expected = False
            return self._matcher.accept_text(self._text)
        self._is_expected = self._is_expected and self._continues_text(token_id)
        return self._matcher.accept_token(token_id)

    def accept_text(self, text: str) -> bool:
        self._is_expected = False
        return self._matcher.accept_text(text)

    def forced_token(self, index: TokenIndex) -> int | None:
        """Return the mark where nothing else may be, or the token forced behind the mark."""
        if not self._is_expected:
            return self._matcher.forced_token(index)
        return self._token_id if self._index is None else None

    def reset(self) -> None:
        self._matcher.reset()
        self._is_expected = True
        self._tail = b""

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        self._matcher.write_mask(masks, row)
        if self._is_expected:
            word, bit = divmod(self._token_id, 32)
            masks.view("uint32")[row, word] |= 1 << bit

    def _continues_text(self, token_id: int) -> bool:
        """Add a token to the free text, and return whether the text has not reached the mark."""
        if self._index is None:
            return False
        text = self._tail + self._index.bytes_of(token_id)
        self._tail = text[-len(self._mark) :]
        return self._mark not in text


class TrackingMatcher(OuterMatcher):
    """Tracks the reasoning of a sequence."""

    def __init__(self, matcher: TokenMatcher, reasoning: Reasoning, index: TokenIndex) -> None:
        super().__init__(matcher)
        self._reasoning = reasoning
        self._index = index
        self._begin()

    def _begin(self) -> None:
        """Start at the beginning of the turn."""
        self._tracker = ReasoningTracker(self._reasoning)

    def copy(self) -> Self:
        copied = super().copy()
        copied._tracker = copy(self._tracker)
        return copied

    def reset(self) -> None:
        self._matcher.reset()
        self._begin()


class ReasoningBudget(TrackingMatcher):
    """Allows the tokens of another matcher, until the reasoning has as many tokens as it may have.

    From then on, only the mark of its end is allowed.
    """

    def __init__(
        self, matcher: TokenMatcher, reasoning: Reasoning, index: TokenIndex, *, max_tokens: int
    ) -> None:
        self._max_tokens = max_tokens
        super().__init__(matcher, reasoning, index)

    def _begin(self) -> None:
        super()._begin()
        self._num_tokens = 0
        """Tokens of the reasoning, without the mark at which it begins."""

    @property
    def is_free(self) -> bool:
        """Whether no more reasoning follows, and the other matcher allows every token."""
        return self._tracker.is_passed and self._matcher.is_free

    def accept_token(self, token_id: int) -> bool:
        if self._tracker.place is ReasoningPlace.INSIDE:
            self._num_tokens += 1
        self._tracker.add_token(token_id, self._index.bytes_of(token_id))
        return self._matcher.accept_token(token_id)

    def forced_token(self, index: TokenIndex) -> int | None:
        """Return the next token of the mark once the budget is spent."""
        return self._next_of_end() if self._is_spent else self._matcher.forced_token(index)

    @property
    def _is_spent(self) -> bool:
        is_inside = self._tracker.place is ReasoningPlace.INSIDE
        return is_inside and self._num_tokens >= self._max_tokens

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        if self._is_spent:
            word, bit = divmod(self._next_of_end(), 32)
            masks.view("uint32")[row, word] = 1 << bit
            return
        self._matcher.write_mask(masks, row)

    def _next_of_end(self) -> int:
        """Return the token of the mark at which the reasoning ends, or the longest one of it."""
        for token_id, text in self._reasoning.mark_tokens:
            # Models know the end by this token, even if the reasoning ends like a part of it.
            if text == self._reasoning.end:
                return token_id
        rest = self._tracker.rest
        for length in range(len(rest), 0, -1):
            found = self._index.equal_to(rest[:length])
            if found:
                return found[0]
        raise RuntimeError("no token continues the mark at the end of the reasoning")


class ReasoningMatcher(TrackingMatcher):
    """Lets a sequence reason freely before its grammar, but not end there."""

    _matcher: TextMatcher

    def __init__(
        self,
        matcher: TextMatcher,
        reasoning: Reasoning,
        index: TokenIndex,
        *,
        eos_token_ids: Sequence[int],
    ) -> None:
        super().__init__(matcher, reasoning, index)
        self._eos_token_ids = eos_token_ids
        self._end = reasoning.end.encode()
        self._usual_mask: NDArray[np.int32] | None = None
        """The mask inside of the reasoning, unless a part of its end has been written."""

    def _begin(self) -> None:
        super()._begin()
        self._is_matching = not self._reasoning.is_open
        """Whether all tokens so far, if they are no reasoning, match the grammar."""
        self._num_tokens = 0
        self._num_line_feeds = 0
        self._has_begun = False
        """Whether the structure has begun after the reasoning."""
        self._set_headers(self._reasoning.num_prompt_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether the grammar matches the text after the reasoning."""
        if self._headers:
            return False
        return self._matcher.is_complete and self._tracker.place is not ReasoningPlace.INSIDE

    def accept_token(self, token_id: int) -> bool:
        """Advance by a token, or return False if neither the grammar nor a mark allows it."""
        self._num_tokens += 1
        match self._tracker.place:
            case ReasoningPlace.ABSENT if self._headers:
                return self._accept_header(token_id)
            case ReasoningPlace.ABSENT:
                return self._matcher.accept_token(token_id)
            case ReasoningPlace.AFTER:
                return self._accept_after(token_id)
        was_undecided = self._tracker.place is ReasoningPlace.START
        self._tracker.add_token(token_id, self._index.bytes_of(token_id))
        if was_undecided and self._headers:
            self._is_matching = self._accept_header(token_id)
        elif was_undecided:
            is_text = all(token_id != one for one, _ in self._reasoning.mark_tokens)
            self._is_matching = (
                self._is_matching and is_text and self._matcher.accept_token(token_id)
            )
        match self._tracker.place:
            case ReasoningPlace.START:
                return True
            case ReasoningPlace.ABSENT:
                return self._is_matching
            case ReasoningPlace.AFTER:
                self._matcher.reset()
                self._set_headers(0)
                return self._accept_line_feeds(self._tracker.after)
        return True

    def forced_token(self, index: TokenIndex) -> int | None:
        """Return the token that a header or the grammar forces, if no reasoning may come."""
        place = self._tracker.place
        if place in (ReasoningPlace.START, ReasoningPlace.INSIDE):
            return None
        if self._headers:
            found = {one.token_ids[self._num_passed] for one in self._headers}
            return found.pop() if len(found) == 1 else None
        if place is ReasoningPlace.AFTER and not self._has_begun:
            return None
        return self._matcher.forced_token(index)

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        place = self._tracker.place
        if place is ReasoningPlace.INSIDE:
            masks[row] = self._inside_mask(masks.shape[1])
            return
        if self._headers:
            found = {one.token_ids[self._num_passed] for one in self._headers}
            if place is ReasoningPlace.START:
                found |= self._beginning()
            masks[row] = token_bits(list(found), masks.shape[1])
            return
        if place is not ReasoningPlace.START or self._is_matching:
            self._matcher.write_mask(masks, row)
        if place is ReasoningPlace.START:
            masks[row] |= token_bits(list(self._beginning()), masks.shape[1])
        elif place is ReasoningPlace.AFTER and not self._has_begun:
            counts = range(1, _MAX_LINE_FEEDS - self._num_line_feeds + 1)
            whitespace = [one for n in counts for one in self._index.equal_to(b"\n" * n)]
            masks[row] |= token_bits(whitespace, masks.shape[1])

    def _accept_after(self, token_id: int) -> bool:
        if self._headers:
            return self._accept_header(token_id)
        text = self._index.bytes_of(token_id)
        if text and not self._has_begun and self._accept_line_feeds(text):
            return True
        self._has_begun = True
        return self._matcher.accept_token(token_id)

    def _set_headers(self, num_passed: int) -> None:
        """Expect a header, of which some tokens have passed, if the model has any."""
        self._headers = self._reasoning.answer_headers
        self._num_passed = num_passed

    def _accept_header(self, token_id: int) -> bool:
        """Advance in the headers that begin like the tokens so far."""
        place = self._num_passed
        self._headers = tuple(one for one in self._headers if one.token_ids[place] == token_id)
        self._num_passed += 1
        ended = [one for one in self._headers if len(one.token_ids) == self._num_passed]
        if not ended:
            return bool(self._headers)
        self._headers = ()
        return not ended[0].text or self._matcher.accept_text(ended[0].text)

    def _accept_line_feeds(self, text: bytes) -> bool:
        """Count line feeds between the reasoning and the structure."""
        if text.strip(b"\n") or self._num_line_feeds + len(text) > _MAX_LINE_FEEDS:
            return False
        self._num_line_feeds += len(text)
        return True

    def _beginning(self) -> set[int]:
        """Return the tokens that continue the mark at which reasoning begins."""
        rest = self._tracker.rest
        found = set(self._index.beginning_with(rest))
        for length in range(1, len(rest)):
            found.update(self._index.equal_to(rest[:length]))
        for token_id, text in self._reasoning.mark_tokens:
            if rest.startswith(text.encode()):
                found.add(token_id)
        if not self._num_tokens:
            found.update(self._index.equal_to(b"\n"))
        return found

    def _inside_mask(self, num_words: int) -> NDArray[np.int32]:
        is_usual = self._tracker.rest == self._end
        if is_usual and self._usual_mask is not None:
            return self._usual_mask
        mask = token_bits(np.arange(len(self._index.tokens)), num_words)
        mask &= ~token_bits(list(self._forbidden_inside()), num_words)
        if is_usual:
            self._usual_mask = mask
        return mask

    def _forbidden_inside(self) -> set[int]:
        """Return the tokens that would end the sequence, or begin the structure unchecked."""
        found = set(self._eos_token_ids)
        tokens, rest = self._index.tokens, self._tracker.rest
        ending = self._index.containing(self._end)
        behind = {one: tokens[one].partition(self._end)[2] for one in ending}
        behind |= {one: tokens[one][len(rest) :] for one in self._index.beginning_with(rest)}
        for one, text in behind.items():
            if text.strip(b"\n") or len(text) > _MAX_LINE_FEEDS:
                found.add(one)
        return found


def token_bits(token_ids: list[int] | NDArray[np.int64], num_words: int) -> NDArray[np.int32]:
    """Return a mask in which the bits of these tokens are set."""
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[token_ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class TokenTexts(Protocol):
    """The texts of tokens."""

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is a control token."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id without a token."""


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that a model has logits for."""

    tokens: tuple[bytes, ...]
    """Empty for ids without text: control tokens and unused ids."""
    eos_token_ids: tuple[int, ...]
    special_token_ids: dict[str, int]
    """The other control tokens by their texts."""


def vocabulary_of(
    token_bytes: TokenTexts, *, size: int, eos_token_ids: tuple[int, ...]
) -> Vocabulary:
    """Return the vocabulary of a model with `size` logits."""
    return Vocabulary(
        tokens=tuple(
            b""
            if token_bytes.is_special(token_id) or token_id in eos_token_ids
            else token_bytes.bytes_of(token_id)
            for token_id in range(size)
        ),
        special_token_ids={
            token_bytes.bytes_of(token_id).decode(errors="replace"): token_id
            for token_id in range(size)
            if token_bytes.is_special(token_id) and token_id not in eos_token_ids
        },
        eos_token_ids=tuple(token_id for token_id in eos_token_ids if token_id < size),
    )


class TokenIndex:
    """The tokens of a vocabulary in the order of their bytes."""

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Mapping[str, int]) -> None:
        """Tokens without bytes, such as special tokens, are never found."""
        self.tokens = tokens
        self._special = {one: text.encode() for text, one in special_token_ids.items()}
        self._ids = sorted(
            (one for one, token in enumerate(tokens) if token), key=tokens.__getitem__
        )
        self._sorted = [tokens[one] for one in self._ids]
        self._containing: dict[bytes, tuple[int, ...]] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token, even of a special token; empty for an end-of-text token."""
        return self.tokens[token_id] or self._special.get(token_id, b"")

    def beginning_with(self, text: bytes) -> list[int]:
        """Return the ids of the tokens that begin with a text, itself included."""
        first = last = bisect_left(self._sorted, text)
        while last < len(self._sorted) and self._sorted[last].startswith(text):
            last += 1
        return self._ids[first:last]

    def longest_prefix(self, text: bytes) -> int | None:
        """Return the id of the longest token with which a text begins."""
        end = text
        while end:
            place = bisect_right(self._sorted, end) - 1
            if place < 0:
                return None
            token = self._sorted[place]
            if text.startswith(token):
                return self._ids[place]
            # Prefixes of the text are in the order of their lengths, and before this token.
            end = text[: next(n for n, byte in enumerate(token) if byte != text[n])]
        return None

    def equal_to(self, text: bytes) -> list[int]:
        """Return the ids of the tokens of exactly this text."""
        return [one for one in self.beginning_with(text) if self.tokens[one] == text]

    def containing(self, text: bytes) -> tuple[int, ...]:
        """Return the ids of the tokens that contain a text, found once for each text."""
        if text not in self._containing:
            self._containing[text] = tuple(
                one for one, token in enumerate(self.tokens) if text in token
            )
        return self._containing[text]
