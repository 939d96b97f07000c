"""A checkpoint's tokenizer and chat template."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

import tokenizers

from cluster.serving.text.chat_template import ChatTemplates
from cluster.serving.text.literal_tokens import LiteralTokens, MarkedText
from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt
from cluster.serving.text.text_stream import TokenBytes
from pagedray.errors import CheckpointError, InvalidRequestError
from pagedray.files import check_is_no_pointer, has_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from cluster.serving.text.chat_template import ChatTemplate
    from pagedray.config import EngineConfig

__all__ = ["LibraryPanicError", "Tokenizer", "read_tokenizer"]

logger = logging.getLogger(__name__)

_MODULE = "pyo3_runtime"
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
_LIBRARIES = {
    "tokenizer.model": ("transformers", "sentencepiece"),
    "tekken.json": ("transformers",),
}


class LibraryPanicError(RuntimeError):
    """A library panicked, for example because of an invalid tokenizer file."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise LibraryPanicError instead of a panic."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != _MODULE:
            raise
        raise LibraryPanicError(f"The tokenizer library panicked: {error}") from error


class Tokenizer:
    """The tokenizer of one checkpoint; thread-safe.

    If the library panics, for example because of an invalid file, LibraryPanicError is raised.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        templates: ChatTemplates | None,
        pools: bool = False,
    ) -> None:
        """`special_tokens` maps names such as `eos_token` to tokens.

        With `pools`, any decoder is supported: the tokens of a pooling model are never streamed as
        text.
        """
        self._tokenizer = tokenizer
        self._templates = templates
        self.special_tokens = special_tokens
        """Special tokens by names such as `eos_token`."""
        self._literals = None if templates is None else LiteralTokens(tokenizer)
        self._token_bytes = None if pools else TokenBytes(tokenizer)
        eos_id = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
        self.eos_token_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)
        """End-of-sequence tokens according to the tokenizer."""
        bos_id = tokenizer.token_to_id(special_tokens.get("bos_token", ""))
        self.bos_token_ids: tuple[int, ...] = () if bos_id is None else (bos_id,)
        """The begin-of-sequence token, if any."""
        self.infilling = detect_infilling(tokenizer.token_to_id)
        """Encodes fill-in-the-middle prompts; None if the model has no tokens for them."""
        vocabulary = tokenizer.get_vocab()
        self.max_token_length = max(map(len, vocabulary), default=1)
        """Characters of the longest token."""
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """One more than the highest token id."""

    @classmethod
    def from_folder(
        cls, folder: Path, *, pools: bool = False, chat_template: str | None = None
    ) -> Self:
        """Return the tokenizer of a checkpoint.

        `chat_template`, a file or a template, replaces the checkpoint's. Raises StartupError.
        """
        tokenizer = read_tokenizer(folder)
        path = folder / "tokenizer_config.json"
        settings = _read_settings(path)
        special_tokens = special_tokens_of(settings)
        with panics_as_errors():
            add_configured_tokens(tokenizer, settings, path)
        return cls(
            tokenizer,
            special_tokens=special_tokens,
            templates=(
                ChatTemplates.from_folder(folder, settings, special_tokens)
                if chat_template is None
                else ChatTemplates.from_option(chat_template, special_tokens)
            ),
            pools=pools,
        )

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """Return the tokenizer of an engine. Raises StartupError."""
        model = config.model
        return cls.from_folder(model.folder, pools=model.pools, chat_template=config.chat_template)

    @property
    def token_bytes(self) -> TokenBytes:
        """The bytes of tokens; only for decoder models."""
        assert self._token_bytes is not None
        return self._token_bytes

    def token_id_of(self, token: str) -> int | None:
        """Return the id of a token, or None if the text is not a token."""
        return self._tokenizer.token_to_id(token)

    def token_strings(self, token_ids: Sequence[int]) -> list[str | None]:
        """Return tokens as the vocabulary spells them; None for an id without a token."""
        return list(map(self._tokenizer.id_to_token, token_ids))

    def disable_cache(self) -> None:
        """Disable the cache of words: its timing would reveal other tenants' texts.

        Encoding natural text then takes 20% longer with a vocabulary of 3072 tokens.
        """
        # Models with a cache have this private method; the library has no public method.
        resize = getattr(self._tokenizer.model, "_resize_cache", None)
        if resize is not None:
            resize(0)

    @panics_as_errors()
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with special tokens such as a leading BOS."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    @functools.cached_property
    def num_special_tokens(self) -> tuple[int, int]:
        """How many special tokens `encode` adds before a text, and after it."""
        is_special = self._tokenizer.encode("a").special_tokens_mask
        num_text = is_special.count(0)
        num_before = is_special.index(0) if num_text else len(is_special)
        return num_before, len(is_special) - num_before - num_text

    @panics_as_errors()
    def encode_without_gil(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the result of `encode`, without holding the GIL."""
        # Only the batch method releases it.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encodings[0].ids

    @panics_as_errors()
    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Return the token ids of a pair of texts, with the special tokens that separate them.

        Also returns how many of them, from the first on, are of type 0. The GIL is not held.
        """
        encoding = self._tokenizer.encode_batch_fast([(first, second)])[0]
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else len(types)

    def _marker(self) -> LiteralTokens:
        if self._literals is None:
            self._literals = LiteralTokens(self._tokenizer)
        return self._literals

    @panics_as_errors()
    def mark_texts(self, texts: Sequence[str]) -> tuple[list[str], Mapping[str, str]]:
        """Return texts with marks for their special tokens, and the token of each mark."""
        messages = tuple(ChatMessage(role="user", content=text) for text in texts)
        marked, originals = self._marker().mark(ChatPrompt(messages))
        return [message.content for message in marked.messages], originals

    @panics_as_errors()
    def encode_marked(self, marked: MarkedText) -> list[int]:
        """Return the token ids of a rendered conversation, without holding the GIL.

        The texts that marks stand for are encoded without special tokens. Raises
        InvalidRequestError.
        """
        if self._literals is None or not marked.originals:
            return self.encode_without_gil(marked.text, add_special_tokens=False)
        return self._literals.encode(marked)

    @panics_as_errors()
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def render_chat(self, prompt: ChatPrompt) -> str:
        """Return the prompt of a conversation, with special tokens as text.

        Raises InvalidRequestError.
        """
        return self._template_for(prompt).render(prompt)

    @panics_as_errors()
    def render_marked_chat(
        self,
        prompt: ChatPrompt,
        *,
        render: Callable[[ChatPrompt], str] | None = None,
        marks_special_tokens: bool,
    ) -> MarkedText:
        """Run `render`, if requested with marks for the messages' special tokens.

        `render` is `render_chat` by default. Raises InvalidRequestError.
        """
        originals: Mapping[str, str] = {}
        if marks_special_tokens and (self._templates is not None or render is not None):
            prompt, originals = self._marker().mark(prompt)
        render = self.render_chat if render is None else render
        return MarkedText(render(prompt), originals)

    def _template_for(self, prompt: ChatPrompt) -> ChatTemplate:
        if self._templates is None:
            raise InvalidRequestError(
                "The model has no chat template: set the option chat_template, or use completions "
                "instead of chat.",
                param="messages",
            )
        return self._templates.template_for(prompt.tools)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered without a template of the request."""
        return self._templates is not None

    def template_variables(self, *, has_tools: bool) -> frozenset[str]:
        """Return the template variables that a request may set; none without a template."""
        if self._templates is None:
            return frozenset()
        return self._templates.variables(has_tools=has_tools)

    def keeps_system_messages(self, *, has_tools: bool) -> bool:
        """Return whether the chat template writes later system messages at their places."""
        return self._templates is None or self._templates.keeps_system_messages(has_tools=has_tools)

    @property
    def dropped_roles(self) -> tuple[str, ...]:
        """The roles with messages that the chat template writes without their text."""
        return () if self._templates is None else self._templates.dropped_roles

    @property
    def template_source(self) -> str:
        """The source of the chat template for tools; empty if there is none."""
        return "" if self._templates is None else self._templates.tool_source


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Return the library's tokenizer of a checkpoint, without truncation and padding.

    Raises CheckpointError.
    """
    tokenizer = _read(folder)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not has_file(path):
        other = convertible_file(folder)
        if other is None:
            raise CheckpointError(f"{path} is missing; the checkpoint needs a tokenizer.")
        with panics_as_errors():
            return converted_tokenizer(other)
    try:
        with panics_as_errors():
            return tokenizers.Tokenizer.from_file(str(path))
    # The library raises no more specific error.
    except Exception as error:
        check_is_no_pointer(path)
        raise CheckpointError(f"{path} is not a valid tokenizer: {_one_line(error)}.") from error


def _read_settings(path: Path) -> dict[str, object]:
    if not has_file(path):
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {_one_line(error)}.") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} must contain a JSON object.")
    return settings


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")


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


def convertible_file(folder: Path) -> Path | None:
    """Return the file that holds the tokenizer in another format, if any."""
    paths = (folder / name for name in _LIBRARIES)
    return next(filter(has_file, paths), None)


def converted_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of such a file. Raises CheckpointError."""
    missing = [name for name in _LIBRARIES[path.name] if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(
            f"{path.parent} has no tokenizer.json, and its {path.name} cannot be converted without "
            f"{' and '.join(missing)}; run: pip install {' '.join(_LIBRARIES[path.name])}"
        )
    # The import takes seconds, which only these checkpoints need.
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(
            path.parent, local_files_only=True, trust_remote_code=False, use_fast=True
        )
        tokenizer = tokenizers.Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    # Whatever the library raises for a file that it cannot read.
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise CheckpointError(
            f"{path} cannot be converted by transformers: {reason or type(error).__name__}."
        ) from error
    logger.info("Converted the tokenizer of %s", path)
    return tokenizer


@dataclass(frozen=True, slots=True)
class _Marks:
    """The special tokens of a model family, in their order in the prompt."""

    first: str
    second: str
    last: str = ""
    is_suffix_first: bool = False
    is_of_parts: bool = False
    """Whether texts are encoded separately from the marks, the suffix without a leading space.

    SentencePiece tokenizers begin every text with a space, which precedes no suffix in the model's
    training data.
    """


_FORMATS = (
    # Qwen2.5-Coder and the Qwen models that share its tokenizer, CodeGemma, Granite 4.
    _Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # StarCoder, StarCoder2, Granite Code.
    _Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    # DeepSeek-Coder, and DeepSeek models that share its tokens.
    _Marks(
        "<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"
    ),
    # Seed-Coder.
    _Marks("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>", is_suffix_first=True),
    # The CodeLlama models that are trained for it; the others lack the tokens.
    _Marks("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", is_of_parts=True),
    # Codestral, and the Mistral models that share its tokens.
    _Marks("[SUFFIX]", "[PREFIX]", is_suffix_first=True, is_of_parts=True),
)

_ENDS = (
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<repo_name>",
    "<file_sep>",
    "\u2581<EOT>",
    "[MIDDLE]",
)
"""Tokens that end the middle, or begin something else after it."""

_LEAD = "\u263a"
"""A character before the suffix, which gets the leading space; its tokens are removed."""


class _Encoder(Protocol):
    """The part of a tokenizer that prompts need."""

    def encode_without_gil(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""

    @property
    def bos_token_ids(self) -> tuple[int, ...]:
        """The token that begins a prompt, if any."""


@dataclass(frozen=True, slots=True)
class Infilling:
    """Encodes the fill-in-the-middle prompts of one model."""

    _marks: _Marks
    _mark_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    """The tokens that end the middle, in addition to the tokens that end every output."""

    def encode(
        self, prefix: str, suffix: str, encoder: _Encoder, *, add_special_tokens: bool
    ) -> list[int]:
        """Return the tokens after which the model generates the middle.

        Without `add_special_tokens`, the marks are the only special tokens.
        """
        marks = self._marks
        if not marks.is_of_parts:
            before, after = (suffix, prefix) if marks.is_suffix_first else (prefix, suffix)
            return encoder.encode_without_gil(
                f"{marks.first}{before}{marks.second}{after}{marks.last}",
                add_special_tokens=add_special_tokens,
            )
        first, second, *last = self._mark_ids
        prefix_ids, lead_ids, suffix_ids = (
            encoder.encode_without_gil(text, add_special_tokens=False)
            for text in (prefix, _LEAD, _LEAD + suffix)
        )
        del suffix_ids[: len(lead_ids)]
        before_ids, after_ids = (
            (suffix_ids, prefix_ids) if marks.is_suffix_first else (prefix_ids, suffix_ids)
        )
        start_ids = encoder.bos_token_ids if add_special_tokens else ()
        return [*start_ids, first, *before_ids, second, *after_ids, *last]


def detect_infilling(token_id_of: Callable[[str], int | None]) -> Infilling | None:
    """Return the encoder of a model's prompts, or None if its tokenizer lacks their tokens."""
    ends = [one for one in map(token_id_of, _ENDS) if one is not None]
    for marks in _FORMATS:
        names = [name for name in (marks.first, marks.second, marks.last) if name]
        ids = [one for one in map(token_id_of, names) if one is not None]
        if len(ids) == len(names):
            return Infilling(marks, tuple(ids), (*ids, *ends))
    return None
