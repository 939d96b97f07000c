"""The servicer: admission, tenants' limits, and the end of generations and embeddings."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cluster.serving.continuation import Continuation
from cluster.serving.engine_client import EngineClient
from cluster.serving.inputs import EmbeddingInput, GenerationInput, ScoreInput, TokenizeInput
from cluster.serving.servicer import Servicer
from pagedray.errors import (
    AuthenticationError,
    DeadlineError,
    DuplicateIdError,
    EngineError,
    ForbiddenError,
    InvalidRequestError,
    OverloadedError,
    ShuttingDownError,
)
from pagedray.request import FinishReason
from pagedray.sampling_params import Structure
from tests.serving.conftest import encoder_config, engine_config, limited_tenants, wait_until
from tests.serving.fake_engine import FakeEngine
from tests.virtual_time import pass_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from numpy.typing import NDArray

    from cluster.engine.embedding_scheduler import EmbeddingRequest
    from cluster.engine.stats import EngineStats
    from cluster.serving.auth import Authenticator
    from cluster.serving.generation_call import GenerationCall
    from cluster.serving.text.tokenizer import Tokenizer

TIMEOUT_S = 60.0


class Opened:
    """A servicer and its fake engine."""

    def __init__(self, tokenizer: Tokenizer, keys: Authenticator | None) -> None:
        self.client = EngineClient(asyncio.get_running_loop())
        self.engine = FakeEngine(self.client, lambda request, index: [100])
        self.client.attach_engine(self.engine)
        self.servicer = Servicer(self.client, tokenizer, engine_config(), authenticator=keys)
        self.servicer.set_ready()

    async def close(self) -> None:
        self.engine.stop()
        await self.servicer.close()


@pytest.fixture
async def opened(tokenizer: Tokenizer, tmp_path: Path) -> AsyncIterator[Opened]:
    one = Opened(tokenizer, limited_tenants(tmp_path))
    one.engine.is_paused = True
    yield one
    await one.close()


@pytest.fixture
def servicer(opened: Opened) -> Servicer:
    return opened.servicer


def given(
    tenant: str = "ann",
    *,
    client_id: str | None = None,
    max_tokens: int = 10,
    prompts: tuple[tuple[int, ...], ...] = ((5, 6, 7),),
    deadline_s: float | None = None,
    priority: int = 0,
) -> GenerationInput:
    return GenerationInput(
        prompts=prompts,
        sampling={"max_tokens": max_tokens, "ignore_eos": True},
        tenant=tenant,
        client_id=client_id,
        deadline_s=deadline_s,
        priority=priority,
    )


async def ended(generation: GenerationCall) -> FinishReason | None:
    async for output in generation.outputs():
        reason = output.sequences[-1].finish_reason
    generation.close()
    return reason


async def test_open_calls_of_a_tenant_are_bounded(servicer: Servicer) -> None:
    calls = [await servicer.start_generation(given()) for _ in range(2)]
    with pytest.raises(
        OverloadedError, match="The tenant of this API key has 2 open calls"
    ) as caught:
        await servicer.start_generation(given())
    assert 0.1 <= caught.value.retry_after_s <= 60
    others = [await servicer.start_generation(given("ben")) for _ in range(4)]
    calls[0].close()
    calls.append(await servicer.start_generation(given()))
    for call in (*calls, *others):
        call.close()
    assert servicer.num_open_calls == 0


async def test_tokens_of_open_calls_of_a_tenant_are_bounded(servicer: Servicer) -> None:
    with pytest.raises(InvalidRequestError, match="may use 103 tokens, but") as rejected:
        await servicer.start_generation(given(max_tokens=100))
    assert rejected.value.param == "max_tokens"
    call = await servicer.start_generation(given(max_tokens=60))
    with pytest.raises(OverloadedError, match="exceed the limit of 100"):
        await servicer.start_generation(given(max_tokens=60))
    call.close()
    (await servicer.start_generation(given(max_tokens=60))).close()


async def test_rejected_calls_hold_nothing(servicer: Servicer) -> None:
    for _ in range(5):
        with pytest.raises(InvalidRequestError):
            await servicer.start_generation(given(prompts=((10**6,),)))
    calls = [await servicer.start_generation(given()) for _ in range(2)]
    for call in calls:
        call.close()


async def test_last_output_frees_id_and_limits(opened: Opened) -> None:
    opened.engine.is_paused = False
    generations = [
        await opened.servicer.start_generation(given(client_id=f"c{i}")) for i in range(2)
    ]
    for generation in generations:
        async for output in generation.outputs():
            if output.is_last:
                (await opened.servicer.start_generation(given(client_id=generation.id))).close()
        generation.close()


async def test_tenants_neither_see_nor_end_nor_block_each_others_calls(opened: Opened) -> None:
    servicer = opened.servicer
    anns = await servicer.start_generation(given("ann", client_id="mine"))
    bens = await servicer.start_generation(given("ben", client_id="mine"))
    servicer.abort_call("root", "mine")
    servicer.abort_call("ben", "other")
    servicer.abort_call("ben", "mine")
    assert await ended(bens) is FinishReason.ABORT
    assert opened.engine.num_sequences == 1
    who = {name: servicer.authenticate(f"Bearer {name}") for name in ("ann", "ben", "root")}
    shown = {name: [call.id for call in servicer.loads(who[name]).calls] for name in who}
    assert shown == {"ann": ["mine"], "ben": [], "root": ["mine"]}
    (info,) = servicer.loads(who["root"]).calls
    assert (info.tenant, info.num_prompt_tokens, info.num_generated_tokens) == ("ann", 3, 0)
    anns.close()


async def test_weights_reach_the_engine_and_an_unknown_tenant_does_not(opened: Opened) -> None:
    (await opened.servicer.start_generation(given("ben"))).close()
    (request,) = opened.engine.log.submitted
    assert (request.tenant, request.weight) == ("ben", 3.0)
    for name in ("", "unknown"):
        with pytest.raises(AuthenticationError):
            await opened.servicer.start_generation(given(name))


async def test_only_an_admin_may_set_a_negative_priority(servicer: Servicer) -> None:
    with pytest.raises(ForbiddenError, match="priority below 0"):
        await servicer.start_generation(given(priority=-1))
    (await servicer.start_generation(given(priority=1))).close()
    (await servicer.start_generation(given("root", priority=-1))).close()


async def test_full_queue_and_late_call_are_rejected_before_texts_are_read(opened: Opened) -> None:
    late = given(deadline_s=time.monotonic(), prompts=((10**6,),))
    with pytest.raises(DeadlineError, match="before the request arrived"):
        await opened.servicer.start_generation(late)
    opened.engine.rejection = OverloadedError("The queue is full.")
    with pytest.raises(OverloadedError):
        await opened.servicer.start_generation(given(prompts=((10**6,),)))


async def test_call_ends_at_its_deadline_even_if_the_engine_is_stuck(opened: Opened) -> None:
    call = await opened.servicer.start_generation(given(deadline_s=time.monotonic() + 300.0))
    pass_time(300.0)
    with pytest.raises(DeadlineError, match="passed before the request was finished"):
        await ended(call)
    assert opened.engine.num_sequences == 0
    call.close()


async def test_encoder_does_not_generate_and_decoder_does_not_embed(
    opened: Opened, tokenizer: Tokenizer
) -> None:
    with pytest.raises(InvalidRequestError, match="tiny generates text; for embeddings") as caught:
        await opened.servicer.embed(EmbeddingInput(prompts=("x",), tenant="ann"))
    assert caught.value.param == "model"
    pairs = ScoreInput(pairs=(("x", "y"),), params=("query", "documents"), tenant="ann")
    with pytest.raises(InvalidRequestError, match="served with --task score"):
        await opened.servicer.score(pairs)
    encoder = Servicer(opened.client, tokenizer, encoder_config())
    encoder.set_ready()
    with pytest.raises(InvalidRequestError, match="tiny only computes embeddings"):
        await encoder.start_generation(given(""))
    await encoder.close()


async def test_tokens_become_text_again(servicer: Servicer) -> None:
    text = "Ein Text. " * 20
    ids = await servicer.tokenize(TokenizeInput(prompt=text, add_special_tokens=False))
    assert await servicer.detokenize(ids) == text
    begun = await servicer.tokenize(TokenizeInput(prompt="x"))
    assert await servicer.detokenize(begun) == "x"
    assert await servicer.detokenize(begun, skip_special_tokens=False) != "x"
    assert await servicer.detokenize([]) == ""
    for ids_given in ([-1], [320], [True], [1] * 257):
        with pytest.raises(InvalidRequestError) as caught:
            await servicer.detokenize(ids_given)
        assert caught.value.param == "token_ids"


async def test_draining_server_accepts_nothing_and_ends_the_rest(opened: Opened) -> None:
    call = await opened.servicer.start_generation(given())
    draining = asyncio.create_task(opened.servicer.drain(0.05))
    await asyncio.sleep(0)
    assert not opened.servicer.is_ready
    with pytest.raises(ShuttingDownError):
        await opened.servicer.start_generation(given())
    with pytest.raises(EngineError, match="shut down before"):
        await ended(call)
    call.close()
    await draining


async def test_a_drain_rejects_a_call_whose_structure_is_being_compiled(opened: Opened) -> None:
    # It takes many seconds.
    rules = " | ".join(f'"{i}" [{chr(0x100 + i)}a-z]{{120}}' for i in range(400))
    structure = Structure(kind="grammar", text=f"root ::= {rules}")
    sampling = {"max_tokens": 10, "structure": structure}
    call = GenerationInput(prompts=((5, 6, 7),), sampling=sampling, tenant="ann")
    compiling = asyncio.create_task(opened.servicer.start_generation(call))
    while opened.servicer.num_open_calls == 0:
        await asyncio.sleep(0.01)
    await opened.servicer.drain(600.0)
    with pytest.raises(ShuttingDownError):
        await compiling


SENT = Continuation(call_id="of the proxy", seed=1, created_s=0)


async def test_call_that_a_proxy_sends_twice_goes_on_once(opened: Opened) -> None:
    call = replace(given(client_id="mine"), continuation=SENT)
    first = await opened.servicer.start_generation(call)
    second = await opened.servicer.start_generation(call)
    with pytest.raises(EngineError, match="continues in another call"):
        await anext(first.outputs())
    opened.engine.is_paused = False
    outputs = [output async for output in second.outputs()]
    assert outputs[-1].usage.num_generated_tokens == 10
    first.close()
    second.close()


async def test_the_last_sending_of_a_call_goes_on_in_whatever_order_both_are_validated(
    opened: Opened,
) -> None:
    call = replace(given(client_id="mine"), continuation=SENT)
    tenant = opened.servicer.authenticator.tenant_named(call.tenant)
    sendings = [
        opened.servicer.enter_call(tenant, uses_engine=True, is_continued=False) for _ in range(2)
    ]
    last = await opened.servicer.start_generation(call, sendings[1])
    opened.engine.is_paused = False
    with pytest.raises(EngineError, match="continues in another call"):
        await opened.servicer.start_generation(call, sendings[0])
    outputs = [output async for output in last.outputs()]
    assert outputs[-1].usage.num_generated_tokens == 10
    last.close()


async def test_call_that_was_aborted_is_not_begun_again_when_a_proxy_sends_it_twice(
    opened: Opened,
) -> None:
    call = replace(given(client_id="mine"), continuation=SENT)
    first = await opened.servicer.start_generation(call)
    opened.servicer.abort_call(first.tenant, "mine")
    first.close()
    second = await opened.servicer.start_generation(call)
    opened.engine.is_paused = False
    outputs = [output async for output in second.outputs()]
    assert outputs[-1].sequences[-1].finish_reason is FinishReason.ABORT
    assert outputs[-1].usage.num_generated_tokens == 0
    second.close()


async def test_another_call_with_its_id_is_rejected(servicer: Servicer) -> None:
    call = replace(given(client_id="mine"), continuation=SENT)
    first = await servicer.start_generation(call)
    with pytest.raises(DuplicateIdError):
        await servicer.start_generation(
            replace(call, continuation=replace(SENT, call_id="of another call"))
        )
    first.close()


class FakeEncoder:
    """Returns vectors on demand."""

    is_healthy = True
    error = None

    def __init__(self) -> None:
        self.requests: list[EmbeddingRequest] = []
        self.answers: list[Future[NDArray[np.float32]]] = []

    def check_room(self, tenant: str, num_tokens: int) -> None: ...

    def submit_texts(self, texts: EmbeddingRequest) -> Future[NDArray[np.float32]]:
        self.requests.append(texts)
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
    client.attach_engine(fake)  # type: ignore[arg-type]  # a part of it
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
