"""Special tokens that clients write in messages, encoded as plain text.

A chat template writes special tokens as text, next to the text of the messages, and the tokenizer
would find both. Therefore, before a conversation is rendered, each special token that the client
sent is replaced by a mark; special tokens in the rendered text then come from the template. A
second tokenizer with the same model knows each special token by an alias only. It encodes the text
in which aliases replace the template's tokens, and the client's original text replaces the marks.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Encoding, Tokenizer

from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt, MessageToolCall
from pagedray.errors import invalid_field

if TYPE_CHECKING:
    from collections.abc import Collection


__all__ = ["LiteralTokens", "MarkedText"]

_NUM_NONCE_BITS = 128
_NUM_NONCE_DIGITS = 39
_NUM_INDEX_DIGITS = 8
_NUM_PART_DIGITS = 12
"""Digits of a nonce that no text contains by chance."""


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A rendered conversation, in which marks may stand for texts of the client."""

    text: str
    originals: Mapping[str, str]
    """The text that each mark stands for; empty for most conversations."""

    @property
    def restored(self) -> str:
        """The text with the client's text in place of the marks. Raises InvalidRequestError."""
        return _restored(self.text, self.originals)


class LiteralTokens:
    """Marks special tokens in conversations, and encodes the rendered text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        special = {token_id: token for token_id, token in added.items() if token.special}
        self._special = {token_id: token.content for token_id, token in special.items()}
        self._finder = _TokenFinder(special.values(), tokenizer)
        # A client that knew an alias could write it in place of the token.
        nonce = f"{secrets.randbits(_NUM_NONCE_BITS):x}"
        self._aliases = {token.content: f"{nonce}x{one}z" for one, token in special.items()}
        self._tokenizer = _with_aliases(tokenizer, self._aliases)
        self._id_of_alias = {
            self._tokenizer.token_to_id(self._aliases[token.content]): token_id
            for token_id, token in special.items()
        }

    def mark(self, prompt: ChatPrompt) -> tuple[ChatPrompt, Mapping[str, str]]:
        """Return a conversation with marks, and the text that each stands for."""
        marker = _Marker(self._finder)
        marked = replace(
            prompt,
            messages=tuple(map(marker.mark_message, prompt.messages)),
            tools=tuple(map(marker.mark_value, prompt.tools)),
            # The names come from the template.
            variables={name: marker.mark_value(value) for name, value in prompt.variables.items()},
        )
        return marked, marker.originals

    def encode(self, marked: MarkedText) -> list[int]:
        """Return the token ids of a rendered conversation, without holding the GIL.

        Raises InvalidRequestError if only a special token can represent its text.
        """
        text = self._finder.pattern.sub(lambda found: self._aliases[found[0]], marked.text)
        text = _restored(text, marked.originals)
        # Unlike `encode`, this releases the GIL.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        self._check_literal(encoding, text)
        return [self._id_of_alias.get(token_id, token_id) for token_id in encoding.ids]

    def _check_literal(self, encoding: Encoding, text: str) -> None:
        # A token of the vocabulary may have the same text, for example in a unigram model.
        if self._special.keys().isdisjoint(encoding.ids):
            return
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # A character that the vocabulary lacks becomes a special token, too.
            if token_id in self._special and self._special[token_id] in text[begin:end]:
                raise invalid_field(
                    "messages",
                    "contain the text of a special token, which the model's tokenizer cannot "
                    "represent as ordinary text.",
                )


class _TokenFinder:
    """Finds special tokens in a text, and parts of them that an adjacent text may complete."""

    def __init__(self, special: Collection[AddedToken], tokenizer: Tokenizer) -> None:
        # The tokenizer takes the longest token, too.
        texts = sorted((token.content for token in special), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        """Matches special tokens."""
        self._longest_part = len(texts[0]) - 1 if texts else 0
        self._heads = {text[:end] for text in texts for end in range(1, len(text))}
        self._tails = {text[begin:] for text in texts for begin in range(1, len(text))}
        self._first_characters = {text[0] for text in texts}
        self._last_characters = {text[-1] for text in texts}
        edges = "".join(sorted(self._first_characters | self._last_characters))
        self._edges = re.compile(f"[{re.escape(edges)}]" if edges else "(?!)")
        normalizer = tokenizer.normalizer
        is_normalized = any(token.normalized for token in special)
        self._normalize = normalizer.normalize_str if normalizer and is_normalized else None

    def part_to_mark(self, text: str) -> tuple[int, int]:
        """Return where the part of a text to mark begins and ends; it is empty for most texts.

        Spaces around a text stay outside, since templates strip them.
        """
        if self._normalize is None and self._edges.search(text) is None:
            # The fast path of most texts.
            return 0, 0
        end = len(text.rstrip())
        begin = len(text) - len(text.lstrip())
        if self._normalize is not None and self.pattern.search(self._normalize(text)):
            return begin, end
        tail_size = self._tail_size(text[begin : begin + self._longest_part])
        token = self.pattern.search(text, begin + tail_size)
        if token is not None:
            # Not only that token: there may be a million of them.
            return begin if tail_size else token.start(), max(end, token.end())
        head_size = self._head_size(text[max(0, end - self._longest_part) : end])
        if tail_size:
            return begin, end if head_size else begin + tail_size
        return end - head_size, end

    def _tail_size(self, window: str) -> int:
        """Return the length of the rest of a token with which a text begins, or 0."""
        if not self._last_characters.isdisjoint(window):
            for size in range(len(window), 0, -1):
                if window[:size] in self._tails:
                    return size
        return 0

    def _head_size(self, window: str) -> int:
        """Return the length of the first part of a token with which a text ends, or 0."""
        if not self._first_characters.isdisjoint(window):
            for size in range(len(window), 0, -1):
                if window[-size:] in self._heads:
                    return size
        return 0


class _Marker:
    """Replaces parts of the texts of one conversation with marks."""

    def __init__(self, finder: _TokenFinder) -> None:
        self._finder = finder
        self._nonce = ""
        self.originals: dict[str, str] = {}
        """The text that each mark stands for."""

    def mark_message(self, message: ChatMessage) -> ChatMessage:
        """Return a message with marks, but none in its role, which is one of a few words."""
        content = self._mark(message.content)
        if content is message.content and not (
            message.tool_calls
            or message.tool_call_id
            or message.name
            or message.reasoning
            or message.extra
        ):
            # The common case, thousands of times for a long conversation.
            return message
        return replace(
            message,
            content=content,
            tool_calls=tuple(map(self._mark_call, message.tool_calls)),
            tool_call_id=self.mark_value(message.tool_call_id),
            name=self.mark_value(message.name),
            reasoning=self.mark_value(message.reasoning),
            extra=self.mark_value(message.extra),
        )

    # Any: a value in JSON, of the same type.
    def mark_value(self, value: Any) -> Any:
        """Return a value in JSON with marks."""
        if isinstance(value, str):
            return self._mark(value)
        if isinstance(value, Mapping):
            return {self._mark(key): self.mark_value(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_value(one) for one in value]
        return value

    def _mark_call(self, call: MessageToolCall) -> MessageToolCall:
        return MessageToolCall(
            id=self._mark(call.id),
            name=self._mark(call.name),
            arguments=self.mark_value(call.arguments),
        )

    def _mark(self, text: str) -> str:
        begin, end = self._finder.part_to_mark(text)
        if begin >= end:
            return text
        # Digits, which templates do not convert.
        self._nonce = self._nonce or f"{secrets.randbits(_NUM_NONCE_BITS):0{_NUM_NONCE_DIGITS}d}"
        mark = f"{self._nonce}{len(self.originals):0{_NUM_INDEX_DIGITS}d}"
        self.originals[mark] = text[begin:end]
        return f"{text[:begin]}{mark}{text[end:]}"


def _with_aliases(tokenizer: Tokenizer, aliases: Mapping[str, str]) -> Tokenizer:
    """Return a tokenizer that knows special tokens by their aliases only."""
    added = [token for _, token in sorted(tokenizer.get_added_tokens_decoder().items())]
    # The model and its vocabulary are shared.
    made = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        made.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        made.pre_tokenizer = tokenizer.pre_tokenizer
    # Tokens keep their ids if they are added in that order. Adding each alone would take minutes.
    for is_special, tokens in groupby(added, key=lambda token: token.special):
        add = made.add_special_tokens if is_special else made.add_tokens
        add(list(tokens))
    if _ids_of_added(made) != _ids_of_added(tokenizer):
        # Their ids are not consecutive.
        made = Tokenizer.from_str(tokenizer.to_str())
    made.add_tokens(
        [
            AddedToken(
                aliases[token.content],
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
            )
            for token in added
            if token.special
        ]
    )
    made.encode_special_tokens = True
    return made


def _ids_of_added(tokenizer: Tokenizer) -> dict[str, int]:
    added = tokenizer.get_added_tokens_decoder()
    return {token.content: token_id for token_id, token in added.items()}


def _restored(text: str, originals: Mapping[str, str]) -> str:
    if not originals:
        return text
    # All marks begin with the same number.
    nonce = next(iter(originals))[:_NUM_NONCE_DIGITS]
    mark = re.compile(f"{nonce}[0-9]{{{_NUM_INDEX_DIGITS}}}")
    rest = mark.sub(lambda found: "" if found[0] in originals else found[0], text)
    if nonce[:_NUM_PART_DIGITS] in rest or nonce[-_NUM_PART_DIGITS:] in rest:
        raise invalid_field(
            "messages",
            "contain the text of a special token, which the model's chat template splits.",
        )
    return mark.sub(lambda found: originals[found[0]], text)
