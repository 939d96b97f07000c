"""How the tokens of a request are sampled, and the limits of these parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from pagedray.errors import invalid_field
from pagedray.field_checks import MAX_COUNT, check_bool, check_float, check_int, check_size
from pagedray.text import quote

__all__ = [
    "MAX_ALLOWED",
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_LENGTH",
    "MAX_BAD_WORD_TOKENS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_N",
    "MAX_STOP",
    "MAX_STOP_LENGTH",
    "SamplingParams",
    "Structure",
    "StructureKind",
]

MAX_N = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED = 2**12
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 128
MAX_BAD_WORD_TOKENS = 32
MAX_STOP = 16
MAX_STOP_LENGTH = 512
_RANDOM_SEED = -1

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
    """Texts that are not generated: neither as the tokens of the text, nor as the tokens of the
    text with a leading space if these only differ in the first token.
    """
    seed: int | None = None
    """Random seed for sampling that is reproducible, except for rounding; None or -1 is random."""
    stop: Sequence[str] = ()
    """Strings that end a completion; they are not part of its text."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end a completion."""
    ignore_eos: bool = False
    """Whether to generate past the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Number of most likely tokens to return in addition to the sampled token; None returns no
    log-probabilities.
    """
    logprob_token_ids: Sequence[int] = ()
    """Token ids to return log-probabilities for, in place of the most likely tokens; requires
    `logprobs`.
    """
    prompt_logprobs: int | None = None
    """Number of most likely tokens to return at each position of the prompt, in addition to the
    token of the prompt; None returns no log-probabilities of the prompt."""
    structure: Structure | None = None
    """Constraint on the text, or None."""
    thinking_token_budget: int | None = None
    """Number of tokens after which the model's reasoning is ended; None does not limit it."""
    disable_spec_decode: bool = False
    """Whether tokens are generated one by one, although the engine speculates; only affects speed.
    """

    def __post_init__(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        check_int("max_tokens", self.max_tokens, 1, MAX_COUNT)
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        check_float("temperature", self.temperature, 0.0, 100.0)
        check_int("top_k", self.top_k, -1, MAX_COUNT)
        check_float("top_p", self.top_p, 0.0, 1.0)
        check_float("min_p", self.min_p, 0.0, 1.0)
        # With a lower bound of 0, the division of a logit could overflow.
        check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed == _RANDOM_SEED:
            msgspec.structs.force_setattr(self, "seed", None)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROBS)
        if self.logprob_token_ids and self.logprobs is None:
            raise invalid_field("logprob_token_ids", "requires logprobs.")
        if self.prompt_logprobs is not None:
            check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.thinking_token_budget is not None:
            check_int("thinking_token_budget", self.thinking_token_budget, 0, MAX_COUNT)
        _check_stop(self.stop)
        _check_logit_bias(self.logit_bias)
        _check_ids("stop_token_ids", self.stop_token_ids, MAX_LOGIT_BIAS)
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("disable_spec_decode", self.disable_spec_decode)
        _check_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED)
        _check_bad_words(self.bad_words)
        for name in ("allowed_token_ids", "bad_words"):
            if not getattr(self, name):
                continue
            # They might forbid every token that a mask allows.
            if self.structure is not None:
                raise invalid_field(name, "cannot be combined with a structure.")
            if self.thinking_token_budget is not None:
                raise invalid_field(name, "cannot be combined with thinking_token_budget.")

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


def _check_ids(name: str, given: object, most: int) -> None:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Collection):
        raise invalid_field(name, "must be a list of integers.")
    check_size(name, len(given), most)
    for token_id in given:
        check_int(name, token_id, 0, MAX_COUNT)


def _check_stop(stop: object) -> None:
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise invalid_field("stop", "must be a list of strings.")
    check_size("stop", len(stop), MAX_STOP)
    for text in stop:
        if not isinstance(text, str) or not text or len(text) > MAX_STOP_LENGTH:
            raise invalid_field(
                "stop", f"must contain strings of 1 to {MAX_STOP_LENGTH} characters."
            )


def _check_bad_words(words: object) -> None:
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise invalid_field("bad_words", "must be a list of strings.")
    check_size("bad_words", len(words), MAX_BAD_WORDS)
    for text in words:
        if not isinstance(text, str) or len(text) > MAX_BAD_WORD_LENGTH or not text.strip():
            raise invalid_field(
                "bad_words",
                f"must contain strings of 1 to {MAX_BAD_WORD_LENGTH} characters that are not "
                "blank.",
            )


def _check_logit_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        raise invalid_field("logit_bias", "must be a dictionary of token ids and numbers.")
    check_size("logit_bias", len(bias), MAX_LOGIT_BIAS)
    for token_id, value in bias.items():
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise invalid_field(
                "logit_bias", f"contains token id {quote(token_id)}, but ids are 0 or more."
            )
        check_float("logit_bias", value, -100.0, 100.0)


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the generated text.

    `text` is validated when it is compiled.
    """

    kind: StructureKind
    text: str = ""
    """A JSON schema, a regular expression, an EBNF grammar, a structural tag in JSON, or choices as
    a JSON list of strings; empty for `json_object`. For `turn`, `calls`, `leading_calls` and
    `messages`, a `TurnStructure`, `CallsStructure`, `LeadingCallsStructure` or `MessagesStructure`
    in JSON.
    """
    mark: str = ""
    """The beginning of a `turn` with tool calls, and of the `calls` after a text, which may be a
    special token; `leading_calls` may begin with it.
    """
    headers: tuple[tuple[str, str], ...] = ()
    """For a message that must be a tool call, in models whose turns are messages in channels: the
    allowed headers, each with the beginning of the text that it stands for.
    """
