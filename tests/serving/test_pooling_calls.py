"""Calls that embed: their limits, their texts and their ends."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cluster.serving.engine_client import EngineClient
from cluster.serving.inputs import EmbeddingInput
from cluster.serving.servicer import Servicer
from pagedray.errors import (
    DeadlineError,
    EngineError,
    InvalidRequestError,
)
from tests.serving.conftest import encoder_config
from tests.serving.limited_tenants import limited_tenants
from tests.serving.waiting import wait_until
from tests.virtual_time import pass_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from numpy.typing import NDArray

    from cluster.engine.embedding_job import EmbeddingRequest
    from cluster.engine.stats import EngineStats
    from cluster.serving.text.tokenizer import Tokenizer


class FakeEncoder:
    """Returns vectors on demand."""

    is_healthy = True
    error = None

    def __init__(self) -> None:
        self.requests: list[EmbeddingRequest] = []
        self.answers: list[Future[NDArray[np.float32]]] = []

    def check_room(self, tenant: str, num_tokens: int) -> None: ...

    def submit_request(self, request: EmbeddingRequest) -> Future[NDArray[np.float32]]:
        self.requests.append(request)
        self.answers.append(Future())
        return self.answers[-1]

    def stats(self) -> EngineStats:
        raise EngineError("It counts nothing.")


@pytest.fixture
async def encoder(
    tokenizer: Tokenizer, tmp_path: Path
) -> AsyncIterator[tuple[Servicer, FakeEncoder]]:
    client = EngineClient(asyncio.get_running_loop())
    fake = FakeEncoder()
    client.attach_embedding_engine(fake)
    servicer = Servicer(
        client, tokenizer, encoder_config(), authenticator=limited_tenants(tmp_path)
    )
    servicer.set_ready()
    yield servicer, fake
    await servicer.close()
    assert servicer.num_open_calls == 0


def texts(
    *prompts: str | tuple[int, ...], deadline_s: float | None = None, dimensions: int | None = None
) -> EmbeddingInput:
    return EmbeddingInput(
        prompts=prompts, tenant="ann", deadline_s=deadline_s, dimensions=dimensions
    )


async def test_texts_are_embedded(encoder: tuple[Servicer, FakeEncoder]) -> None:
    servicer, fake = encoder
    asking = asyncio.create_task(servicer.embed(texts((5, 6), (7,), dimensions=3)))
    await wait_until(lambda: bool(fake.answers))
    fake.answers[0].set_result(np.ones((2, 3), dtype=np.float32))
    output = await asking
    assert output.vectors.shape == (2, 3)
    assert output.num_prompt_tokens == 3
    assert fake.requests[0].tenant == "ann"
    assert fake.requests[0].pooling == "last"
    assert fake.requests[0].size == 3


async def test_late_cancelled_and_drained_embeddings_are_cancelled(
    encoder: tuple[Servicer, FakeEncoder],
) -> None:
    servicer, fake = encoder
    late = asyncio.create_task(servicer.embed(texts("x", deadline_s=time.monotonic() + 300.0)))
    await wait_until(lambda: len(fake.answers) == 1)
    pass_time(300.0)
    with pytest.raises(DeadlineError):
        await late
    leaving = asyncio.create_task(servicer.embed(texts("x")))
    await wait_until(lambda: len(fake.answers) == 2)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    draining = asyncio.create_task(servicer.embed(texts("x")))
    await wait_until(lambda: len(fake.answers) == 3)
    await servicer.drain(0.0)
    with pytest.raises(EngineError, match="shut down before"):
        await draining
    assert all(answer.cancelled() for answer in fake.answers)


@pytest.mark.parametrize(
    ("wrong", "param", "part"),
    [
        (texts(), "prompts", "1 to 2048 texts, not 0"),
        (texts(*["x"] * 2049), "prompts", "1 to 2048 texts, not 2049"),
        (texts(()), "prompts", "prompts must have 1 to 256 tokens, not 0"),
        (texts((5,) * 257), "prompts", "prompts must have 1 to 256 tokens, not 257"),
        (texts("x", ""), "prompts", "prompts must not have an empty text"),
        (texts((320,)), "prompts", "token id 320"),
        (texts("\ud800"), "prompts", "lone surrogate"),
        (texts("x", dimensions=0), "dimensions", "from 1 to 8, not 0"),
        (texts("x", dimensions=9), "dimensions", "from 1 to 8, not 9"),
        (replace(texts("x"), pooling="max"), "pooling", "one of mean, cls, last"),  # type: ignore[arg-type]  # the stubs are narrower than the library
        (texts((5,) * 60, (5,) * 60), "max_tokens", "may use 120 tokens"),
    ],
)
async def test_broken_texts_never_reach_the_encoder(
    encoder: tuple[Servicer, FakeEncoder], wrong: EmbeddingInput, param: str, part: str
) -> None:
    servicer, fake = encoder
    with pytest.raises(InvalidRequestError, match=part) as caught:
        await servicer.embed(wrong)
    assert caught.value.param == param
    assert not fake.requests
