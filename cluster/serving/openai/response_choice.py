"""The choices of a response while they are generated, and what a response contains."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.serving.openai.text_offsets import TextOffsets
from cluster.serving.text.text_stream import SequenceOutput
from cluster.serving.tools.turns import Turn
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "CompleteChoice",
    "ResponseChoice",
    "ResponseOptions",
    "StreamedChoice",
    "aborted_prompts",
    "take_returned",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """What a response contains in addition to its text."""

    model: str
    created_s: int
    num_per_prompt: int
    """Choices that are generated for each prompt."""
    num_returned: int
    """Number of choices in a complete response: those with the highest log-probabilities."""
    has_logprobs: bool
    includes_usage: bool
    has_continuous_usage: bool = False
    """Whether every chunk contains the usage so far."""
    has_token_ids: bool = False
    """Whether choices contain their token ids, and those of their prompts."""
    names_tokens_by_id: bool = False
    """Whether tokens in log-probabilities are written as `token_id:ID`."""
    num_prompt_logprobs: int | None = None
    """Number of most likely tokens for each token of a prompt; None disables them."""
    echoed_texts: tuple[str, ...] = ()
    """The texts of the prompts, with which those of choices begin; empty if they do not."""
    num_echoed_logprobs: int | None = None
    """Number of most likely tokens for each token of an echoed prompt, with whose log-probabilities
    those of choices begin; None if they do not."""
    skips_special_tokens: bool = True
    """Whether texts have no special tokens."""
    hides_output: bool = False
    """Whether choices contain nothing that was generated."""

    def index_of(self, sequence: SequenceOutput) -> int:
        """Return the index of a sequence's choice among those of all prompts."""
        return sequence.prompt_index * self.num_per_prompt + sequence.index


@dataclass(slots=True, kw_only=True)
class ResponseChoice:
    """A choice of a response, while it is generated."""

    index: int
    turn: Turn | None = None
    """Finds reasoning and tool calls in the text."""
    offsets: TextOffsets | None = None
    """Where the tokens begin in the text, if the log-probabilities include that."""


@dataclass(slots=True, kw_only=True)
class StreamedChoice(ResponseChoice):
    """A choice of a stream of chunks."""

    bare_begin: bytes
    """The start of an event that contains only text."""
    is_new: bool = True
    """Whether no chunk contains it yet."""
    is_plain: bool
    """Whether most chunks contain only text."""


@dataclass(slots=True, kw_only=True)
class CompleteChoice(ResponseChoice):
    """A choice of a response that is sent once it is complete."""

    texts: list[str] = field(default_factory=list)
    logprobs: dict[str, list[bytes]] = field(default_factory=dict)
    """The lists of its log-probabilities, and the parts of each as JSON."""
    last: SequenceOutput | None = None
    """The last output of the sequence."""
    sum_logprobs: float = 0.0
    """The sum of the log-probabilities of `num_tokens` tokens, if choices are compared."""
    num_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    """The tokens of the choice, if they are requested."""

    def mean_logprob(self) -> float:
        """Return the mean log-probability of its tokens, by which choices are compared.

        It is the lowest of all without tokens, as those of an aborted call may be.
        """
        return self.sum_logprobs / self.num_tokens if self.num_tokens else -math.inf


def aborted_prompts(choices: Mapping[int, CompleteChoice], options: ResponseOptions) -> set[int]:
    """Return the indices of the prompts of aborted choices, which are given by their indices."""
    return {
        index // options.num_per_prompt
        for index, choice in choices.items()
        if choice.last is not None and choice.last.finish_reason is FinishReason.ABORT
    }


def take_returned(
    choices: dict[int, CompleteChoice], options: ResponseOptions
) -> Iterator[CompleteChoice]:
    """Remove all choices, and yield those that a complete response has, in order."""
    ordered = [choices.pop(index) for index in sorted(choices)]
    size, number = options.num_per_prompt, options.num_returned
    if number == size:
        yield from ordered
        return
    for first in range(0, len(ordered), size):
        yield from sorted(
            ordered[first : first + size], key=CompleteChoice.mean_logprob, reverse=True
        )[:number]
