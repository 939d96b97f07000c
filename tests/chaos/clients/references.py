"""Runs each request on the undisturbed server; leaves out those with a decision near a tie."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pagedray.v1 import pagedray_pb2 as pb
from tests.chaos.clients.margins import LEAST_MARGIN, NUM_LOGPROBS, least_margin
from tests.chaos.history.events import ReferenceSequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.clients.frontends import GrpcFrontend
    from tests.chaos.clients.margins import TokenScores
    from tests.chaos.clients.requests import Spec

__all__ = ["undisturbed"]

_NUM_AT_ONCE = 8
_TIMEOUT_S = 300.0


class _Sequence:
    """One sequence as it arrives."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.scores: list[TokenScores] = []
        self.text = ""
        self.reason = ""


async def undisturbed(
    specs: Sequence[Spec], frontend: GrpcFrontend, *, key: str
) -> dict[Spec, tuple[ReferenceSequence, ...]]:
    """Return what requests give, without those that cannot be compared exactly."""
    places = asyncio.Semaphore(_NUM_AT_ONCE)

    async def run(spec: Spec) -> tuple[tuple[ReferenceSequence, ...], float]:
        async with places:
            return await _run(spec, frontend, key)

    found = await asyncio.gather(*map(run, specs))
    return {
        spec: sequences
        for spec, (sequences, margin) in zip(specs, found, strict=True)
        if margin >= LEAST_MARGIN
    }


async def _run(
    spec: Spec, frontend: GrpcFrontend, key: str
) -> tuple[tuple[ReferenceSequence, ...], float]:
    message = spec.to_message(
        f"undisturbed-{spec.name}", num_logprobs=None if spec.is_structured else NUM_LOGPROBS
    )
    method = frontend.stub.Chat if spec.is_chat else frontend.stub.Generate
    metadata = (("authorization", f"Bearer {key}"),)
    sequences = [_Sequence() for _ in range(spec.n)]
    num_prompt_tokens = 0
    async for answer in method(message, metadata=metadata, timeout=_TIMEOUT_S):
        if answer.HasField("prompt_info"):
            num_prompt_tokens = answer.prompt_info.num_prompt_tokens
        for one in answer.sequences:
            _add(sequences[one.index], one)
    margin = min(
        least_margin(spec, index, one.token_ids, one.scores, num_prompt_tokens)
        for index, one in enumerate(sequences)
    )
    return tuple(
        ReferenceSequence(token_ids=tuple(one.token_ids), text=one.text, reason=one.reason)
        for one in sequences
    ), margin


def _add(sequence: _Sequence, gained: Any) -> None:  # Any: one of two messages
    sequence.token_ids += gained.token_ids
    sequence.text += gained.text if isinstance(gained, pb.SequenceOutput) else gained.content
    sequence.scores += (
        tuple((top.token_id, top.logprob) for top in one.top_logprobs) for one in gained.logprobs
    )
    if gained.finish_reason != pb.FINISH_REASON_UNSPECIFIED:
        name = pb.FinishReason.Name(gained.finish_reason)
        sequence.reason = name.removeprefix("FINISH_REASON_").lower()
