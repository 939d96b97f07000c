"""Where the tokens of a text begin in it, in characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.text.token_bytes import TokenBytes

__all__ = ["TextOffsets"]


class TextOffsets:
    """Counts the characters of a text, token by token.

    Tokens that are parts of one character begin where it does.
    """

    def __init__(
        self, token_bytes: TokenBytes, detokenizer: IncrementalDetokenizer, *, text: str = ""
    ) -> None:
        """Offsets begin after `text`."""
        self._token_bytes = token_bytes
        self._detokenizer = detokenizer
        self._num_characters = len(text)

    @classmethod
    def of_prompt(cls, token_bytes: TokenBytes) -> TextOffsets:
        """Return the offsets of a prompt, from its beginning."""
        return cls(token_bytes, IncrementalDetokenizer(token_bytes, is_continuation=False))

    def of_tokens(self, token_ids: Sequence[int], *, prompt: str | None = None) -> list[int]:
        """Return where the next tokens begin.

        Special tokens of a `prompt` count if its text has them, as it has those that the client
        wrote and not those that the tokenizer added.
        """
        return [self._next(token_id, prompt) for token_id in token_ids]

    def _next(self, token_id: int, prompt: str | None) -> int:
        fallback_ids = self._token_bytes.fallback_ids
        if fallback_ids and token_id not in fallback_ids:
            # The consecutive bytes before it are complete.
            self._num_characters += len(self._detokenizer.flush())
        offset = self._num_characters
        if prompt is not None and self._token_bytes.is_special(token_id):
            token = self._token_bytes.text_of(token_id)
            self._num_characters += len(token) if prompt.startswith(token, offset) else 0
        else:
            self._num_characters += len(self._detokenizer.add_tokens((token_id,)))
        return offset
