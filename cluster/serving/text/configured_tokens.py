"""Tokens that `tokenizer_config.json` adds to `tokenizer.json`, as in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tokenizers

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["add_configured_tokens", "special_tokens_of"]

_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def special_tokens_of(settings: Mapping[str, object]) -> dict[str, str]:
    """Return the tokens that settings name, such as `eos_token`."""
    found = {name: _content(settings.get(name)) for name in _NAMES}
    return {name: token for name, token in found.items() if token is not None}


def add_configured_tokens(
    tokenizer: tokenizers.Tokenizer, settings: Mapping[str, object], path: Path
) -> None:
    """Add the tokens of settings to a tokenizer; known tokens get the flags given here.

    `path` is the file of the settings. Raises CheckpointError.
    """
    named = special_tokens_of(settings)
    listed = _listed_tokens(settings.get("added_tokens_decoder"), path)
    for token in listed:
        token.special = token.special or token.content in named.values()
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known.update(token.content for token in listed)
    more = [*named.values(), *_extra_tokens(settings)]
    added = [
        tokenizers.AddedToken(token, special=True, normalized=False)
        for token in dict.fromkeys(more)
        if token not in known
    ]
    # In one call, since the time of each call is proportional to the tokens that are there.
    tokenizer.add_tokens([*listed, *added])


def _listed_tokens(entries: object, path: Path) -> list[tokenizers.AddedToken]:
    """Return the tokens of `added_tokens_decoder`, in the order of their ids."""
    if entries is None:
        return []
    if not isinstance(entries, Mapping):
        raise CheckpointError(f"{path}: added_tokens_decoder must be an object.")
    tokens: dict[int, tokenizers.AddedToken] = {}
    for key, entry in entries.items():
        content = _content(entry) if isinstance(entry, Mapping) else None
        if content is None or not (key.isascii() and key.isdigit() and len(key) < 10):
            raise CheckpointError(
                f"{path}: added_tokens_decoder must map token ids to objects with a content, "
                f"unlike that of {key!r:.40}."
            )
        tokens[int(key)] = _added_token(content, entry)
    return [token for _, token in sorted(tokens.items())]


def _added_token(content: str, entry: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = {name: entry[name] for name in _FLAGS if isinstance(entry.get(name), bool)}
    return tokenizers.AddedToken(content, **flags)


def _extra_tokens(settings: Mapping[str, object]) -> list[str]:
    """Return special tokens without a name."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    values = extra.values() if isinstance(extra, Mapping) else extra
    if not isinstance(values, list | type({}.values())):
        return []
    return [token for token in map(_content, values) if token is not None]


def _content(value: object) -> str | None:
    """Return the text of a token, which may be an object that also has flags."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
