"""The log-probabilities of prompts in responses: vLLM's `prompt_logprobs`, and those of `echo`."""

from __future__ import annotations

import asyncio
from itertools import chain, islice
from typing import TYPE_CHECKING, Self

import msgspec

from pagedray.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from cluster.serving.http.errors import Json
    from cluster.serving.memory.output_buffer import OutputBuffer
    from cluster.serving.text.token_bytes import TokenBytes
    from pagedray.batch import PromptLogprobs, PromptToken

__all__ = ["PromptReports", "finite"]

_LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""
_SLICE = 128
"""Tokens that are written between two turns of the event loop."""
_LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

_encode = msgspec.json.Encoder().encode


class PromptReports:
    """The log-probabilities of a call's prompts as JSON."""

    def __init__(self) -> None:
        self._fields: dict[int, Json] = {}
        self._lists: dict[int, dict[str, list[bytes]]] = {}

    def fields(self, prompt_index: int) -> Json:
        """Return the field `prompt_logprobs` of a prompt; empty if it is not asked for."""
        return self._fields.get(prompt_index, {})

    def lists(self, prompt_index: int) -> Mapping[str, list[bytes]]:
        """Return the parts of the lists of an echoed prompt; empty if they are not asked for."""
        return self._lists.get(prompt_index, {})

    @classmethod
    async def of_prompts(
        cls,
        prompts: Sequence[Sequence[int]],
        found: Mapping[int, Sequence[PromptLogprobs]],
        *,
        num_listed: int | None,
        num_echoed: int | None,
        token_bytes: TokenBytes,
        token_text: Callable[[int], str],
        buffer: OutputBuffer,
    ) -> Self:
        """Write what was found of each prompt, by its index, counted in `buffer`.

        `num_listed` and `num_echoed` are the numbers of likeliest tokens of the two forms; None
        disables one. Raises PagedRayError.
        """
        reports = cls()
        if num_listed is None and num_echoed is None:
            return reports
        for index, token_ids in enumerate(prompts):
            tokens = _tokens_of(token_ids, found.get(index, ()))
            listed: list[bytes] = []
            echoed: dict[str, list[bytes]] = {name: [] for name in _LISTS}
            offset = 0
            while part := list(islice(tokens, _SLICE)):
                num_bytes = 0
                if num_listed is not None:
                    rows = [_listed(one, num_listed, token_text) for one in part]
                    num_bytes += _add(rows, listed)
                if num_echoed is not None:
                    num_bytes += _add([token_text(one[0]) for one in part], echoed["tokens"])
                    logprobs = [None if one[1] is None else finite(one[1].chosen) for one in part]
                    num_bytes += _add(logprobs, echoed["token_logprobs"])
                    tops = [_top(one, num_echoed, token_text) for one in part]
                    num_bytes += _add(tops, echoed["top_logprobs"])
                    offsets = []
                    for token_id, _ in part:
                        offsets.append(offset)
                        # The text of the prompt has no special tokens.
                        if not token_bytes.is_special(token_id):
                            offset += len(token_bytes.text_of(token_id))
                    num_bytes += _add(offsets, echoed["text_offset"])
                buffer.collect(num_bytes)
                await asyncio.sleep(0)
            if num_listed is not None:
                written = msgspec.Raw(b"[%b]" % b",".join(listed))
                reports._fields[index] = {"prompt_logprobs": written}
            if num_echoed is not None:
                reports._lists[index] = echoed
        return reports


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return max(logprob, _LEAST_LOGPROB)


def _tokens_of(
    token_ids: Sequence[int], found: Sequence[PromptLogprobs]
) -> Iterator[tuple[int, PromptToken | None]]:
    """Yield the tokens of a prompt with what is known of each; nothing of the first one."""
    if (found[-1].end if found else 1) != len(token_ids):
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
