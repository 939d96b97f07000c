"""Rebuilds tokenizer.json and tokenizer_config.json from the metadata of a GGUF file.

A vocabulary of which the file does not tell exactly how it splits texts is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from workers.weights.gguf_file import Value

__all__ = ["tokenizer_files"]

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "\u2581"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_LETTERS = rf"{_FIRST}\p{{L}}+"
_CASED = (f"{_FIRST}{_UPPER}*{_LOWER}+", f"{_FIRST}{_UPPER}+{_LOWER}*")
_LLAMA3 = rf"{_WORD}|{_LETTERS}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_END}"
_QWEN2 = rf"{_WORD}|{_LETTERS}|\p{{N}}|{_SYMBOLS}|{_END}"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SLASHES}|{_END}"
_O200K = rf"{_CASED[0]}{_WORD}?|{_CASED[1]}{_WORD}?|\p{{N}}{{1,3}}|{_SLASHES}|{_END}"
# As published in the tokenizer.json of the models that these names stand for; None is the pattern
# of GPT-2 with each digit by itself.
_PATTERNS: Mapping[str, str | None] = {
    "dbrx": _LLAMA3,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _O200K,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "refact": None,
    "smollm": None,
    "starcoder": None,
    "tekken": _TEKKEN,
}
_LLAMA3_NAMES = ("llama-bpe", "llama-v3", "llama3")
_NORMALIZED = ("deepseek-r1-qwen", "qwen2")
"""Vocabularies of texts in the composed form of Unicode."""


def tokenizer_files(path: Path, metadata: Mapping[str, Value]) -> dict[str, Any]:  # Any: JSON
    """Return the content of both files by their names. Raises CheckpointError."""
    vocabulary = _Vocabulary(path, metadata)
    tokenizer = vocabulary.tokenizer()
    try:
        tokenizers.Tokenizer.from_str(json.dumps(tokenizer))
    # The library raises no more specific error.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise CheckpointError(f"{path}: the tokenizer cannot be rebuilt: {reason}.") from None
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": vocabulary.settings()}


def _is_utf8(text: str) -> bool:
    """Return whether a text of the file was UTF-8: other bytes are lone surrogates."""
    return not any("\udc80" <= character <= "\udcff" for character in text)


class _Vocabulary:
    """The fields `tokenizer.*`. Methods raise CheckpointError."""

    def __init__(self, path: Path, metadata: Mapping[str, Value]) -> None:
        self._path = path
        self._metadata = metadata
        tokens = self._field("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise self._error("tokens", "must be a list of strings")
        self._tokens: list[str] = tokens
        if not _is_utf8("".join(tokens)):
            raise self._error("tokens", "has a token that is not UTF-8")
        if len(set(tokens)) != len(tokens):
            raise self._error("tokens", "has a token twice, so that it cannot be rebuilt")
        self._types = self._numbers("token_type")

    def tokenizer(self) -> dict[str, Any]:  # Any: JSON
        """Return tokenizer.json."""
        kind = self._field("model")
        if kind == "gpt2":
            parts = self._byte_level()
        elif kind == "llama":
            parts = self._sentencepiece()
        else:
            raise self._error("model", f"{kind!r:.60} is not supported; llama and gpt2 are")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added_tokens(),
            **parts,
            "post_processor": self._post_processor(adds_bos=kind == "llama"),
        }

    def settings(self) -> dict[str, Any]:  # Any: JSON
        """Return tokenizer_config.json."""
        settings: dict[str, Any] = {  # Any: JSON
            f"{name}_token": self._tokens[token_id]
            for name, key in (
                ("bos", "bos"),
                ("eos", "eos"),
                ("unk", "unknown"),
                ("pad", "padding"),
            )
            if (token_id := self._token_id(key)) is not None
        }
        prefix = "tokenizer.chat_template"
        templates = {
            key.removeprefix(prefix).removeprefix("."): value
            for key, value in self._metadata.items()
            if key.startswith(prefix) and isinstance(value, str)
        }
        if not all(map(_is_utf8, (*templates, *templates.values()))):
            raise CheckpointError(f"{self._path}: {prefix} is not UTF-8.")
        if len(templates) > 1:
            settings["chat_template"] = [
                {"name": name or "default", "template": template}
                for name, template in templates.items()
            ]
        elif templates:
            settings["chat_template"] = next(iter(templates.values()))
        return settings

    def _byte_level(self) -> dict[str, Any]:  # Any: JSON
        name, merges = self._field("pre"), self._field("merges")
        if name not in _PATTERNS and name != "gpt-2":
            raise self._error(
                "pre", f"{name!r:.60} is not supported; {', '.join(('gpt-2', *_PATTERNS))} are"
            )
        if not isinstance(merges, list):
            raise self._error("merges", "must be a list of strings")
        pairs = [merge.split(" ") for merge in merges]
        if any(len(pair) != 2 for pair in pairs):
            raise self._error("merges", "must have two tokens with a space between them")
        pattern = _PATTERNS.get(str(name))
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        splits: list[dict[str, Any]] = []  # Any: JSON
        if pattern is not None:
            behavior = {"behavior": "Isolated", "invert": False}
            splits = [{"type": "Split", "pattern": {"Regex": pattern}, **behavior}]
        elif name != "gpt-2":
            splits = [{"type": "Digits", "individual_digits": True}]
        last = {**byte_level, "use_regex": pattern is None}
        return {
            "normalizer": {"type": "NFC"} if name in _NORMALIZED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, last]},
            "decoder": {**byte_level, "use_regex": True},
            # Llama 3 takes a word that is a token as it is.
            "model": self._bpe(pairs, ignore_merges=name in _LLAMA3_NAMES),
        }

    def _sentencepiece(self) -> dict[str, Any]:  # Any: JSON
        has_prefix = self._flag("add_space_prefix", default=True)
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        normalizers = [{"type": "Prepend", "prepend": _SPACE}, replace]
        decoders: list[dict[str, Any]] = [  # Any: JSON
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if has_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        unknown = self._token_id("unknown")
        return {
            "normalizer": {
                "type": "Sequence",
                "normalizers": normalizers if has_prefix else [replace],
            },
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": self._bpe(
                self._merges_by_score(),
                unk_token=None if unknown is None else self._tokens[unknown],
                fuse_unk=True,
                byte_fallback=bool((self._types == _BYTE).any()),
            ),
        }

    def _merges_by_score(self) -> list[list[str]]:
        """Return all pairs of tokens that are a token together, those of the best token first."""
        scores = self._numbers("scores")
        if not np.isfinite(scores).all():
            raise self._error("scores", "has a number that is not finite")
        vocabulary = set(self._tokens)
        order = np.argsort(-scores.astype(np.float64), kind="stable").tolist()
        return [
            [token[:cut], token[cut:]]
            for token in map(self._tokens.__getitem__, order)
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        ]

    def _bpe(self, merges: list[list[str]], **options: Any) -> dict[str, Any]:  # Any: JSON
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            **options,
            "vocab": {token: token_id for token_id, token in enumerate(self._tokens)},
            "merges": merges,
        }

    def _added_tokens(self) -> list[dict[str, Any]]:  # Any: JSON
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": token_id, "content": self._tokens[token_id], **flags, "special": is_special}
            for token_id, kind in enumerate(self._types.tolist())
            if (is_special := kind in (_UNKNOWN, _CONTROL)) or kind == _USER_DEFINED
        ]

    def _post_processor(self, *, adds_bos: bool) -> dict[str, Any] | None:  # Any: JSON
        ends: dict[str, str] = {}
        # llama.cpp adds the token to texts of Llama 3, whose files do not say so.
        adds_bos = adds_bos or self._metadata.get("tokenizer.ggml.pre") in _LLAMA3_NAMES
        for name, default in (("bos", adds_bos), ("eos", False)):
            token_id = self._token_id(name)
            if self._flag(f"add_{name}_token", default=default) and token_id is not None:
                ends[name] = self._tokens[token_id]
        if not ends:
            return None

        def sequence(*names: str) -> list[dict[str, Any]]:  # Any: JSON
            parts: list[dict[str, Any]] = []  # Any: JSON
            for number, name in enumerate(names):
                special = {"type_id": number}
                if "bos" in ends:
                    parts.append({"SpecialToken": {"id": ends["bos"], **special}})
                parts.append({"Sequence": {"id": name, **special}})
                if "eos" in ends:
                    parts.append({"SpecialToken": {"id": ends["eos"], **special}})
            return parts

        return {
            "type": "TemplateProcessing",
            "single": sequence("A"),
            "pair": sequence("A", "B"),
            "special_tokens": {
                token: {"id": token, "ids": [self._tokens.index(token)], "tokens": [token]}
                for token in ends.values()
            },
        }

    def _numbers(self, key: str) -> np.ndarray[Any, np.dtype[Any]]:  # Any: of any numeric type
        values = self._field(key)
        if not isinstance(values, np.ndarray) or len(values) != len(self._tokens):
            raise self._error(key, "must have a number for each token")
        return values

    def _token_id(self, name: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None or (name != "unknown" and value == 2**32 - 1):
            return None
        if not isinstance(value, int) or not 0 <= value < len(self._tokens):
            raise self._error(f"{name}_token_id", f"must be a token, not {value!r:.60}")
        return value

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, bool):
            raise self._error(key, "must be true or false")
        return value

    def _field(self, key: str) -> Value:
        try:
            return self._metadata[f"tokenizer.ggml.{key}"]
        except KeyError:
            raise self._error(key, "is missing, so that the tokenizer cannot be rebuilt") from None

    def _error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: tokenizer.ggml.{key} {problem}.")
