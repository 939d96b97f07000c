"""From tokens to text, token by token."""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.serving.text.token_bytes import TokenBytes

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """The text of one growing sequence; no piece of it ever splits a character.

    The pieces together are what the tokenizer gives for the whole list. Special tokens
    have no text unless they are wanted.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        is_continuation: bool,
        skips_special_tokens: bool = True,
    ) -> None:
        """`is_continuation` says that text stands before it, which keeps its leading space."""
        self._token_bytes = token_bytes
        self._skips_special_tokens = skips_special_tokens
        self._held = b""
        self._num_stripped = 0 if is_continuation else token_bytes.num_stripped

    def add_token(self, token_id: int) -> str:
        """Return the text that is certain with this token, often that of the token."""
        if self._skips_special_tokens and self._token_bytes.is_special(token_id):
            return ""
        known = self._held + self._token_bytes.bytes_of(token_id)
        text, num_taken = utf_8_decode(known, "replace", False)
        # The start of a character.
        self._held = known[num_taken:]
        return self._stripped(text) if self._num_stripped else text

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD if a character is incomplete."""
        held, self._held = self._held, b""
        return held.decode(errors="replace")

    def _stripped(self, text: str) -> str:
        while self._num_stripped and text:
            if not text.startswith(" "):
                self._num_stripped = 0
            else:
                text = text[1:]
                self._num_stripped -= 1
        return text
