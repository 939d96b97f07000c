"""The log-probabilities of prompts in responses: vLLM's `prompt_logprobs`, and those of `echo`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Self

import msgspec

from cluster.serving.openai.text_offsets import TextOffsets
from cluster.serving.text.token_bytes import TokenBytes
from pagedray.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import (
        Collection,
        Iterable,
        Iterator,
        Mapping,
    )

    from cluster.serving.http.errors import Json
    from cluster.serving.memory.output_buffer import OutputBuffer
    from pagedray.batch import PromptLogprobs, PromptToken

__all__ = ["PromptReportForm", "PromptReports", "finite"]

_LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""
_TOKENS_AT_ONCE = 128
"""Tokens that are written without a pause."""
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReportForm:
    """What a response says about each token of its prompts."""

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
        """Write what was found of each prompt, by its index, counted in `buffer`.

        The log-probabilities of `aborted` prompts, given by their indices, may be missing. Raises
        PagedRayError.
        """
        reports = cls()
        if form.num_listed is None and form.num_echoed is None:
            return reports
        for index, token_ids in enumerate(prompts):
            tokens = _tokens_of(token_ids, found.get(index, ()), is_aborted=index in aborted)
            writer = _Writer(tokens, form, form.echoed_texts[index] if form.echoed_texts else "")
            for _ in range(0, len(token_ids), _TOKENS_AT_ONCE):
                buffer.collect(writer.write(_TOKENS_AT_ONCE))
                # Writing all at once would hold the event loop.
                await asyncio.sleep(0)
            if form.num_listed is not None:
                written = msgspec.Raw(b"[%b]" % b",".join(writer.listed))
                reports._fields[index] = {"prompt_logprobs": written}
            if form.num_echoed is not None:
                reports._lists[index] = writer.echoed
        return reports


class _Writer:
    """Writes the log-probabilities of one prompt."""

    def __init__(
        self,
        tokens: Iterator[tuple[int, PromptToken | None]],
        form: PromptReportForm,
        text: str,
    ) -> None:
        self.listed: list[bytes] = []
        self.echoed: dict[str, list[bytes]] = {name: [] for name in _LISTS}
        self._tokens = tokens
        self._form = form
        self._text = text
        self._offsets = TextOffsets.of_prompt(form.token_bytes)

    def write(self, num_tokens: int) -> int:
        """Write this many tokens, and return the number of bytes."""
        num_bytes = 0
        part = list(islice(self._tokens, num_tokens))
        if self._form.num_listed is not None:
            rows = [_listed(token, self._form.num_listed, self._form.token_text) for token in part]
            num_bytes += _add(rows, self.listed)
        if self._form.num_echoed is not None:
            num_bytes += self._echo(part, self._form.num_echoed)
        return num_bytes

    def _echo(self, step: Sequence[tuple[int, PromptToken | None]], num_likeliest: int) -> int:
        logprobs = [None if token is None else finite(token.chosen) for _, token in step]
        token_ids = [token_id for token_id, _ in step]
        token_text = self._form.token_text
        columns: dict[str, Sequence[object]] = {
            "tokens": [token_text(token_id) for token_id in token_ids],
            "token_logprobs": logprobs,
            "top_logprobs": [_top(one, num_likeliest, token_text) for one in step],
            "text_offset": self._offsets.of_tokens(token_ids, prompt=self._text),
        }
        return sum(_add(values, self.echoed[name]) for name, values in columns.items())


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return max(logprob, _LEAST_LOGPROB)


def _tokens_of(
    token_ids: Sequence[int], found: Sequence[PromptLogprobs], *, is_aborted: bool
) -> Iterator[tuple[int, PromptToken | None]]:
    """Yield the tokens of a prompt with what is known of each; nothing of the first one."""
    if (found[-1].end if found else 1) != len(token_ids):
        if is_aborted:
            return zip(token_ids, repeat(None))
        raise EngineError("The log-probabilities of the prompt were lost; send the request again.")
    known: Iterable[PromptToken | None] = chain.from_iterable(one.tokens() for one in found)
    return zip(token_ids, chain([None], known), strict=True)


def _add(values: Sequence[object], parts: list[bytes]) -> int:
    """Add values to the parts of a list in JSON, and return their bytes."""
    parts.append(_encode(values)[1:-1])
    return len(parts[-1])


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
        str(other): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": token_text(other),
        }
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
