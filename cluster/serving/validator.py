"""The validator behind every frontend: it turns a client's input into requests or rejects it.

Frontends only parse their protocol. Limits and error messages are decided here and in
`pagedray.sampling_params`, so that they are the same over every frontend.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from cluster.serving.beam_search import check_beams_fit
from cluster.serving.inputs import (
    GenerationInput,
    InfillPrompt,
    Prompt,
    TokenizeInput,
    check_model_name,
)
from cluster.serving.prompt_reader import (
    PromptReader,
    are_long,
    check_call,
    check_num_sequences,
    check_unicode,
    truncated,
    warn_of_dropped_texts,
    warn_of_unknown_tokens,
)
from cluster.serving.reasoning import detect_reasoning, reasoning_after, reasoning_of, with_headers
from cluster.serving.text.request_templates import RequestTemplates
from cluster.serving.text.template_arguments import ChatPrompt
from cluster.structured.compiler import StructureCompiler
from cluster.structured.messages import limits_for
from cluster.structured.token_matchers import vocabulary_of
from pagedray.batch import pack_token_ids
from pagedray.errors import InvalidRequestError, OutputLengthError, PromptLengthError, invalid_field
from pagedray.field_checks import check_token_ids
from pagedray.request import Request
from pagedray.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams, Structure, StructureKind
from pagedray.text import pluralize, quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cluster.serving.continuation import Continuation
    from cluster.serving.reasoning import ReasoningFormat
    from cluster.serving.text.text_pool import TextPool
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.mask_client import CompiledGrammar
    from pagedray.config import EngineConfig
    from pagedray.request import Reasoning

__all__ = ["Validator"]

_NUM_LAST_TOKENS = 32
"""Tokens at the end of a prompt in which the marks of reasoning are looked for."""

_MAX_PROMPT_LOGPROBS = 2**18
"""Log-probabilities of all tokens of a prompt together."""
_PARAM = "bad_words"


class Validator:
    """Checks input against the limits of one model and tokenizes it."""

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        text_pool: TextPool | None = None,
        reasoning_format: ReasoningFormat | None = None,
        note_compile: Callable[[StructureKind, float], None] | None = None,
    ) -> None:
        """Without a pool, long texts are tokenized in place, which blocks an event loop.

        A `reasoning_format` of None is detected in the model's chat template.
        `note_compile` is called with the seconds that a call waited for its structure.
        """
        if not config.model.pools:
            warn_of_unknown_tokens(config, tokenizer)
            warn_of_dropped_texts(config, tokenizer)
        self._note_compile = note_compile
        self._tokenizer = tokenizer
        self.reasoning = reasoning_of(
            reasoning_format or detect_reasoning(tokenizer.template_source), tokenizer
        )
        """How the model marks its reasoning; None if it has none."""
        self._request_templates = (
            RequestTemplates(tokenizer.special_tokens)
            if config.trust_request_chat_template
            else None
        )
        self._reader = PromptReader(
            config, tokenizer, text_pool=text_pool, request_templates=self._request_templates
        )
        self._bad_words = BadWordReader(
            tokenizer, vocab_size=config.model.vocab_size, text_pool=text_pool
        )
        self._model = config.model
        self._vocab_size = config.model.vocab_size
        self._context = config.max_model_len
        self._speculates = config.speculation is not None
        self._queue_limits = config.scheduler
        self._sampling = SamplingReader(config)
        self._seeds = secrets.SystemRandom() if config.seed is None else random.Random(config.seed)
        self._structures = StructureCompiler(
            lambda: vocabulary_of(
                tokenizer.token_bytes, size=self._vocab_size, eos_token_ids=self._eos_token_ids
            ),
            limits=limits_for(config.structure_compile_s),
        )
        self._eos_token_ids = tuple(
            dict.fromkeys((*config.model.eos_token_ids, *tokenizer.eos_token_ids))
        )

    @property
    def can_limit_reasoning(self) -> bool:
        """Whether requests with a conversation may set `thinking_token_budget`."""
        return self.reasoning is not None and not self.reasoning.has_channels

    async def validate(self, given: GenerationInput) -> tuple[Request, ...]:
        """Return one request for each prompt. Raises RequestError."""
        requests = await self.read_requests(given)
        if self.needs_grammar(requests):
            requests = await self.with_grammar(requests, tenant=given.tenant)
        return requests

    async def read_requests(self, given: GenerationInput) -> tuple[Request, ...]:
        """Return one request for each prompt, without its grammar. Raises RequestError."""
        self.check_model(given.model)
        check_call(given)
        sampling = self._sampling.read_sampling(given)
        if sampling.thinking_token_budget is not None:
            check_reasoning_budget(self.reasoning, given.prompts)
        check_num_sequences(len(given.prompts), sampling.n)
        is_long = are_long(given.prompts)
        self._check_continuation(given, len(given.prompts) * sampling.n)
        bad_token_ids = await self._bad_words.read(sampling.bad_words, tenant=given.tenant)
        check_choice(sampling, bad_token_ids, self._end_token_ids(given.prompts[0]))
        requests: list[Request] = []
        for prompt_index, prompt in enumerate(given.prompts):
            request = await self._request(prompt, sampling, given, is_long=is_long)
            request = msgspec.structs.replace(request, bad_token_ids=bad_token_ids)
            requests.append(_continued(request, given.continuation, prompt_index))
            # Let other calls run between the prompts of a long list.
            await asyncio.sleep(0)
        if given.beam_length_penalty is not None:
            check_beams_fit(requests, sampling.n, self._queue_limits, param="n")
        return tuple(requests)

    @staticmethod
    def needs_grammar(requests: Sequence[Request]) -> bool:
        """Return whether the tokens of validated requests are masked."""
        return any(map(_needs_grammar, requests))

    async def with_grammar(
        self, requests: Sequence[Request], *, tenant: str
    ) -> tuple[Request, ...]:
        """Return validated requests of a call with their grammar. Raises RequestError.

        It is the most expensive part of a call's validation.
        """
        grammar = await self._compiled(requests[0].sampling.structure, tenant)
        return tuple(msgspec.structs.replace(request, grammar=grammar) for request in requests)

    async def _compiled(self, structure: Structure | None, tenant: str) -> CompiledGrammar:
        if structure is None:
            return await self._structures.compile(None, tenant=tenant)
        began_s = time.monotonic()
        try:
            return await self._structures.compile(structure, tenant=tenant)
        finally:
            if self._note_compile is not None:
                self._note_compile(structure.kind, time.monotonic() - began_s)

    def warm_up(self) -> None:
        """Start the processes that compile, before a request needs them."""
        self._structures.warm_up()
        if self._request_templates is not None:
            self._request_templates.warm_up()

    def stop_accepting(self) -> None:
        """End the calls that wait for a structure or a chat template to be compiled."""
        self._structures.stop_accepting()
        if self._request_templates is not None:
            self._request_templates.stop_accepting()

    def close(self) -> None:
        """End the processes that compile, if they run; blocks until they have ended."""
        self._structures.close()
        if self._request_templates is not None:
            self._request_templates.close()

    async def tokenize(self, given: TokenizeInput) -> tuple[int, ...]:
        """Return the token ids of a text or a conversation. Raises RequestError."""
        self.check_model(given.model)
        return await self._reader.read_prompt(
            given.prompt,
            is_long=are_long((given.prompt,)),
            tenant=given.tenant,
            add_special_tokens=given.add_special_tokens,
            param="text",
        )

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError if a model is named and not served here."""
        check_model_name(name, self._model)

    async def _request(
        self, prompt: Prompt, sampling: SamplingParams, given: GenerationInput, *, is_long: bool
    ) -> Request:
        token_ids = await self._read_prompt(prompt, sampling, given, is_long=is_long)
        check_prompt_logprobs(sampling.prompt_logprobs, len(token_ids))
        anchors: tuple[int, ...] = ()
        if self._model.has_states and given.max_prompt_tokens is None:
            anchors = await self._reader.stable_positions(
                prompt, len(token_ids), tenant=given.tenant
            )
        return Request(
            id=secrets.token_hex(16),
            prompt_token_ids=token_ids,
            sampling=self._sampling.with_max_tokens(sampling, len(token_ids), given),
            seed=self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed,
            eos_token_ids=self._end_token_ids(prompt),
            tenant=given.tenant,
            cache_salt=given.cache_salt,
            prediction=await self._prediction(given),
            anchors=anchors,
            priority=given.priority,
            deadline_s=given.deadline_s,
            reasoning=with_headers(
                self._reasoning_after(prompt, token_ids), sampling.structure, self._tokenizer
            ),
        )

    async def _prediction(self, given: GenerationInput) -> bytes:
        """Return the tokens that the client expects, as `pack_token_ids` returns them."""
        if not given.prediction or not self._speculates:
            return b""
        token_ids = await self._reader.read_prompt(
            given.prediction,
            is_long=are_long((given.prediction,)),
            tenant=given.tenant,
            add_special_tokens=False,
            param="prediction.content",
        )
        return pack_token_ids(token_ids[: self._context])

    def _end_token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the tokens that end the text after a prompt."""
        infilling = self._tokenizer.infilling
        if infilling is None or not isinstance(prompt, InfillPrompt):
            return self._eos_token_ids
        return tuple(dict.fromkeys((*self._eos_token_ids, *infilling.end_token_ids)))

    def _reasoning_after(self, prompt: Prompt, token_ids: tuple[int, ...]) -> Reasoning | None:
        """Return the marks of the reasoning that may follow a prompt, if any may."""
        if self.reasoning is None or not isinstance(prompt, ChatPrompt):
            return None
        if prompt.continues_final_message and prompt.messages[-1].content.strip():
            # Reasoning is possible only at the beginning of a message.
            return None
        end = self._tokenizer.decode(token_ids[-_NUM_LAST_TOKENS:], skip_special_tokens=False)
        return reasoning_after(self.reasoning, end)

    def _check_continuation(self, given: GenerationInput, num_sequences: int) -> None:
        """Raise InvalidRequestError if the tokens so far cannot belong to this call."""
        if not given.is_continued:
            return
        assert given.continuation is not None
        sequences = given.continuation.sequences
        if len(sequences) != num_sequences or all(one.is_finished for one in sequences):
            raise InvalidRequestError(
                f"A call of {num_sequences} sequences cannot continue from the tokens of "
                f"{len(sequences)}."
            )
        for one in sequences:
            check_token_ids(one.token_ids, self._vocab_size, "continuation")

    async def _read_prompt(
        self, prompt: Prompt, sampling: SamplingParams, given: GenerationInput, *, is_long: bool
    ) -> tuple[int, ...]:
        if prompt == "":
            raise invalid_field("prompt", "must not be empty.")
        if isinstance(prompt, tuple):
            # The reader does not check the ids of a prompt that exceeds the context.
            prompt = self._truncated(prompt, sampling, given)
        token_ids = await self._reader.read_prompt(
            prompt,
            is_long=is_long,
            tenant=given.tenant,
            add_special_tokens=given.adds_special_tokens,
        )
        token_ids = self._truncated(token_ids, sampling, given)
        param = "messages" if isinstance(prompt, ChatPrompt) else "prompt"
        self._check_prompt_length(len(token_ids), param)
        return token_ids

    def _truncated(
        self, token_ids: tuple[int, ...], sampling: SamplingParams, given: GenerationInput
    ) -> tuple[int, ...]:
        """Return the end of a prompt, or its beginning, if the client limits its length."""
        num_kept = given.max_prompt_tokens
        if num_kept is None:
            return token_ids
        if num_kept == -1:
            reserved = given.default_max_tokens or 1
            if "max_tokens" in given.sampling:
                reserved = sampling.max_tokens
            num_kept = max(1, self._context - reserved)
        return truncated(token_ids, num_kept, truncates_end=given.truncates_end)

    def _check_prompt_length(self, num_tokens: int, param: str) -> None:
        if num_tokens == 0:
            raise invalid_field(param, "must not be empty.")
        if num_tokens + 1 > self._context:
            raise PromptLengthError(num_tokens, self._context, param=param)


def _needs_grammar(request: Request) -> bool:
    """Return whether its tokens are masked."""
    sampling = request.sampling
    limits_reasoning = sampling.thinking_token_budget is not None and request.reasoning is not None
    return sampling.structure is not None or limits_reasoning


def _continued(request: Request, continuation: Continuation | None, prompt_index: int) -> Request:
    """Return a request that continues, and samples as in any replica."""
    if continuation is None:
        return request
    sampling = request.sampling
    generated = continuation.generated_token_ids(prompt_index, sampling.n)
    seed = continuation.seed_of(prompt_index) if sampling.seed is None else sampling.seed
    if generated and generated[0] != ():
        # The client received them with the first token.
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
    return msgspec.structs.replace(
        request, sampling=sampling, seed=seed, generated_token_ids=generated
    )


class SamplingReader:
    """Reads the sampling parameters of calls of one model."""

    def __init__(self, config: EngineConfig) -> None:
        self._defaults = dict(config.sampling_defaults)
        self._vocab_size = config.model.vocab_size
        self._context = config.max_model_len

    def read_sampling(self, given: GenerationInput) -> SamplingParams:
        """Return the parameters of a call. Raises InvalidRequestError.

        `max_tokens` is the context length if the call has none: see `with_max_tokens`.
        """
        # SamplingParams checks the type and range of every field itself.
        fields: dict[str, Any] = {**self._defaults, **given.sampling}
        # The room that the prompt leaves is known after tokenizing.
        fields.setdefault("max_tokens", self._context)
        sampling = SamplingParams(**fields)
        for text in sampling.stop:
            check_unicode(text, "stop")
        _check_structure(sampling.structure)
        check_token_ids(sampling.stop_token_ids, self._vocab_size, "stop_token_ids")
        check_token_ids(tuple(sampling.logit_bias), self._vocab_size, "logit_bias")
        check_token_ids(sampling.allowed_token_ids, self._vocab_size, "allowed_token_ids")
        check_token_ids(sampling.logprob_token_ids, self._vocab_size, "logprob_token_ids")
        return sampling

    def with_max_tokens(
        self, sampling: SamplingParams, num_prompt_tokens: int, given: GenerationInput
    ) -> SamplingParams:
        """Return parameters with a `max_tokens` that fits the context.

        Raises OutputLengthError.
        """
        room = self._context - num_prompt_tokens
        if "max_tokens" in given.sampling:
            if sampling.max_tokens > room:
                raise OutputLengthError(num_prompt_tokens, sampling.max_tokens, self._context)
            return sampling
        default = room if given.default_max_tokens is None else given.default_max_tokens
        default = max(default, sampling.min_tokens)
        return msgspec.structs.replace(sampling, max_tokens=min(default, room))


def check_choice(
    sampling: SamplingParams,
    bad_token_ids: tuple[tuple[int, ...], ...],
    end_token_ids: tuple[int, ...],
) -> None:
    """Raise InvalidRequestError if there may be a position at which no token is allowed."""
    left = set(sampling.allowed_token_ids)
    if left and sampling.min_tokens:
        left.difference_update(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            left.difference_update(end_token_ids)
        if not left:
            raise invalid_field(
                "allowed_token_ids",
                "must contain a token that does not end the output if min_tokens is set.",
            )
    if left and left.issubset(token_ids[-1] for token_ids in bad_token_ids):
        raise invalid_field(
            "allowed_token_ids", "must contain a token that does not end one of bad_words."
        )


def check_prompt_logprobs(number: int | None, num_prompt_tokens: int) -> None:
    """Raise InvalidRequestError if a prompt has too many tokens for this many log-probabilities."""
    if number is None:
        return
    num_values = num_prompt_tokens * (number + 1)
    if num_values > _MAX_PROMPT_LOGPROBS:
        raise invalid_field(
            "prompt_logprobs",
            f"= {number} for a prompt of {pluralize(num_prompt_tokens, 'token')} requests "
            f"{num_values} log-probabilities; at most {_MAX_PROMPT_LOGPROBS} are allowed.",
        )


def check_reasoning_budget(reasoning: Reasoning | None, prompts: Sequence[Prompt]) -> None:
    """Raise InvalidRequestError if the reasoning after the prompts cannot be limited."""
    param = "thinking_token_budget"
    if not all(isinstance(prompt, ChatPrompt) for prompt in prompts):
        raise invalid_field(param, "requires a conversation.")
    if reasoning is None:
        raise invalid_field(
            param,
            "is not supported: the model does not reason, or the server does not know the format "
            "(--reasoning-format).",
        )
    if reasoning.has_channels:
        raise invalid_field(
            param,
            "is not supported for a model that may reason several times in a turn: use "
            "reasoning_effort.",
        )


def _check_structure(structure: object) -> None:
    if structure is None:
        return
    if not isinstance(structure, Structure):
        raise invalid_field("structure", "must be a Structure.")
    if structure.kind not in get_args(StructureKind) or not isinstance(structure.text, str):
        raise invalid_field(
            "structure", f"must have a text and a kind: {', '.join(get_args(StructureKind))}."
        )
    # Strings that cannot be encoded do not reach the compiler.
    for text in (structure.text, structure.mark, *_strings_of(structure.headers)):
        if not isinstance(text, str):
            raise invalid_field(
                "structure",
                "must have a string as its mark, and a tuple of pairs of strings as its headers.",
            )
        check_unicode(text, "structure")


def _strings_of(headers: object) -> Iterator[object]:
    """Yield both parts of each header, or an invalid header itself."""
    if not isinstance(headers, tuple):
        yield headers
        return
    for header in headers:
        if isinstance(header, tuple) and len(header) == 2:
            yield from header
        else:
            yield None


class BadWordReader:
    """Tokenizes bad words for one model."""

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, text_pool: TextPool | None = None
    ) -> None:
        """Without a pool, long lists are tokenized in place, which blocks an event loop."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._text_pool = text_pool

    async def read(self, words: Sequence[str], *, tenant: str) -> tuple[tuple[int, ...], ...]:
        """Return the sequences of tokens that a completion must not contain.

        Raises InvalidRequestError, and OverloadedError if too many long texts of the tenant wait.
        """
        for word in words:
            check_unicode(word, _PARAM)
        read_all = partial(self._read_all, words)
        if self._text_pool is not None and are_long(words):
            return await self._text_pool.run_in_thread(tenant, read_all)
        return read_all()

    def _read_all(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            first = self._read(word, word.lstrip())
            spaced = self._read(word, " " + word.lstrip())
            sequences[first] = None
            # Otherwise a prefix of the spaced text, such as the space alone, would be forbidden.
            if spaced[0] != first[0] and len(spaced) == len(first):
                sequences[spaced] = None
        return tuple(sequences)

    def _read(self, word: str, text: str) -> tuple[int, ...]:
        token_ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if not 1 <= len(token_ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"bad_words must contain strings of 1 to {MAX_BAD_WORD_TOKENS} tokens, but "
                f"{quote(word)} has {len(token_ids)}.",
                param=_PARAM,
            )
        if max(token_ids) >= self._vocab_size:
            raise InvalidRequestError(
                f"bad_words contains a text whose token id is {max(token_ids)}, but the ids of the "
                f"model are 0 to {self._vocab_size - 1}.",
                param=_PARAM,
            )
        return token_ids
