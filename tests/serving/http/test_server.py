"""The HTTP frontend, through the openai client and raw requests."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from tests.serving.checkpoint import TEXT
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine

USER = {"role": "user", "content": "hi"}


def _post(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    # Any: JSON
    return http.post(path, json={"model": "tiny", **body})


def test_completion(openai_client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    engine.num_cached_tokens = 2
    num_tokens = len(tokenizer.encode(TEXT, add_special_tokens=False))
    answer = openai_client.completions.create(model="tiny", prompt="hello", max_tokens=num_tokens)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (TEXT, "length", None)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == num_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + num_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_cached_tokens_count_once_for_each_prompt(
    openai_client: openai.OpenAI, engine: FakeEngine
) -> None:
    engine.num_cached_tokens = 2
    prompts = ["hello", "again", "more"]
    answer = openai_client.completions.create(model="tiny", prompt=prompts, max_tokens=9, n=2)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 54
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 6


def test_completion_has_16_tokens_by_default(
    openai_client: openai.OpenAI, engine: FakeEngine
) -> None:
    answer = openai_client.completions.create(model="tiny", prompt="hello")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    openai_client.completions.create(model="tiny", prompt=[5] * 250)
    assert engine.log.submitted[-1].sampling.max_tokens == 6


def test_streamed_completion_equals_the_complete_one(openai_client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 60, "n": 2}
    whole = openai_client.completions.create(**arguments)
    chunks = list(
        openai_client.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
    )
    texts = {0: "", 1: ""}
    reasons = {}
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {0: "length", 1: "length"}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 120
    assert len({chunk.id for chunk in chunks}) == 1


def test_many_prompts_give_choices_in_order(
    openai_client: openai.OpenAI, engine: FakeEngine
) -> None:
    answer = openai_client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=9)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]
    openai_client.completions.create(model="tiny", prompt=[[5, 6], [7]], max_tokens=1)
    assert [request.prompt_token_ids for request in engine.log.submitted[-2:]] == [(5, 6), (7,)]


def test_completion_logprobs(openai_client: openai.OpenAI) -> None:
    answer = openai_client.completions.create(model="tiny", prompt="x", max_tokens=4, logprobs=2)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs == [-0.5] * 4
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[:2] == [0, len(choice.logprobs.tokens[0])]
    assert choice.logprobs.top_logprobs is not None
    assert all(len(top) == 2 for top in choice.logprobs.top_logprobs)


def test_chat(openai_client: openai.OpenAI, engine: FakeEngine, tokenizer: Tokenizer) -> None:
    answer = openai_client.chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "h"}]},
            {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None},  # type: ignore[typeddict-item]  # a response of the client
            {"role": "user", "content": "i"},
        ],
        stop=" says",
        max_completion_tokens=100,
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "The quick brown fox"
    assert choice.finish_reason == "stop"
    assert tokenizer.encode(
        "<s><|system|>be kind</s><|user|>h</s><|assistant|>yes</s><|user|>i</s><|assistant|>",
        add_special_tokens=False,
    ) == list(engine.log.submitted[0].prompt_token_ids)


def test_chat_uses_the_rest_of_the_context_by_default(
    openai_client: openai.OpenAI, engine: FakeEngine
) -> None:
    answer = openai_client.chat.completions.create(model="tiny", messages=[USER])  # type: ignore[list-item]  # a dict
    assert answer.usage is not None
    assert answer.usage.total_tokens == 256


def test_streamed_chat(openai_client: openai.OpenAI) -> None:
    chunks = list(
        openai_client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=60,
            stream=True,
            logprobs=True,
            top_logprobs=1,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.startswith("The quick brown fox says h\u00e9llo \u4f60\u597d \U0001f642")
    assert chunks[-1].choices[0].finish_reason == "length"
    logprobs = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or ()
    ]
    assert len(logprobs) == 60
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs).decode(errors="replace") == text
    assert logprobs[0].top_logprobs[0].token == logprobs[0].token


def test_extra_parameters_reach_the_engine(
    openai_client: openai.OpenAI, engine: FakeEngine
) -> None:
    openai_client.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=4,
        temperature=0.5,
        top_p=0.5,
        seed=3,
        presence_penalty=1,
        frequency_penalty=-1.5,
        logit_bias={"7": -100},
        user="someone",
        echo=False,
        best_of=1,
        suffix=None,
        extra_body={
            "top_k": 3,
            "min_p": 0.25,
            "repetition_penalty": 1.25,
            "ignore_eos": True,
            "stop_token_ids": [9],
            "min_tokens": 2,
            "priority": 5,
        },
    )
    (request,) = engine.log.submitted
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, request.seed) == (0.5, 0.5, 3)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1.5)
    assert (dict(sampling.logit_bias), request.priority) == ({7: -100}, 5)
    assert (sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (3, 0.25, 1.25)
    assert (sampling.stop_token_ids, sampling.min_tokens, sampling.ignore_eos) == ((9,), 2, True)


@pytest.mark.parametrize(
    "body",
    [
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"functions": None, "parallel_tool_calls": True, "store": False, "audio": None},
        {"modalities": ["text"], "service_tier": "auto", "logprobs": None, "stop": None},
        {"separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False},
    ],
)
def test_defaults_of_unsupported_parameters_are_accepted(
    http: httpx.Client, body: dict[str, Any]
) -> None:
    answer = _post(http, "/v1/chat/completions", messages=[USER], max_tokens=1, **body)
    assert answer.status_code == 200


def test_client_id_is_echoed_in_the_header(http: httpx.Client, engine: FakeEngine) -> None:
    answer = http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": "x"},
        headers={"x-request-id": "mine-1"},
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert engine.log.submitted[0].id not in answer.text


async def test_disconnect_of_a_stream_aborts_at_once(server: Server) -> None:
    engine = server.engine
    engine.most_tokens = 1
    body = {"model": "tiny", "prompt": "x", "max_tokens": 200, "stream": True}
    async with (
        httpx.AsyncClient(base_url=server.url) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        async for _ in answer.aiter_lines():
            break
    await wait_until(lambda: engine.num_sequences == 0)
    assert engine.log.aborted == [engine.log.submitted[0].id]


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_before_the_first_token_aborts(server: Server, stream: bool) -> None:
    engine = server.engine
    engine.is_paused = True
    body = {"model": "tiny", "prompt": "x", "stream": stream}
    async with httpx.AsyncClient(base_url=server.url) as client:
        posting = asyncio.create_task(client.post("/v1/completions", json=body))
        await wait_until(lambda: engine.num_sequences == 1)
        posting.cancel()
        await asyncio.wait([posting])
    await wait_until(lambda: engine.num_sequences == 0)
    assert len(engine.log.aborted) == 1


def test_models(openai_client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in openai_client.models.list()] == ["tiny"]
    assert openai_client.models.retrieve("tiny").id == "tiny"
    assert http.get("/v1/models/other").status_code == 404


def test_unknown_model_is_not_found(openai_client: openai.OpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        openai_client.completions.create(model="other", prompt="x")
    assert engine.log.submitted == []


def test_health_and_metrics(http: httpx.Client, engine: FakeEngine) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    _post(http, prompt="x", max_tokens=5)
    _post(http, prompt="", max_tokens=5)
    text = http.get("/metrics").text
    for line in (
        "pagedray_healthy 1.0",
        'pagedray_blocks{pool="device"} 64.0',
        'pagedray_free_blocks{pool="cpu"} 32.0',
        'pagedray_sequences{state="swapped"} 0.0',
        'pagedray_preemptions_total{kind="recompute"} 2.0',
        'pagedray_attention_layers{part="decode",provider="native"} 3.0',
        'pagedray_attention_layers{part="decode",provider="torch"} 1.0',
        'pagedray_replaced_kernels{kernel="skinny"} 1.0',
        "pagedray_generated_tokens_total 50.0",
    ):
        assert line in text
    for name in ("time_to_first_token", "time_per_output_token", "request_duration"):
        assert f"pagedray_{name}_seconds_count" in text
    for outcome in ("length", "invalid"):
        assert re.search(rf'pagedray_requests_total{{frontend="\w+",outcome="{outcome}"}} ', text)


def test_every_event_is_one_line_of_json(http: httpx.Client) -> None:
    answer = _post(http, prompt="x", max_tokens=5, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        assert json.loads(event.removeprefix("data: "))["object"] == "text_completion"
