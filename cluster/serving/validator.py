"""The one validator behind every front: what a client sent becomes requests, or is refused.

Fronts only read their protocol. What a field may be, and the words of a refusal, is
decided here and in `pagedray.request`, so that every front says the same.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.serving.inputs import ChatPrompt, GenerationInput, Prompt
from pagedray.errors import InvalidRequestError, UnknownModelError
from pagedray.request import MAX_N, Request, SamplingParams, check_token_ids

if TYPE_CHECKING:
    from cluster.serving.text_pool import TextPool
    from cluster.serving.tokenizer import Tokenizer
    from pagedray.config import EngineConfig

__all__ = ["Validator"]

_MAX_CLIENT_ID_LENGTH = 128
_MAX_PRIORITY = 2**31 - 1
_LONG_TEXT = 2048
"""Characters of a call from which on they are tokenized in a thread."""
_LONG_CHAT = 64
"""Messages from which on a template writes them in a thread."""


class Validator:
    """Knows the limits of one model and tokenizes what keeps them."""

    def __init__(
        self, config: EngineConfig, tokenizer: Tokenizer, *, text_pool: TextPool | None = None
    ) -> None:
        """Without a pool long texts are worked on at once, which an event loop cannot afford."""
        self._tokenizer = tokenizer
        self._text_pool = text_pool
        self._model_name = config.model.name
        self._vocab_size = config.model.vocab_size
        self._context = config.max_model_len
        self._eos_token_ids = tuple(
            dict.fromkeys((*config.model.eos_token_ids, *tokenizer.eos_token_ids))
        )

    async def validate(self, given: GenerationInput) -> tuple[Request, ...]:
        """Return one request for each prompt. Raises RequestError."""
        self.check_model(given.model)
        _check_client_id(given.client_id)
        _check_priority(given.priority)
        sampling = self._read_sampling(given)
        _check_num_sequences(len(given.prompts), sampling.n)
        is_long = sum(map(_num_characters, given.prompts)) >= _LONG_TEXT
        requests: list[Request] = []
        for prompt in given.prompts:
            requests.append(await self._request(prompt, sampling, given, is_long=is_long))
            # Others come in between; many prompts take their time.
            await asyncio.sleep(0)
        return tuple(requests)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises InvalidRequestError or OverloadedError."""
        _check_unicode(text, "text")
        is_long = len(text) >= _LONG_TEXT
        return list(
            await self._encode(text, "text", add_special_tokens=add_special_tokens, is_long=is_long)
        )

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError unless the model is served here or none is named."""
        if name is not None and name != self._model_name:
            raise UnknownModelError(name[:_MAX_CLIENT_ID_LENGTH], self._model_name)

    def _read_sampling(self, given: GenerationInput) -> SamplingParams:
        # SamplingParams checks the type and range of every field itself.
        fields: dict[str, Any] = dict(given.sampling)
        # What the prompt leaves room for is known after tokenizing.
        fields.setdefault("max_tokens", self._context)
        sampling = SamplingParams(**fields)
        for text in sampling.stop:
            _check_unicode(text, "stop")
        check_token_ids(sampling.stop_token_ids, self._vocab_size, "stop_token_ids")
        check_token_ids(tuple(sampling.logit_bias), self._vocab_size, "logit_bias")
        return sampling

    async def _request(
        self, prompt: Prompt, sampling: SamplingParams, given: GenerationInput, *, is_long: bool
    ) -> Request:
        token_ids = await self._read_prompt(prompt, is_long=is_long)
        return Request(
            id=secrets.token_hex(16),
            prompt_token_ids=token_ids,
            sampling=self._with_max_tokens(sampling, len(token_ids), given),
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            eos_token_ids=self._eos_token_ids,
            tenant=given.tenant,
            priority=given.priority,
            deadline_s=given.deadline_s,
        )

    async def _read_prompt(self, prompt: Prompt, *, is_long: bool) -> tuple[int, ...]:
        if isinstance(prompt, ChatPrompt):
            return await self._read_chat(prompt)
        if not prompt:
            raise InvalidRequestError("prompt must not be empty.", param="prompt")
        if isinstance(prompt, str):
            _check_unicode(prompt, "prompt")
            token_ids = await self._encode(
                prompt, "prompt", add_special_tokens=True, is_long=is_long
            )
            self._check_prompt_length(len(token_ids), "prompt")
            return token_ids
        self._check_prompt_length(len(prompt), "prompt")
        check_token_ids(prompt, self._vocab_size, "prompt")
        return prompt

    async def _read_chat(self, prompt: ChatPrompt) -> tuple[int, ...]:
        if not prompt.messages:
            raise InvalidRequestError("messages must not be empty.", param="messages")
        for message in prompt.messages:
            _check_unicode(message.content, "messages")
        if self._text_pool is None or len(prompt.messages) < _LONG_CHAT:
            text = self._tokenizer.render_chat(prompt.messages)
        else:
            text = await self._text_pool.run(self._tokenizer.render_chat, prompt.messages)
        # The template writes the special tokens itself.
        token_ids = await self._encode(
            text, "messages", add_special_tokens=False, is_long=len(text) >= _LONG_TEXT
        )
        self._check_prompt_length(len(token_ids), "messages")
        return token_ids

    async def _encode(
        self, text: str, param: str, *, add_special_tokens: bool, is_long: bool
    ) -> tuple[int, ...]:
        # A longer text cannot fit, whatever its tokens: they need not be counted.
        most = self._context * self._tokenizer.max_token_length
        if len(text) > most:
            raise InvalidRequestError(
                f"{param} has {len(text)} characters, more than the {most} that the context of "
                f"{self._context} tokens can hold.",
                param=param,
            )
        if self._text_pool is None or not is_long:
            return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        encode = self._tokenizer.encode_unlocked
        return tuple(await self._text_pool.run(encode, text, add_special_tokens=add_special_tokens))

    def _check_prompt_length(self, num_tokens: int, param: str) -> None:
        if num_tokens == 0:
            raise InvalidRequestError(f"{param} must not be empty.", param=param)
        if num_tokens + 1 > self._context:
            raise InvalidRequestError(
                f"{param} has {num_tokens} tokens, but the context of {self._context} tokens has "
                f"room for {self._context - 1} and one generated token.",
                param=param,
            )

    def _with_max_tokens(
        self, sampling: SamplingParams, num_prompt_tokens: int, given: GenerationInput
    ) -> SamplingParams:
        room = self._context - num_prompt_tokens
        if "max_tokens" in given.sampling:
            if sampling.max_tokens > room:
                raise InvalidRequestError(
                    f"max_tokens must be from 1 to {room}, not {sampling.max_tokens}: the prompt "
                    f"has {num_prompt_tokens} tokens and the context {self._context}.",
                    param="max_tokens",
                )
            return sampling
        default = room if given.default_max_tokens is None else given.default_max_tokens
        default = max(default, sampling.min_tokens)
        return msgspec.structs.replace(sampling, max_tokens=min(default, room))


def _num_characters(prompt: Prompt) -> int:
    return len(prompt) if isinstance(prompt, str) else 0


def _check_client_id(client_id: str | None) -> None:
    if client_id is None:
        return
    if not (0 < len(client_id) <= _MAX_CLIENT_ID_LENGTH and client_id.isprintable()):
        raise InvalidRequestError(
            f"request_id must have 1 to {_MAX_CLIENT_ID_LENGTH} printable characters.",
            param="request_id",
        )


def _check_priority(priority: int) -> None:
    if not -_MAX_PRIORITY - 1 <= priority <= _MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be from {-_MAX_PRIORITY - 1} to {_MAX_PRIORITY}, not {priority}.",
            param="priority",
        )


def _check_num_sequences(num_prompts: int, n: int) -> None:
    if num_prompts == 0:
        raise InvalidRequestError("prompt must not be empty.", param="prompt")
    if num_prompts * n > MAX_N:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n = {n} ask for {num_prompts * n} continuations; "
            f"at most {MAX_N} are allowed.",
            param="prompt" if num_prompts > 1 else "n",
        )


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} holds a lone surrogate, which is no character.", param=param
        ) from error
