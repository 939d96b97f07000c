"""Calls that their client aborts from elsewhere: they end with what they have."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from cluster.serving.openai.response_choice import CompleteChoice
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    import httpx

    from tests.serving.fake_engine import FakeEngine


async def aborted(http: httpx.Client, engine: FakeEngine, **body: Any) -> Any:  # Any: JSON
    """Return the response to a completion that is aborted before its first token."""
    engine.is_paused = True
    asked = {"model": "tiny", "prompt": "hello you", **body}
    answer = asyncio.create_task(
        asyncio.to_thread(
            http.post, "/v1/completions", json=asked, headers={"x-request-id": "mine"}
        )
    )
    await wait_until(lambda: bool(engine.log.submitted))
    assert http.delete("/v1/streams/mine").status_code == 200
    response = await answer
    assert response.status_code == 200, response.text
    return response.json()


async def test_nothing_is_known_of_the_prompt(http: httpx.Client, engine: FakeEngine) -> None:
    answer = await aborted(http, engine, prompt_logprobs=1, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["prompt_logprobs"] == [None] * len(choice["prompt_token_ids"])


async def test_an_echoed_prompt_has_no_logprobs(http: httpx.Client, engine: FakeEngine) -> None:
    answer = await aborted(http, engine, echo=True, logprobs=1)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hello you", "abort")
    assert len(choice["logprobs"]["tokens"]) > 1
    assert set(choice["logprobs"]["token_logprobs"]) == {None}


def test_a_choice_without_tokens_is_not_the_best() -> None:
    choices = [CompleteChoice(index=0), CompleteChoice(index=1, sum_logprobs=-9.0, num_tokens=2)]
    assert max(choices, key=CompleteChoice.mean_logprob).index == 1
