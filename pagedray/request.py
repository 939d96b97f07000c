"""Requests, their sampling parameters and finish reasons."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol, cast

import msgspec

from pagedray.errors import InvalidRequestError
from pagedray.reasoning import Reasoning
from pagedray.wording.shown_value import shown_value

__all__ = [
    "MAX_ALLOWED",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_LENGTH",
    "MAX_BAD_WORD_TOKENS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_N",
    "FinishReason",
    "Grammar",
    "Matcher",
    "Request",
    "SamplingParams",
    "Structure",
    "StructureKind",
    "check_bool",
    "check_size",
    "check_token_ids",
]

MAX_N = 128
MAX_COUNT = 2**31 - 1
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED = 2**12
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 128
MAX_BAD_WORD_TOKENS = 32
MAX_STOP = 16
MAX_STOP_LENGTH = 512


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


StructureKind = Literal[
    "json_object",
    "json_schema",
    "regex",
    "grammar",
    "choice",
    "structural_tag",
    "turn",
    "calls",
    "leading_calls",
    "messages",
]


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the generated text.

    `text` is validated when it is compiled.
    """

    kind: StructureKind
    text: str = ""
    """A JSON schema, a regular expression, an EBNF grammar, a structural tag in JSON, or choices as
    a JSON list of strings; empty for `json_object`. For `turn`, tool calls or an answer, what
    `TurnStructure` describes; for `calls`, what `CallsStructure` describes; for
    `leading_calls`, what `LeadingCallsStructure` describes; for `messages`, what
    `MessagesStructure` describes."""
    mark: str = ""
    """What a `turn` with tool calls begins with, and the `calls` after a text, which may be a
    special token; `leading_calls` may begin with it."""
    headers: tuple[tuple[str, str], ...] = ()
    """For a message that must be a tool call, in models whose turns are messages in channels: the
    headers it may have, each with the beginning of the text for which it stands."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are sampled, and when generation stops.

    Raises InvalidRequestError, which names the field and its allowed values.
    """

    n: int = 1
    """Number of completions of the prompt."""
    max_tokens: int = 16
    """Maximum number of tokens per completion."""
    min_tokens: int = 0
    """Minimum number of tokens before an end-of-sequence or stop token ends a completion."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: int = 0
    """Number of most likely tokens to sample from; 0 or -1 samples from all."""
    top_p: float = 1.0
    """Cumulative probability of the most likely tokens to sample from; 0 is greedy."""
    min_p: float = 0.0
    """Minimum probability of a token, relative to that of the most likely token."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or completion."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the completion."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the completion."""
    logit_bias: Mapping[int, float] = {}
    """Added to the logits of these token ids."""
    allowed_token_ids: Sequence[int] = ()
    """Token ids that may be generated, including end-of-sequence tokens; empty allows all."""
    bad_words: Sequence[str] = ()
    """Texts whose tokens are not generated in sequence: those of the text itself, and those of the
    text with a leading space if they only differ in the first token."""
    seed: int | None = None
    """Random seed for sampling that is reproducible, except for rounding; None is random."""
    stop: Sequence[str] = ()
    """Strings that end a completion; they are not part of its text."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a completion."""
    ignore_eos: bool = False
    """Whether to generate past the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Number of most likely tokens to return in addition to the sampled one; None returns no
    log-probabilities."""
    logprob_token_ids: Sequence[int] = ()
    """Token ids whose log-probabilities are returned in place of those of the most likely tokens;
    requires `logprobs`."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to return at each position of the prompt, in addition to the
    token of the prompt; None returns no log-probabilities of the prompt."""
    structure: Structure | None = None
    """Constraint on the text, or None."""
    thinking_token_budget: int | None = None
    """Number of tokens after which the model's reasoning is ended; None does not limit it."""

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_int("max_tokens", self.max_tokens, 1, MAX_COUNT)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_int("top_k", self.top_k, -1, MAX_COUNT)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        # With a lower bound of 0, the division of a logit could overflow.
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROBS)
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequestError(
                "logprob_token_ids requires logprobs.", param="logprob_token_ids"
            )
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.thinking_token_budget is not None:
            _check_int("thinking_token_budget", self.thinking_token_budget, 0, MAX_COUNT)
        _check_stop(self.stop)
        _check_logit_bias(self.logit_bias)
        _check_ids("stop_token_ids", self.stop_token_ids, MAX_LOGIT_BIAS)
        check_bool("ignore_eos", self.ignore_eos)
        _check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED)
        _check_bad_words(self.bad_words)
        for name in ("allowed_token_ids", "bad_words"):
            if not getattr(self, name):
                continue
            # They might forbid every token that a mask allows.
            if self.structure is not None:
                raise InvalidRequestError(
                    f"{name} cannot be combined with a structure.", param=name
                )
            if self.thinking_token_budget is not None:
                raise InvalidRequestError(
                    f"{name} cannot be combined with thinking_token_budget.", param=name
                )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always sampled."""
        return self.temperature == 0.0 or self.top_p == 0.0

    @property
    def has_penalty(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class Matcher(Protocol):
    """The state of one sequence in its grammar."""

    @property
    def error(self) -> str:
        """Why the structure ended the sequence with an error; empty if a defect did."""

    @property
    def is_costly(self) -> bool:
        """Whether its last mask took so long that no step should wait for the next one."""

    @property
    def is_free(self) -> bool:
        """Whether it allows every token from the last mask on, so that no other mask is needed."""


class Grammar(Protocol):
    """A compiled structure, shared by any number of sequences."""

    @property
    def num_mask_bytes(self) -> int:
        """Size of a mask in bytes."""

    def matcher(self, request: Request) -> Matcher:
        """Return a matcher for a new completion of the request."""

    def masks(
        self,
        # Any: the matchers are its own kind's.
        asked: Sequence[tuple[Any, Sequence[int]]],
        *,
        num_awaited: int,
        wait_s: float,
    ) -> list[bytes | FinishReason | None]:
        """Return the masks of allowed tokens, or the finish reason if none is; never raises.

        It waits up to `wait_s` for the first `num_awaited` of them, and not for the others. A mask
        that is not made by then is None; a later call that asks for it again returns it.

        `asked` pairs matchers with all tokens of their sequences, the prompt included. Matchers may
        belong to any grammar of the same model. Bit `i % 32` of int32 word `i // 32` is token `i`.
        """


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request."""

    id: str
    """Assigned by the server, never by the client."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """The client's seed, or a random one."""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end a completion unless `ignore_eos`."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that no completion contains: those of `sampling.bad_words`."""
    tenant: str = ""
    """The tenant that sent the request; prefixes are shared only within a tenant."""
    cache_salt: str = ""
    """Prefixes are shared only by requests of a tenant that have the same salt."""
    weight: float = 1.0
    """The tenant's share of the engine, relative to other tenants."""
    priority: int = 0
    """Requests of lower values are served first."""
    deadline_s: float | None = None
    """When the request is aborted, on the monotonic clock."""
    grammar: Grammar | None = None
    """The compiled `sampling.structure`, with the limit on the reasoning before it."""
    reasoning: Reasoning | None = None
    """How the model's reasoning is marked, which the structure does not apply to; None if it does
    not reason or the prompt is not a conversation."""
    generated_token_ids: tuple[tuple[int, ...] | None, ...] = ()
    """The tokens that each sequence generated in another replica, None for one that has ended;
    empty for a request that begins with its prompt. Never from a client."""

    @property
    def mask_start(self) -> int | None:
        """The number of generated tokens after which its tokens are masked; None is never."""
        if self.grammar is None:
            return None
        budget = self.sampling.thinking_token_budget
        if self.sampling.structure is not None or budget is None:
            return 0
        # Before, the reasoning cannot have as many tokens.
        return budget

    @property
    def open_indices(self) -> range | tuple[int, ...]:
        """The indices of the sequences that the engine runs."""
        if not self.generated_token_ids:
            return range(self.sampling.n)
        generated = enumerate(self.generated_token_ids)
        return tuple(index for index, token_ids in generated if token_ids is not None)


def check_token_ids(token_ids: Sequence[object], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError unless all are token ids of a vocabulary of this size."""
    if set(map(type, token_ids)) == {int}:
        # Prompts may be long: the common case needs no Python loop.
        ids = cast("Sequence[int]", token_ids)
        if min(ids) >= 0 and max(ids) < vocab_size:
            return
    for one in token_ids:
        if isinstance(one, bool) or not isinstance(one, int):
            raise InvalidRequestError(
                f"{param} must contain integer token ids, not {shown_value(one)}.", param=param
            )
        if not 0 <= one < vocab_size:
            raise InvalidRequestError(
                f"{param} contains token id {shown_value(one)}, but ids are 0 to {vocab_size - 1}.",
                param=param,
            )


def check_bool(name: str, value: object) -> None:
    """Raise InvalidRequestError for a value that is no boolean: text such as "no" would be true."""
    if not isinstance(value, bool):
        raise InvalidRequestError(
            f"{name} must be true or false, not {shown_value(value)}.", param=name
        )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    # bool is a subclass of int.
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(
            f"{name} must be an integer, not {shown_value(value)}.", param=name
        )
    if not low <= value <= high:
        is_only_too_low = high == MAX_COUNT and value < low
        allowed = f"{low} or more" if is_only_too_low else f"from {low} to {high}"
        raise InvalidRequestError(
            f"{name} must be {allowed}, not {shown_value(value)}.", param=name
        )


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, not {shown_value(value)}.", param=name)
    # An integer may be too large for a float.
    if -1e300 < value < 1e300 and low <= value <= high:
        return
    raise InvalidRequestError(
        f"{name} must be from {low:g} to {high:g}, not {shown_value(value)}.", param=name
    )


def check_size(name: str, size: int, most: int) -> None:
    """Raise InvalidRequestError if a list is too long."""
    if size > most:
        raise InvalidRequestError(
            f"{name} may have at most {most} entries, not {size}.", param=name
        )


def _check_ids(name: str, given: object, most: int) -> None:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Collection):
        raise InvalidRequestError(f"{name} must be a list of integers.", param=name)
    check_size(name, len(given), most)
    for token_id in given:
        _check_int(name, token_id, 0, 2**31 - 1)


def _check_stop(stop: object) -> None:
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise InvalidRequestError("stop must be a list of strings.", param="stop")
    check_size("stop", len(stop), MAX_STOP)
    for text in stop:
        if not isinstance(text, str) or not text or len(text) > MAX_STOP_LENGTH:
            raise InvalidRequestError(
                f"stop must contain strings of 1 to {MAX_STOP_LENGTH} characters.", param="stop"
            )


def _check_bad_words(words: object) -> None:
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise InvalidRequestError("bad_words must be a list of strings.", param="bad_words")
    check_size("bad_words", len(words), MAX_BAD_WORDS)
    for text in words:
        if not isinstance(text, str) or len(text) > MAX_BAD_WORD_LENGTH or not text.strip():
            raise InvalidRequestError(
                f"bad_words must contain strings of 1 to {MAX_BAD_WORD_LENGTH} characters that are "
                "not blank.",
                param="bad_words",
            )


def _check_logit_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(
            "logit_bias must be a dictionary of token ids and numbers.", param="logit_bias"
        )
    check_size("logit_bias", len(bias), MAX_LOGIT_BIAS)
    for token_id, value in bias.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise InvalidRequestError(
                f"logit_bias contains token id {shown_value(token_id)}, but ids are 0 or more.",
                param="logit_bias",
            )
        _check_float("logit_bias", value, -100.0, 100.0)
