"""The common parameters of completions and chat completions."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from cluster.serving.beam_search import check_beam_sampling, check_length_penalty
from cluster.serving.json_body import BodyPart, Defaults, described, named_schema
from cluster.serving.openai.bodies.sampling_fields import (
    IGNORED,
    IN_IGNORED,
    REJECTED,
    UNLIMITED,
    WITHOUT_EFFECT,
    RequestedStructure,
    SamplingFields,
    bounds,
    model_field,
    read_response_format,
)
from cluster.serving.telemetry.log_lines import LineLimit
from pagedray.errors import invalid_field
from pagedray.sampling_params import (
    MAX_ALLOWED,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    SamplingParams,
)
from pagedray.text import quote, quote_json

__all__ = ["GenerationBody", "StreamOptions"]

logger = logging.getLogger(__name__)

_SAMPLING_NAMES = ("n", "min_tokens", "prompt_logprobs")
_conflict_lines = LineLimit()
_SAMPLING = SamplingParams.__struct_fields__
_UNSUPPORTED = (
    "best_of",
    "echo",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "response_format",
    "structured_outputs",
    "tools",
)
"""Other fields that would change which beams are found, or are not computed with them."""
_WITHOUT_EFFECT = {"response_format": {"type": "text"}}


class StreamOptions(BodyPart):
    """The options of a stream."""

    include_usage: bool = described("Whether the last chunk reports the usage.", False)
    continuous_usage_stats: bool = described("Whether every chunk reports the usage so far.", False)
    include_obfuscation: Literal[False] = described(
        "Chunks are never padded with random characters.", False
    )
    resumable: bool = described(
        "Whether the stream is kept after its connection is cut, so that the client can resume "
        "it. Its events have ids.",
        False,
    )


class GenerationBody(SamplingFields):
    """The parameters of both endpoints."""

    defaults: ClassVar[Defaults] = WITHOUT_EFFECT
    ignored: ClassVar[Mapping[str, str]] = IGNORED
    in_ignored: ClassVar[Mapping[str, Mapping[str, str]]] = IN_IGNORED
    rejected: ClassVar[Mapping[str, str]] = REJECTED
    synonyms: ClassVar[Mapping[str, str]] = {
        "disable_speculative_decoding": "disable_spec_decode",
        "ebnf": "guided_grammar",
        "extra_key": "cache_salt",
        "json_schema": "guided_json",
        "max_new_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "regex": "guided_regex",
        "rid": "request_id",
        "stop_sequences": "stop",
    }
    with_nulls: ClassVar[frozenset[str]] = frozenset(("messages", "stream_options"))

    model: str | None = model_field()
    n: int = described("Number of choices for each prompt.", 1, minimum=1, maximum=MAX_N)
    best_of: int | None = described(
        "Number of choices to generate for each prompt. The n choices with the highest "
        "log-probability per token are returned, best first; a value above n requires stream = "
        "false.",
        minimum=1,
        maximum=MAX_N,
    )
    use_beam_search: bool = described(
        "Whether the n choices are the best beams of a beam search of width n, instead of "
        "samples; a stream returns them at its end.",
        False,
    )
    length_penalty: float | None = described(
        "Exponent of the number of generated tokens by which the log-probability of a beam is "
        "divided; requires use_beam_search.",
        minimum=-10,
        maximum=10,
        default=1,
    )
    max_tokens: int | None = bounds(
        "Maximum number of tokens to generate; -1 is as many as fit into the context.", UNLIMITED
    )
    max_completion_tokens: int | None = bounds(
        "The same as max_tokens; the smaller value is used if both are set.", UNLIMITED
    )
    min_tokens: int | None = bounds(
        "Minimum number of tokens before an end-of-sequence or stop token ends the output.", 0
    )
    # The validator checks lists and objects, their length before their entries.
    stop_token_ids: Any = described(
        "Token ids that end the output.",
        type="array",
        items={"type": "integer", "minimum": 0},
        maxItems=MAX_LOGIT_BIAS,
    )
    allowed_token_ids: Any = described(
        "Token ids that may be generated; if no end-of-sequence token is among them, the output "
        "ends at max_tokens or at a stop string.",
        type="array",
        items={"type": "integer", "minimum": 0},
        minItems=1,
        maxItems=MAX_ALLOWED,
    )
    logprob_token_ids: Any = described(
        "Token ids whose log-probabilities are returned in place of those of the most likely "
        "tokens; requires logprobs.",
        type="array",
        items={"type": "integer", "minimum": 0},
        minItems=1,
        maxItems=MAX_LOGPROBS,
    )
    bad_words: Any = described(
        "Texts whose tokens are not generated in sequence, with or without a leading space.",
        type="array",
        items={"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_LENGTH},
        maxItems=MAX_BAD_WORDS,
    )
    stream: bool = described("Whether the response is a stream of server-sent events.", False)
    stream_options: StreamOptions | None = described(
        "`include_usage`, `continuous_usage_stats` and `resumable`; requires stream = true."
    )
    # Read when used, so that an error names the innermost field.
    response_format: Any = described(
        "`text`, `json_object`, `json_schema` with a schema, or `structural_tag`.",
        **named_schema("ResponseFormat"),
    )
    guided_json: Any = described("The same as structured_outputs.json.", type=["object", "string"])
    guided_regex: str | None = described("The same as structured_outputs.regex.")
    guided_choice: Any = described(
        "The same as structured_outputs.choice.", type="array", items={"type": "string"}
    )
    guided_grammar: str | None = described("The same as structured_outputs.grammar.")
    truncate_prompt_tokens: int | None = described(
        "Keep only this many tokens at the end of the prompt; -1 keeps as many as fit into the "
        "context together with max_tokens.",
        minimum=-1,
    )
    truncation_side: Literal["left", "right"] = described(
        "Where truncate_prompt_tokens removes tokens: `right` keeps the beginning of the prompt.",
        "left",
    )
    prompt_logprobs: int | None = described(
        "Number of most likely tokens to return at each position of the prompt; requires stream = "
        "false.",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    return_token_ids: bool = described(
        "Whether choices contain their token ids and those of the prompt.", False
    )
    return_tokens_as_token_ids: bool = described(
        "Whether tokens in log-probabilities are written as `token_id:ID`.", False
    )

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every chunk of a stream reports the usage."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def is_resumable(self) -> bool:
        """Whether the stream is kept after its connection is cut."""
        return self.stream_options is not None and self.stream_options.resumable

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of top log-probabilities for each token; None disables log-probabilities."""

    @property
    def is_unlimited(self) -> bool:
        """Whether the output may take as many tokens as fit into the context."""
        return UNLIMITED in (self.max_tokens, self.max_completion_tokens) and self.limit is None

    @property
    def limit(self) -> int | None:
        """The maximum number of tokens; None if neither parameter sets it."""
        given = (self.max_tokens, self.max_completion_tokens)
        return min((one for one in given if one not in (None, UNLIMITED)), default=None)

    @property
    def limit_name(self) -> str:
        """The client's name for `limit`."""
        is_other = self.max_tokens is None or self.max_tokens != self.limit
        return "max_completion_tokens" if is_other else "max_tokens"

    @property
    def num_generated(self) -> int:
        """Number of choices that are generated for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def beam_length_penalty(self) -> float | None:
        """The length penalty of a beam search; None if the output is sampled."""
        if not self.use_beam_search:
            return None
        return 1.0 if self.length_penalty is None else self.length_penalty

    def check_fields(self) -> None:
        self._check_limits()
        check_beams(self, self.use_beam_search, self.length_penalty)
        if self.best_of is not None:
            self._check_best_of(self.best_of)
        if self.logprob_token_ids and self.num_logprobs is None:
            raise invalid_field("logprob_token_ids", "requires logprobs.")
        if self.stream_options is not None and not self.stream:
            raise invalid_field("stream_options", "requires stream = true.")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid_field("prompt_logprobs", "requires stream = false.")

    def _check_limits(self) -> None:
        """Log two different limits, of which the smaller is used."""
        both = {self.max_tokens, self.max_completion_tokens} - {None, UNLIMITED}
        if len(both) > 1 and (num_calls := _conflict_lines.count_event()):
            logger.info(
                "Calls with different values of max_tokens and max_completion_tokens, of which the "
                "smaller is used: %d, the last one with %s and %s.",
                num_calls,
                quote(self.max_tokens),
                quote(self.max_completion_tokens),
            )

    def _check_best_of(self, best_of: int) -> None:
        if not self.n <= best_of <= MAX_N:
            raise invalid_field(
                "best_of", f"must be from n = {quote(self.n)} to {MAX_N}, not {quote(best_of)}."
            )
        if best_of > self.n and self.stream:
            raise invalid_field("best_of", "above n requires stream = false.")

    def requested_structure(self) -> RequestedStructure:
        """Return the requested structure of the output. Raises InvalidRequestError."""
        requested = RequestedStructure()
        if self.response_format is not None:
            read_response_format(self.response_format, requested)
        self.add_structured_outputs(requested)
        if self.guided_json is not None:
            requested.add_schema(self.guided_json, "guided_json")
        if self.guided_regex is not None:
            requested.add_structure("regex", self.guided_regex, "guided_regex")
        if self.guided_choice is not None:
            requested.add_choices(self.guided_choice, "guided_choice")
        if self.guided_grammar is not None:
            requested.add_structure("grammar", self.guided_grammar, "guided_grammar")
        return requested

    def structure_names(self) -> dict[str, str]:
        """Return the client's name for the structure, if it is requested."""
        param = self.requested_structure().param
        return {} if param is None else {"structure": param}

    def sampling(self) -> dict[str, object]:
        """Return the fields of SamplingParams that the client set."""
        given = self.common_sampling()
        given |= {
            name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None
        }
        if self.limit is not None:
            given["max_tokens"] = self.limit
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = _integers_of(self.stop_token_ids, "stop_token_ids")
        if self.bad_words is not None:
            words = self.bad_words
            given["bad_words"] = tuple(words) if isinstance(words, list) else words
        for name in ("allowed_token_ids", "logprob_token_ids"):
            if (token_ids := getattr(self, name)) is not None:
                given[name] = _integers_of(token_ids, name)
                if not given[name]:
                    raise invalid_field(name, "must not be empty.")
        if self.num_logprobs is not None:
            given["logprobs"] = self.num_logprobs
        if self.num_generated > self.n:
            given["n"] = self.num_generated
            # By which the choices are compared.
            given.setdefault("logprobs", 0)
        return given


def _integers_of(given: object, name: str) -> tuple[object, ...]:
    if not isinstance(given, list):
        raise invalid_field(name, "must be a list of integers.")
    # A long list needs no Python loop.
    if not set(map(type, given)) <= {int}:
        index, wrong = next((index, one) for index, one in enumerate(given) if type(one) is not int)
        raise invalid_field(f"{name}.{index}", f"must be an integer, not {quote_json(wrong)}.")
    return tuple(given)


def check_beams(body: object, use_beam_search: bool, length_penalty: float | None) -> None:
    """Raise InvalidRequestError if the fields of a body exclude each other."""
    if not use_beam_search:
        if length_penalty not in (None, 1):
            raise invalid_field("length_penalty", "requires use_beam_search = true.")
        return
    if length_penalty is not None:
        check_length_penalty(length_penalty, "length_penalty")
    sampling = {name: getattr(body, name, None) for name in _SAMPLING}
    check_beam_sampling(sampling, "use_beam_search")
    for name in _UNSUPPORTED:
        value = getattr(body, name, None)
        if value and value != _WITHOUT_EFFECT.get(name):
            raise invalid_field(name, "cannot be combined with use_beam_search.")
