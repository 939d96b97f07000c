"""The bytes of each token.

A tokenizer's decoder converts whole lists to text, but a stream needs the bytes token by token.
This module supports the decoders of language models: byte-level decoders, and decoders with a word
boundary character and byte fallback.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from string import hexdigits
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    import tokenizers

__all__ = ["TokenBytes"]

_SUPPORTED = "ByteLevel, Metaspace, or Replace, ByteFallback, Fuse and Strip"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """The operations of a decoder."""

    is_byte_level: bool = False
    has_byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    num_stripped: int = 0
    """Spaces stripped from the start of a text."""


class TokenBytes:
    """The bytes of a tokenizer's tokens, cached."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises CheckpointError for a decoder that is not supported."""
        self._tokenizer = tokenizer
        self._rules = _read_rules(tokenizer)
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._fallback_bytes = _fallback_bytes(tokenizer) if self._rules.has_byte_fallback else {}
        self.fallback_ids = frozenset(self._fallback_bytes)
        """The tokens that stand for a byte of a character.

        Each of several consecutive tokens that are not valid UTF-8 becomes U+FFFD.
        """
        self.by_id = _BytesById(self._read)
        """The bytes of each token; empty for an id without a token."""
        self.ordinary_by_id = _BytesById(self._read_ordinary)
        """The bytes of each token that is not special; empty for special tokens."""

    @property
    def num_stripped(self) -> int:
        """Spaces that the decoder strips from the start of a text."""
        return self._rules.num_stripped

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is special, such as an end-of-sequence token."""
        return token_id in self._special_ids

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; empty for an id without a token."""
        return self.by_id[token_id]

    def text_of(self, token_id: int) -> str:
        """Return the token as text, with U+FFFD for incomplete characters."""
        return self.bytes_of(token_id).decode(errors="replace")

    def _read_ordinary(self, token_id: int) -> bytes:
        return b"" if self.is_special(token_id) else self.by_id[token_id]

    def _read(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._rules.is_byte_level:
            try:
                return bytes(_BYTE_OF[character] for character in token)
            except KeyError:
                # Added tokens are plain text.
                return token.encode()
        if (byte := self._fallback_bytes.get(token_id)) is not None:
            return bytes((byte,))
        for old, new in self._rules.replacements:
            token = token.replace(old, new)
        return token.encode()


class _BytesById(dict[int, bytes]):
    """The bytes of tokens, each read when it is first looked up."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._read(token_id)
        return found


def _read_rules(tokenizer: tokenizers.Tokenizer) -> _Rules:
    decoder = tokenizer.decoder
    tree = None if decoder is None else json.loads(decoder.__getstate__())
    steps = _flattened(tree)
    kinds = [str(step["type"]) for step in steps]
    if kinds == ["ByteLevel"]:
        return _Rules(is_byte_level=True)
    replacements: list[tuple[str, str]] = []
    num_stripped = 0
    for kind, step in zip(kinds, steps, strict=True):
        match kind, step:
            case "Replace", {"pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case "Metaspace", {"replacement": str(old)}:
                replacements.append((old, " "))
                num_stripped = 0 if step.get("prepend_scheme") == "never" else 1
            case "Strip", {"content": " ", "start": int(start), "stop": 0}:
                num_stripped = start
            case "ByteFallback" | "Fuse", _:
                pass
            case _:
                raise _unsupported(kind)
    if not steps:
        raise _unsupported("none")
    return _Rules(
        has_byte_fallback="ByteFallback" in kinds,
        replacements=tuple(replacements),
        num_stripped=num_stripped,
    )


def _fallback_bytes(tokenizer: tokenizers.Tokenizer) -> dict[int, int]:
    digits = ["".join(pair) for pair in product(hexdigits, repeat=2)]
    ids = [tokenizer.token_to_id(f"<0x{pair}>") for pair in digits]
    return {
        token_id: int(pair, 16)
        for token_id, pair in zip(ids, digits, strict=True)
        if token_id is not None
    }


def _flattened(tree: object) -> list[dict[str, object]]:
    if not isinstance(tree, dict):
        return []
    if tree.get("type") != "Sequence":
        return [tree]
    return [step for part in tree["decoders"] for step in _flattened(part)]


def _unsupported(kind: str) -> CheckpointError:
    return CheckpointError(
        f"Unsupported decoder {kind} in tokenizer.json; supported decoders are {_SUPPORTED}."
    )


def _byte_alphabet() -> dict[str, int]:
    # The byte alphabet of GPT-2: printable Latin-1 bytes are themselves, and the others, in order,
    # the characters from U+0100 on.
    alphabet: dict[str, int] = {}
    num_shifted = 0
    for byte in range(256):
        is_plain = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
        alphabet[chr(byte if is_plain else 0x100 + num_shifted)] = byte
        num_shifted += not is_plain
    return alphabet


_BYTE_OF = _byte_alphabet()
