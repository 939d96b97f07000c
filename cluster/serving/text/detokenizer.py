"""Incremental detokenization, token by token."""

from __future__ import annotations

from codecs import utf_8_decode
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.text.token_bytes import TokenBytes

__all__ = ["IncrementalDetokenizer"]


class IncrementalDetokenizer:
    """Returns the text of one sequence in pieces that never split a character.

    Together the pieces equal the tokenizer's text of the whole list.
    """

    def __init__(
        self,
        token_bytes: TokenBytes,
        *,
        is_continuation: bool,
        skips_special_tokens: bool = True,
    ) -> None:
        """With `is_continuation`, other text precedes, so that a leading space is kept."""
        by_id = token_bytes.ordinary_by_id if skips_special_tokens else token_bytes.by_id
        # Called by `map`, which costs no Python code for each token.
        self._bytes_of = by_id.__getitem__
        self._fallback_ids = token_bytes.fallback_ids
        self._run = bytearray()
        self._held = b""
        self._num_stripped = 0 if is_continuation else token_bytes.num_stripped

    @classmethod
    def after(
        cls, prompt: Sequence[int], token_bytes: TokenBytes, *, skips_special_tokens: bool
    ) -> Self:
        """Return a detokenizer of the tokens after a prompt."""
        # Only decoders that strip leading spaces depend on the text before.
        is_continuation = token_bytes.num_stripped > 0 and not all(
            map(token_bytes.is_special, prompt)
        )
        return cls(
            token_bytes,
            is_continuation=is_continuation,
            skips_special_tokens=skips_special_tokens,
        )

    def add_tokens(self, token_ids: Sequence[int]) -> str:
        """Return the complete characters up to these tokens that were not returned before."""
        if self._run or not self._fallback_ids.isdisjoint(token_ids):
            return "".join(map(self._add_beside_run, token_ids))
        # The fast path of most tokens.
        return self._decoded(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """Return the rest of the text: U+FFFD if a character is incomplete."""
        text = self._decoded(self._ended_run())
        held, self._held = self._held, b""
        return text + held.decode(errors="replace")

    def _add_beside_run(self, token_id: int) -> str:
        own = self._bytes_of(token_id)
        if not own:
            return ""
        if token_id in self._fallback_ids:
            # Consecutive bytes are decoded together, so that no text is certain before their end.
            self._run += own
            return ""
        return self._decoded(self._ended_run() + own)

    def _decoded(self, data: bytes) -> str:
        known = self._held + data
        text, num_taken = utf_8_decode(known, "replace", False)
        # The bytes of an incomplete character.
        self._held = known[num_taken:]
        return self._stripped(text) if self._num_stripped else text

    def _ended_run(self) -> bytes:
        """Return the text of the consecutive bytes that have ended, as UTF-8."""
        if not self._run:
            return b""
        run, self._run = bytes(self._run), bytearray()
        try:
            run.decode()
        except UnicodeDecodeError:
            return len(run) * "\ufffd".encode()
        return run

    def _stripped(self, text: str) -> str:
        while self._num_stripped and text:
            if not text.startswith(" "):
                self._num_stripped = 0
            else:
                text = text[1:]
                self._num_stripped -= 1
        return text
