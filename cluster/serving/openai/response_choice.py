"""The choices of a response while they are generated, and the options of their content."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, Self

import msgspec

from cluster.serving.http.endpoint import rejection_body
from cluster.serving.text.text_stream import IncrementalDetokenizer, SequenceOutput, TokenBytes
from cluster.serving.tools.turns import Turn
from pagedray.errors import EngineError
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from cluster.serving.http.endpoint import Json
    from cluster.serving.intake import OutputBuffer
    from pagedray.batch import PromptLogprobs, PromptToken
    from pagedray.errors import PagedRayError

__all__ = [
    "DONE_EVENT",
    "CompleteChoice",
    "PromptReportForm",
    "PromptReports",
    "ResponseChoice",
    "ResponseOptions",
    "StreamedChoice",
    "TextOffsets",
    "aborted_prompts",
    "error_event",
    "finite",
    "numbered_event",
    "take_returned",
]

_LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""
_encode = msgspec.json.Encoder().encode

DONE_EVENT = b"data: [DONE]\n\n"
"""The last event of every stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """Content of a response in addition to its text."""

    model: str
    created_s: int
    num_per_prompt: int
    """Choices that are generated for each prompt."""
    num_returned: int
    """Number of choices in a complete response; choices with the highest log-probabilities."""
    has_logprobs: bool
    includes_usage: bool
    has_continuous_usage: bool = False
    """Whether every chunk contains the usage so far."""
    has_token_ids: bool = False
    """Whether choices contain their token ids, and the token ids of their prompts."""
    names_tokens_by_id: bool = False
    """Whether tokens in log-probabilities are written as `token_id:ID`."""
    num_prompt_logprobs: int | None = None
    """Number of most likely tokens for each token of a prompt; None disables them."""
    echoed_texts: tuple[str, ...] = ()
    """The texts of the prompts, if the texts of choices begin with them; else empty."""
    num_echoed_logprobs: int | None = None
    """Number of most likely tokens for each token of an echoed prompt, if the log-probabilities of
    choices begin with the prompt; else None.
    """
    skips_special_tokens: bool = True
    """Whether texts have no special tokens."""
    hides_output: bool = False
    """Whether choices contain nothing that was generated."""

    def index_of(self, sequence: SequenceOutput) -> int:
        """Return the index of a sequence's choice among the choices of all prompts."""
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

        Without tokens, as in an aborted call, it is the lowest of all.
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
    """Remove all choices, and yield the choices of a complete response, in order."""
    ordered = [choices.pop(index) for index in sorted(choices)]
    size, number = options.num_per_prompt, options.num_returned
    if number == size:
        yield from ordered
        return
    for first in range(0, len(ordered), size):
        yield from sorted(
            ordered[first : first + size], key=CompleteChoice.mean_logprob, reverse=True
        )[:number]


class TextOffsets:
    """Counts the characters of a text, token by token.

    Tokens that are parts of one character begin where it does.
    """

    def __init__(
        self, token_bytes: TokenBytes, detokenizer: IncrementalDetokenizer, *, text: str = ""
    ) -> None:
        """Offsets begin after `text`."""
        self._token_bytes = token_bytes
        self._detokenizer = detokenizer
        self._num_characters = len(text)

    @classmethod
    def of_prompt(cls, token_bytes: TokenBytes) -> TextOffsets:
        """Return the offsets of a prompt, from its beginning."""
        return cls(token_bytes, IncrementalDetokenizer(token_bytes, is_continuation=False))

    def of_tokens(self, token_ids: Sequence[int], *, prompt: str | None = None) -> list[int]:
        """Return where the next tokens begin.

        Special tokens of a `prompt` count if its text has them: the client wrote them, and the
        tokenizer did not add them.
        """
        return [self._next(token_id, prompt) for token_id in token_ids]

    def _next(self, token_id: int, prompt: str | None) -> int:
        fallback_ids = self._token_bytes.fallback_ids
        if fallback_ids and token_id not in fallback_ids:
            # The consecutive bytes before it are complete.
            self._num_characters += len(self._detokenizer.flush())
        offset = self._num_characters
        if prompt is not None and self._token_bytes.is_special(token_id):
            token = self._token_bytes.text_of(token_id)
            self._num_characters += len(token) if prompt.startswith(token, offset) else 0
        else:
            self._num_characters += len(self._detokenizer.add_tokens((token_id,)))
        return offset


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReportForm:
    """Content of a response for each token of its prompts."""

    num_listed: int | None
    """How many of the most likely tokens `prompt_logprobs` has; None leaves it out."""
    num_echoed: int | None
    """How many the lists of an echoed prompt have; None leaves them out."""
    echoed_texts: Sequence[str]
    """The texts of the prompts, if they are echoed."""
    token_bytes: TokenBytes
    token_text: Callable[[int], str]


class PromptReports:
    """The log-probabilities of a call's prompts as JSON."""

    def __init__(self) -> None:
        self._fields: dict[int, Json] = {}
        self._lists: dict[int, dict[str, list[bytes]]] = {}

    def fields(self, prompt_index: int) -> Json:
        """Return the field `prompt_logprobs` of a prompt; empty if it is not requested."""
        return self._fields.get(prompt_index, {})

    def lists(self, prompt_index: int) -> Mapping[str, list[bytes]]:
        """Return the parts of the lists of an echoed prompt; empty if they are not requested."""
        return self._lists.get(prompt_index, {})

    @classmethod
    async def of_prompts(
        cls,
        form: PromptReportForm,
        prompts: Sequence[Sequence[int]],
        found: Mapping[int, Sequence[PromptLogprobs]],
        *,
        aborted: Collection[int],
        buffer: OutputBuffer,
    ) -> Self:
        """Write the reports of each prompt, by its index, counted in `buffer`.

        The log-probabilities of `aborted` prompts, given by their indices, may be missing. Raises
        PagedRayError.
        """
        reports = cls()
        if form.num_listed is None and form.num_echoed is None:
            return reports
        for index, token_ids in enumerate(prompts):
            tokens = _tokens_of(token_ids, found.get(index, ()), is_aborted=index in aborted)
            text = form.echoed_texts[index] if form.echoed_texts else ""
            # Writing a long prompt would hold the event loop.
            fields, lists = await asyncio.to_thread(_written, list(tokens), form, text)
            buffer.collect(sum(map(len, (*fields.values(), *lists.values()))))
            reports._fields[index] = {name: msgspec.Raw(value) for name, value in fields.items()}
            reports._lists[index] = {name: [value] for name, value in lists.items()}
        return reports


def _written(
    tokens: Sequence[tuple[int, PromptToken | None]], form: PromptReportForm, text: str
) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return the field of a prompt in JSON, and the entries of the lists of an echoed prompt."""
    fields: dict[str, bytes] = {}
    lists: dict[str, bytes] = {}
    if form.num_listed is not None:
        rows = [_listed(token, form.num_listed, form.token_text) for token in tokens]
        fields["prompt_logprobs"] = _encode(rows)
    if form.num_echoed is not None:
        token_ids = [token_id for token_id, _ in tokens]
        columns: dict[str, Sequence[object]] = {
            "tokens": [form.token_text(token_id) for token_id in token_ids],
            "token_logprobs": [
                None if token is None else finite(token.chosen) for _, token in tokens
            ],
            "top_logprobs": [_top(one, form.num_echoed, form.token_text) for one in tokens],
            "text_offset": TextOffsets.of_prompt(form.token_bytes).of_tokens(
                token_ids, prompt=text
            ),
        }
        lists = {name: _encode(values)[1:-1] for name, values in columns.items()}
    return fields, lists


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return max(logprob, _LEAST_LOGPROB)


def _tokens_of(
    token_ids: Sequence[int], found: Sequence[PromptLogprobs], *, is_aborted: bool
) -> Iterator[tuple[int, PromptToken | None]]:
    """Yield the tokens of a prompt with their reports; the first token has no report."""
    if (found[-1].end if found else 1) != len(token_ids):
        if is_aborted:
            return zip(token_ids, repeat(None))
        raise EngineError("The log-probabilities of the prompt were lost; send the request again.")
    known: Iterable[PromptToken | None] = chain.from_iterable(one.tokens() for one in found)
    return zip(token_ids, chain([None], known), strict=True)


def _listed(
    given: tuple[int, PromptToken | None], number: int, token_text: Callable[[int], str]
) -> Json | None:
    token_id, token = given
    if token is None:
        return None
    likeliest = zip(token.token_ids[:number], token.logprobs, strict=False)
    entries = [(other, logprob, rank) for rank, (other, logprob) in enumerate(likeliest, 1)]
    if token.rank > number or token_id not in token.token_ids[:number]:
        entries.append((token_id, token.chosen, token.rank))
    return {
        str(other): {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(other)}
        for other, logprob, rank in entries
    }


def _top(
    given: tuple[int, PromptToken | None], number: int, token_text: Callable[[int], str]
) -> Json | None:
    token_id, token = given
    if token is None:
        return None
    likeliest = zip(token.token_ids[:number], token.logprobs, strict=False)
    top: Json = {token_text(other): finite(logprob) for other, logprob in likeliest}
    top.setdefault(token_text(token_id), finite(token.chosen))
    return top


def error_event(error: PagedRayError) -> bytes:
    """Return the event of an error that ends a stream, except for `DONE_EVENT`."""
    return b"data: %b\n\n" % msgspec.json.encode(rejection_body(error))


def numbered_event(event: bytes, number: int) -> bytes:
    """Return an event with its number as its id."""
    return b"id: %d\n%b" % (number, event)
