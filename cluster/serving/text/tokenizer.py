"""A checkpoint's tokenizer: text to token ids, messages to text, token ids to text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

import tokenizers

from cluster.serving.text.chat_template import ChatMessage, ChatTemplate
from cluster.serving.text.token_bytes import TokenBytes
from pagedray.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Tokenizer", "read_tokenizer"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class Tokenizer:
    """The tokenizer of one checkpoint; any thread may use it."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        template: ChatTemplate | None,
        is_encoder: bool = False,
    ) -> None:
        """`special_tokens` maps names such as `eos_token` to tokens.

        An encoder's tokens never stream as text, so that its decoder may be of any kind.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._token_bytes = None if is_encoder else TokenBytes(tokenizer)
        eos_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
        self.eos_token_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)
        """The tokens that the tokenizer itself calls the end of a sequence."""
        self.max_token_length = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters of the longest token."""

    @classmethod
    def from_folder(cls, folder: Path, *, is_encoder: bool = False) -> Self:
        """Return the tokenizer of a checkpoint. Raises CheckpointError."""
        tokenizer = read_tokenizer(folder)
        settings = _read_settings(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(settings)
        return cls(
            tokenizer,
            special_tokens=special_tokens,
            template=_read_template(folder, settings, special_tokens),
            is_encoder=is_encoder,
        )

    @property
    def token_bytes(self) -> TokenBytes:
        """What each token of a decoder stands for."""
        assert self._token_bytes is not None
        return self._token_bytes

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def disable_cache(self) -> None:
        """Keep no words of the texts that are encoded: the time of a text must not tell of others.

        Natural text takes some more time then: a fifth, for a vocabulary of 3072 tokens.
        """
        # Models that keep words have this method, and the library has no other way.
        resize = getattr(self._tokenizer.model, "_resize_cache", None)
        if resize is not None:
            resize(0)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, with what the model wants around a prompt."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_without_gil(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return what `encode` does, and let other threads run meanwhile."""
        # Only the batch call lets go of the interpreter's lock while it works.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encodings[0].ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        adds_generation_prompt: bool = True,
        continues_final_message: bool = False,
    ) -> str:
        """Return the prompt text of a conversation, special tokens written out.

        Raises InvalidRequestError.
        """
        if self._template is None:
            raise InvalidRequestError(
                "The model has no chat template; use completions.", param="messages"
            )
        return self._template.render(
            messages,
            tools=tools,
            adds_generation_prompt=adds_generation_prompt,
            continues_final_message=continues_final_message,
        )

    @property
    def template_source(self) -> str:
        """The chat template as the checkpoint writes it; nothing if it has none."""
        return "" if self._template is None else self._template.source


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a checkpoint, which neither cuts nor pads.

    Raises CheckpointError.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; a checkpoint needs its tokenizer.")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    # The library raises nothing more exact.
    except Exception as error:
        raise CheckpointError(f"{path} is not a tokenizer: {_one_line(error)}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_settings(path: Path) -> dict[str, object]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {_one_line(error)}.") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return settings


def _special_tokens(settings: Mapping[str, object]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = settings.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _read_template(
    folder: Path, settings: Mapping[str, object], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8 text.") from error
        return ChatTemplate(source, special_tokens, origin=str(path))
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry for entry in found if isinstance(entry, Mapping)}
        found = named.get("default", {}).get("template")
    if not isinstance(found, str):
        return None
    return ChatTemplate(found, special_tokens, origin=str(folder / "tokenizer_config.json"))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
