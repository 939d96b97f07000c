"""How far the decisions of a generated sequence are from a tie.

Keys and values that are computed again after a fault differ in their last bits, because they are
computed in other chunks and batches. A decision that is this close to a tie can then change,
without any fault of the server. Requests with such a decision are not used, so that every
difference that a run finds is a defect. Requests with a structure are used without this check:
log-probabilities ignore the structure, so that the second best token that it allows may not be
among those that are reported.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from workers.sampling.rows import generator_start, uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.clients.requests import Spec

__all__ = ["LEAST_MARGIN", "NUM_LOGPROBS", "TokenScores", "least_margin"]

NUM_LOGPROBS = 20
LEAST_MARGIN = 2e-4
"""Log-probabilities of the same position in different batches differ by about 1e-5 in float32."""

TokenScores = tuple[tuple[int, float], ...]
"""The most likely tokens of a position with their log-probabilities, the most likely first."""


def least_margin(
    spec: Spec,
    index: int,
    token_ids: Sequence[int],
    scores: Sequence[TokenScores],
    num_prompt_tokens: int,
) -> float:
    """Return by how much a log-probability or a random number must change to change a token."""
    if spec.temperature == 0.0:
        return min((top[0][1] - top[1][1] for top in scores), default=math.inf)
    starts = np.array([generator_start(spec.seed, index)], dtype=np.uint64)
    margin = math.inf
    for place, (token_id, top) in enumerate(zip(token_ids, scores, strict=True)):
        position = np.array([num_prompt_tokens + place], dtype=np.int64)
        uniform = float(uniforms(np.repeat(starts, 1), position)[0])
        margin = min(margin, _drawn_margin(spec, token_id, top, uniform))
    return margin


def _drawn_margin(spec: Spec, token_id: int, top: TokenScores, uniform: float) -> float:
    assert 0 < spec.top_k < len(top), "The filter must keep less than what is reported."
    kept = top[: spec.top_k]
    weights = np.exp((np.array([score for _, score in kept]) - kept[0][1]) / spec.temperature)
    ends = np.cumsum(weights) / weights.sum()
    chosen = int(np.searchsorted(ends, uniform, side="right"))
    assert kept[chosen][0] == token_id, "This is not how the server draws tokens."
    begin = ends[chosen - 1] if chosen else 0.0
    # The last one ends at 1, which no random number reaches.
    end = ends[chosen] if chosen + 1 < len(kept) else math.inf
    # Tokens whose order changes exchange their intervals; so does the last kept one with the next.
    order = min(
        top[place][1] - top[place + 1][1]
        for place in range(max(chosen - 1, 0), min(chosen + 1, len(top) - 1))
    )
    begin_margin = uniform - begin if chosen else math.inf
    return float(min(begin_margin, end - uniform, order))
