"""Embeds and scores the texts of `LLM`, on the thread of the caller."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from cluster.llm_prompts import read_texts
from cluster.llm_requests import run_apart
from cluster.llm_runner import HELD_POLL_S
from cluster.serving.validation.embedding_validator import MAX_PROMPTS
from cluster.serving.validation.score_validator import MAX_PAIRS
from pagedray.errors import InvalidRequestError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from cluster.engine.embedder import Embedder
    from cluster.engine.embedding_job import EmbeddingRequest
    from cluster.serving.inputs import EmbeddingInput, ScoreInput
    from cluster.serving.validation.embedding_validator import EmbeddingValidator
    from cluster.serving.validation.score_validator import ScoreValidator

__all__ = ["embed_prompts", "read_pairs", "score_pairs"]


def embed_prompts(
    embedder: Embedder, validator: EmbeddingValidator, given: EmbeddingInput
) -> list[list[float]]:
    """Return the vectors of any number of prompts. Raises InvalidRequestError or EngineError."""
    vectors: list[list[float]] = []
    for first in range(0, len(given.prompts), MAX_PROMPTS):
        part = replace(given, prompts=given.prompts[first : first + MAX_PROMPTS])
        vectors += _result_of(embedder, run_apart(validator.validate(part))).tolist()
    return vectors


def score_pairs(embedder: Embedder, validator: ScoreValidator, given: ScoreInput) -> list[float]:
    """Return the scores of any number of pairs. Raises InvalidRequestError or EngineError."""
    scores: list[float] = []
    for first in range(0, len(given.pairs), MAX_PAIRS):
        part = replace(given, pairs=given.pairs[first : first + MAX_PAIRS])
        scores += _result_of(embedder, run_apart(validator.validate(part)))[:, 0].tolist()
    return scores


def read_pairs(
    queries: str | Sequence[str], documents: str | Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """Return the query of each document, and the document. Raises InvalidRequestError."""
    others, firsts = read_texts(documents, "documents"), read_texts(queries, "queries")
    if isinstance(queries, str):
        firsts *= len(others)
    if len(firsts) != len(others):
        raise InvalidRequestError(
            f"queries must have one entry per document, {len(others)}, not {len(firsts)}.",
            param="queries",
        )
    return tuple(zip(firsts, others, strict=True))


def _result_of(embedder: Embedder, request: EmbeddingRequest) -> NDArray[np.float32]:
    """Submit a request as soon as the queue has room; return its result, `[num_texts, size]`."""
    while True:
        try:
            answer = embedder.submit_request(request)
        except OverloadedError:
            time.sleep(HELD_POLL_S)
        else:
            return answer.result()
