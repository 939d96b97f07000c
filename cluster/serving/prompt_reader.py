"""Converts prompts to token ids: texts are tokenized, conversations rendered first.

Long texts are tokenized in threads, so that they do not block the event loop.
"""

from __future__ import annotations

import functools
import logging
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from cluster.serving.inputs import MAX_CLIENT_ID_LENGTH, MAX_SALT_LENGTH, InfillPrompt, Prompt
from cluster.serving.intake import IntakeLimits, check_num_messages, request_size
from cluster.serving.text.literal_tokens import MarkedText
from cluster.serving.text.request_templates import ProgramTemplates, RequestTemplates
from cluster.serving.text.stable_positions import StablePositions
from cluster.serving.text.template_arguments import ChatPrompt
from pagedray.errors import ContextLengthError, InvalidRequestError, invalid_field
from pagedray.field_checks import check_token_ids
from pagedray.sampling_params import MAX_N
from pagedray.text import pluralize, quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from cluster.serving.inputs import GenerationInput
    from cluster.serving.text.text_pool import TextPool
    from cluster.serving.text.tokenizer import Tokenizer
    from pagedray.config import EngineConfig

__all__ = [
    "DEFAULT_INSTRUCTION",
    "PromptReader",
    "are_long",
    "check_call",
    "check_num_sequences",
    "check_truncation",
    "check_unicode",
    "truncated",
    "warn_of_dropped_texts",
    "warn_of_unknown_tokens",
]

logger = logging.getLogger(__name__)

_LONG_TEXT = 2048
"""A call with this many characters is tokenized in a thread."""
_LONG_CHAT = 64
"""With this many messages and tools, or tool calls, a chat template is rendered in a thread."""
_LONG_CONTENT = 2**15
"""With messages of this many characters, it is rendered in a thread too."""
_LONG_VALUES = 2**13
"""So it is with this many bytes of tools and of arguments of calls, which are many short texts."""
_LONGEST_TRUNCATED = 2**18
"""Characters of a text that is truncated once it is tokenized, even if the context is short.
Tokenizing takes up to 300 bytes for each of them."""
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction for the model unless the client sends another."""
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"

_MAX_PRIORITY = 2**31 - 1


class PromptReader:
    """Reads prompts with the tokenizer and within the context of one model."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        text_pool: TextPool | None = None,
        request_templates: RequestTemplates | None = None,
    ) -> None:
        """Without a pool, long texts are tokenized in place, which blocks an event loop.

        Without `request_templates`, a template of a request is rejected.
        """
        self._tokenizer = tokenizer
        self._text_pool = text_pool
        self._vocab_size = config.model.vocab_size
        self._has_unknown_tokens = tokenizer.vocab_size > self._vocab_size
        """Whether a text may contain tokens that the model does not know."""
        self._context = config.max_model_len
        self._size = request_size(config, IntakeLimits())
        self._request_templates = request_templates
        self._program_templates = ProgramTemplates(tokenizer.special_tokens)
        self._stable_positions = StablePositions(tokenizer)
        self._marks_special_tokens = config.message_special_tokens == "text"

    async def read_prompt(
        self,
        prompt: Prompt,
        *,
        is_long: bool,
        tenant: str,
        add_special_tokens: bool = True,
        param: str = "prompt",
        is_truncated: bool = False,
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt; the caller checks how many there are.

        `is_long` is `are_long` of all prompts of the call. A text `is_truncated` if the caller
        shortens its token ids; it may be longer than the context. Raises InvalidRequestError, and
        OverloadedError if too many long texts of the tenant wait.
        """
        if isinstance(prompt, ChatPrompt):
            return await self._read_chat(prompt, tenant)
        if isinstance(prompt, InfillPrompt):
            return await self._read_infill(
                prompt, param, add_special_tokens=add_special_tokens, is_long=is_long, tenant=tenant
            )
        if isinstance(prompt, str):
            check_unicode(prompt, param)
            return await self._encode(
                prompt,
                param,
                add_special_tokens=add_special_tokens,
                is_long=is_long,
                tenant=tenant,
                is_truncated=is_truncated,
            )
        # The caller rejects prompts that are too long.
        if len(prompt) <= self._context:
            check_token_ids(prompt, self._vocab_size, param)
        return prompt

    async def _read_infill(
        self,
        prompt: InfillPrompt,
        param: str,
        *,
        add_special_tokens: bool,
        is_long: bool,
        tenant: str,
    ) -> tuple[int, ...]:
        infilling = self._tokenizer.infilling
        if infilling is None:
            raise invalid_field(
                "suffix",
                "is not supported: the model's tokenizer has no known fill-in-the-middle tokens.",
            )
        for text, name in ((prompt.prefix, param), (prompt.suffix, "suffix")):
            check_unicode(text, name)
            self._check_length(text, name)
        encode = functools.partial(
            infilling.encode,
            prompt.prefix,
            prompt.suffix,
            self._tokenizer,
            add_special_tokens=add_special_tokens,
        )
        return await self._run_encode(encode, param, is_long=is_long, tenant=tenant)

    async def read_pair(
        self, pair: tuple[str, str], *, is_long: bool, tenant: str, params: tuple[str, str]
    ) -> tuple[tuple[int, ...], int]:
        """Return the token ids of a pair of texts, and how many of them are of type 0.

        The caller checks how many there are. `is_long` is `are_long` of all texts of the call.
        Raises the errors of `read_prompt`, with the name of the text.
        """
        self._check_pair(pair, params)
        encode = functools.partial(self._tokenizer.encode_pair, *pair)
        pool = self._text_pool if is_long else None
        token_ids, num_first_type = (
            encode() if pool is None else await pool.run_in_thread(tenant, encode)
        )
        if self._has_unknown_tokens:
            self._check_known(token_ids, params[1])
        return tuple(token_ids), num_first_type

    async def read_question(
        self,
        pair: tuple[str, str],
        instruction: str,
        *,
        is_long: bool,
        tenant: str,
        params: tuple[str, str],
    ) -> tuple[int, ...]:
        """Return the token ids of the question whether a document meets a query.

        Otherwise as `read_pair`. Special tokens in the texts are ordinary text, unless special
        tokens of messages are parsed.
        """
        self._check_pair(pair, params)
        check_unicode(instruction, "instruction")
        texts: Sequence[str] = (*pair, instruction)
        originals: Mapping[str, str] = {}
        if self._marks_special_tokens:
            texts, originals = self._tokenizer.mark_texts(texts)
        text = rerank_prompt(*texts)
        return await self._encode(
            text,
            params[1],
            add_special_tokens=False,
            is_long=is_long,
            tenant=tenant,
            marked=MarkedText(text, originals) if originals else None,
        )

    def _check_pair(self, pair: tuple[str, str], params: tuple[str, str]) -> None:
        for text, param in zip(pair, params, strict=True):
            check_unicode(text, param)
            self._check_length(text, param)

    async def _read_chat(self, prompt: ChatPrompt, tenant: str) -> tuple[int, ...]:
        if not prompt.messages:
            raise invalid_field("messages", "must not be empty.")
        # A message of the body may have become several.
        check_num_messages(len(prompt.messages), self._size)
        marked = await self._rendered(prompt, tenant)
        text = marked.restored
        if not text:
            raise InvalidRequestError(
                "The chat template renders these messages to an empty prompt.", param="messages"
            )
        check_unicode(text, "messages")
        # The template adds the special tokens.
        return await self._encode(
            text,
            "messages",
            add_special_tokens=False,
            is_long=len(text) >= _LONG_TEXT,
            tenant=tenant,
            marked=marked if marked.originals else None,
        )

    async def stable_positions(
        self, prompt: Prompt, num_tokens: int, *, tenant: str
    ) -> tuple[int, ...]:
        """Return the ends of prefixes that later prompts of a conversation will have, in tokens.

        There are none for a text, and for a conversation with a template of its own. `num_tokens`
        is the length of the prompt.
        """
        if not isinstance(prompt, ChatPrompt) or prompt.template is not None:
            return ()
        run = functools.partial(self._stable_positions.of, prompt, num_tokens)
        if self._text_pool is not None and _is_long_chat(prompt):
            return await self._text_pool.run_in_thread(tenant, run)
        return run()

    async def _rendered(self, prompt: ChatPrompt, tenant: str) -> MarkedText:
        """Return a conversation in the model's template, or in the template of its prompt."""
        run = functools.partial(
            self._tokenizer.render_marked_chat,
            prompt,
            marks_special_tokens=self._marks_special_tokens,
        )
        source = prompt.template
        if source is not None and not prompt.is_template_trusted:
            if self._request_templates is None:
                raise invalid_field(
                    "chat_template",
                    "is not supported: the server must be started with "
                    "--trust-request-chat-template.",
                )
            check_unicode(source, "chat_template")
            return await self._request_templates.run(
                source, tenant, lambda render: run(render=render)
            )
        if source is not None:
            run = functools.partial(run, render=self._program_templates.template_of(source).render)
        if self._text_pool is not None and _is_long_chat(prompt):
            return await self._text_pool.run_in_thread(tenant, run)
        return run()

    async def _encode(
        self,
        text: str,
        param: str,
        *,
        add_special_tokens: bool,
        is_long: bool,
        tenant: str,
        marked: MarkedText | None = None,
        is_truncated: bool = False,
    ) -> tuple[int, ...]:
        self._check_length(text, param, is_truncated=is_truncated)
        if marked is not None:
            encode = functools.partial(self._tokenizer.encode_marked, marked)
        else:
            encode_text = (
                self._tokenizer.encode_without_gil
                if is_long and self._text_pool is not None
                else self._tokenizer.encode
            )
            encode = functools.partial(encode_text, text, add_special_tokens=add_special_tokens)
        return await self._run_encode(encode, param, is_long=is_long, tenant=tenant)

    async def _run_encode(
        self, encode: Callable[[], list[int]], param: str, *, is_long: bool, tenant: str
    ) -> tuple[int, ...]:
        """Return the tokens of a text or a conversation, encoded in a thread if it is long."""
        pool = self._text_pool if is_long else None
        token_ids = encode() if pool is None else await pool.run_in_thread(tenant, encode)
        if self._has_unknown_tokens:
            self._check_known(token_ids, param)
        return tuple(token_ids)

    def _check_length(self, text: str, param: str, *, is_truncated: bool = False) -> None:
        """Raise ContextLengthError for a text that exceeds the context however it is tokenized.

        A text to be truncated may exceed it, within limits.
        """
        most = self._context * self._tokenizer.max_token_length
        allowed = f"the context of {self._context} tokens holds at most {most}"
        if is_truncated:
            most = max(most, _LONGEST_TRUNCATED)
            allowed = f"at most {most} can be truncated"
        if len(text) > most:
            raise ContextLengthError(
                f"{param} has {len(text)} characters, but {allowed}.", param=param
            )

    def _check_known(self, token_ids: Sequence[int], param: str) -> None:
        """Raise InvalidRequestError if a text contains a token that the model does not know."""
        highest = max(token_ids, default=0)
        if highest >= self._vocab_size:
            raise invalid_field(
                param,
                f"contains a text whose token id is {highest}, but the ids of the model are 0 to "
                f"{self._vocab_size - 1}.",
            )


def _is_long_chat(prompt: ChatPrompt) -> bool:
    """Return whether a conversation takes too long to render on the event loop."""
    messages = prompt.messages
    if prompt.template is not None:
        # It is not known how long its template takes.
        return True
    if len(messages) + len(prompt.tools) >= _LONG_CHAT:
        return True
    if sum(len(message.tool_calls) for message in messages) >= _LONG_CHAT:
        return True
    if sum(len(message.content) for message in messages) >= _LONG_CONTENT:
        return True
    arguments = (call.arguments for message in messages for call in message.tool_calls)
    extra = (message.extra for message in messages if message.extra)
    num_bytes = 0
    for value in chain(prompt.tools, [prompt.variables], arguments, extra):
        num_bytes += len(msgspec.json.encode(value))
        if num_bytes >= _LONG_VALUES:
            return True
    return False


def are_long(prompts: Iterable[Prompt]) -> bool:
    """Return whether a call's texts together are too long to tokenize on the event loop."""
    num_characters = 0
    for prompt in prompts:
        if isinstance(prompt, InfillPrompt):
            num_characters += len(prompt.prefix) + len(prompt.suffix)
        elif isinstance(prompt, str):
            num_characters += len(prompt)
    return num_characters >= _LONG_TEXT


def warn_of_unknown_tokens(config: EngineConfig, tokenizer: Tokenizer) -> None:
    """Log a warning if the tokenizer has tokens that the model does not know."""
    size = config.model.vocab_size
    if tokenizer.vocab_size > size:
        logger.warning(
            "The tokenizer of %s has token ids up to %s, but the vocabulary of the model has only "
            "%s tokens; texts with higher ids are rejected. Check that tokenizer.json belongs to "
            "the model.",
            config.model.name,
            tokenizer.vocab_size - 1,
            size,
        )


def warn_of_dropped_texts(config: EngineConfig, tokenizer: Tokenizer) -> None:
    """Log a warning if the chat template leaves out the text of messages."""
    roles = tokenizer.dropped_roles
    if roles:
        logger.warning(
            "The chat template of %s leaves out the text of messages with the role %s: the model "
            "will not read it. Check the template, or replace it with --chat-template.",
            config.model.name,
            " or ".join(roles),
        )


def check_unicode(text: str, param: str) -> None:
    """Raise InvalidRequestError if a text contains a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid_field(
            param, "contains a lone surrogate, which is not valid Unicode."
        ) from error


def rerank_prompt(query: str, document: str, instruction: str) -> str:
    """Return the prompt; the next token is the answer."""
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    return f"{_BEFORE}{pair}{_BEHIND}"


def check_call(given: GenerationInput) -> None:
    """Raise InvalidRequestError for an invalid id, priority, salt or truncation."""
    _check_client_id(given.client_id)
    _check_priority(given.priority)
    _check_cache_salt(given.cache_salt)
    check_truncation(given.max_prompt_tokens)


def check_num_sequences(num_prompts: int, n: int) -> None:
    """Raise InvalidRequestError if a call has no prompt or too many sequences."""
    if num_prompts == 0:
        raise invalid_field("prompt", "must not be empty.")
    if num_prompts * n > MAX_N:
        raise InvalidRequestError(
            f"n = {n} for {pluralize(num_prompts, 'prompt')} requests {num_prompts * n} sequences; "
            f"at most {MAX_N} are allowed.",
            param="prompt" if num_prompts > 1 else "n",
        )


def check_truncation(num_kept: int | None) -> None:
    """Raise InvalidRequestError if a prompt cannot be truncated to a number of tokens."""
    if num_kept is not None and num_kept != -1 and num_kept < 1:
        raise invalid_field(
            "truncate_prompt_tokens", f"must be -1, or 1 or more, not {quote(num_kept)}."
        )


def _check_client_id(client_id: str | None) -> None:
    if client_id is None:
        return
    if not (0 < len(client_id) <= MAX_CLIENT_ID_LENGTH and client_id.isprintable()):
        raise invalid_field(
            "request_id", f"must have 1 to {MAX_CLIENT_ID_LENGTH} printable characters."
        )


def _check_priority(priority: int) -> None:
    if not -_MAX_PRIORITY - 1 <= priority <= _MAX_PRIORITY:
        raise invalid_field(
            "priority", f"must be from {-_MAX_PRIORITY - 1} to {_MAX_PRIORITY}, not {priority}."
        )


def _check_cache_salt(salt: str) -> None:
    if len(salt) > MAX_SALT_LENGTH:
        raise invalid_field(
            "cache_salt", f"may have at most {MAX_SALT_LENGTH} characters, not {len(salt)}."
        )
    check_unicode(salt, "cache_salt")


def truncated(
    token_ids: tuple[int, ...],
    num_kept: int | None,
    *,
    truncates_end: bool,
    num_special: tuple[int, int] = (0, 0),
) -> tuple[int, ...]:
    """Return the beginning of a prompt, or its end; all of it if `num_kept` is None.

    `num_special` special tokens before and after its text are kept; there must be room for them.
    """
    if num_kept is None or len(token_ids) <= num_kept:
        return token_ids
    begin, end = num_special[0], len(token_ids) - num_special[1]
    num_removed = len(token_ids) - num_kept
    kept = (
        token_ids[begin : end - num_removed]
        if truncates_end
        else token_ids[begin + num_removed : end]
    )
    return token_ids[:begin] + kept + token_ids[end:]
