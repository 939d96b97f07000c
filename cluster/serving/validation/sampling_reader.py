"""The sampling parameters of a call, completed with the model's defaults.

`SamplingParams` checks the type and range of each field; this module checks the limits of the
model, and combinations with other parts of a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgspec

from cluster.serving.text.templates.chat_prompt import ChatPrompt
from cluster.serving.validation.prompt_reader import check_unicode
from pagedray.errors import InvalidRequestError, OutputLengthError
from pagedray.field_checks import check_token_ids
from pagedray.sampling_params import SamplingParams
from pagedray.structure import Structure, StructureKind
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.serving.inputs import GenerationInput, Prompt
    from pagedray.config import EngineConfig
    from pagedray.reasoning import Reasoning

__all__ = [
    "SamplingReader",
    "check_choice",
    "check_prompt_logprobs",
    "check_reasoning_budget",
]

_MAX_PROMPT_LOGPROBS = 2**18
"""Log-probabilities of all tokens of a prompt together."""


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
            raise InvalidRequestError(
                "allowed_token_ids must contain a token that does not end the output if "
                "min_tokens is set.",
                param="allowed_token_ids",
            )
    if left and left.issubset(token_ids[-1] for token_ids in bad_token_ids):
        raise InvalidRequestError(
            "allowed_token_ids must contain a token that does not end one of bad_words.",
            param="allowed_token_ids",
        )


def check_prompt_logprobs(number: int | None, num_prompt_tokens: int) -> None:
    """Raise InvalidRequestError if a prompt has too many tokens for this many log-probabilities."""
    if number is None:
        return
    num_values = num_prompt_tokens * (number + 1)
    if num_values > _MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"prompt_logprobs = {number} for a prompt of {pluralize(num_prompt_tokens, 'token')} "
            f"requests {num_values} log-probabilities; at most {_MAX_PROMPT_LOGPROBS} are allowed.",
            param="prompt_logprobs",
        )


def check_reasoning_budget(reasoning: Reasoning | None, prompts: Sequence[Prompt]) -> None:
    """Raise InvalidRequestError if the reasoning after the prompts cannot be limited."""
    param = "thinking_token_budget"
    if not all(isinstance(prompt, ChatPrompt) for prompt in prompts):
        raise InvalidRequestError(f"{param} requires a conversation.", param=param)
    if reasoning is None:
        raise InvalidRequestError(
            f"{param} is not supported: the model does not reason, or the server does not know "
            "the format (--reasoning-format).",
            param=param,
        )
    if reasoning.has_channels:
        raise InvalidRequestError(
            f"{param} is not supported for a model that may reason several times in a turn: use "
            "reasoning_effort.",
            param=param,
        )


def _check_structure(structure: object) -> None:
    if structure is None:
        return
    if not isinstance(structure, Structure):
        raise InvalidRequestError("structure must be a Structure.", param="structure")
    if structure.kind not in get_args(StructureKind) or not isinstance(structure.text, str):
        raise InvalidRequestError(
            f"structure must have a text and a kind: {', '.join(get_args(StructureKind))}.",
            param="structure",
        )
    # Strings that cannot be encoded do not reach the compiler.
    for text in (structure.text, structure.mark, *_strings_of(structure.headers)):
        if not isinstance(text, str):
            raise InvalidRequestError(
                "structure must have a string as its mark, and a tuple of pairs of strings as its "
                "headers.",
                param="structure",
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
