"""Reasoning in generated text, and over every API that has conversations."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cluster.serving.reasoning import ReasoningReader, detect_reasoning, reasoning_after
from pagedray.request import Reasoning, ReasoningPlace, ReasoningTracker
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.text.tokenizer import Tokenizer

TEMPLATE = (
    "{# <tool_call> #}{% if tools %}tools {% endif %}"
    "{% for message in messages %}{{ message.role }}({{ message.reasoning_content }})"
    "={{ message.content }};{% endfor %}>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif reasoning_effort is defined %}<think>\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
THOUGHT = "First <b> then </thi c."
TEXT = f"<think>\n{THOUGHT}\n</think>\n\nIt is 5. "
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]  # Any: what clients call a param
ASK: list[Any] = [{"role": "user", "content": "hi"}]  # Any: as above


@pytest.fixture(scope="module")
def thinking_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    """A server of a model that reasons, whose template writes all that it gets."""
    with Server(template_tokenizer(TEMPLATE), context=1024) as server:
        yield server


@pytest.fixture
def client(thinking_server: Server) -> Iterator[openai.OpenAI]:
    thinking_server.engine.reset()
    url = f"{thinking_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


def streamed(client: openai.OpenAI, **options: Any) -> tuple[dict[str, str], str, Any]:
    """Return the joined texts of a stream's deltas by their names, its end and its usage."""
    texts: dict[str, str] = {}
    reason, usage = "", None
    options.setdefault("stream_options", {"include_usage": True})
    for chunk in client.chat.completions.create(model="tiny", messages=ASK, stream=True, **options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            for name, value in choice.delta.model_dump(exclude_none=True).items():
                if isinstance(value, str):
                    texts[name] = texts.get(name, "") + value
            reason = choice.finish_reason or reason
    return texts, reason, usage


def test_budget_limits_the_reasoning_of_the_request(
    thinking_server: Server, client: openai.OpenAI
) -> None:
    thinking_server.say(TEXT)
    for budget in (-1, None, 7):
        client.chat.completions.create(
            model="tiny", messages=ASK, extra_body={"thinking_token_budget": budget}
        )
        client.responses.create(
            model="tiny", input="hi", extra_body={"thinking_token_budget": budget}
        )
    with grpc.insecure_channel(thinking_server.grpc_target) as channel:
        sampling = pb.SamplingParams(thinking_token_budget=0)
        messages = [pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")]
        request = pb.ChatRequest(messages=messages, sampling=sampling)
        list(pagedray_pb2_grpc.GenerationServiceStub(channel).Chat(request))
    submitted = thinking_server.engine.log.submitted
    found = [(one.sampling.thinking_token_budget, one.grammar is None) for one in submitted]
    assert found == [*[(None, True)] * 4, *[(7, False)] * 2, (0, False)]


def test_chat_separates_reasoning(thinking_server: Server, client: openai.OpenAI) -> None:
    thinking_server.say(TEXT)
    num_inside = len(
        thinking_server.tokenizer.encode(TEXT.partition("\n\nIt")[0], add_special_tokens=False)
    )
    whole = client.chat.completions.create(model="tiny", messages=ASK)
    message = whole.choices[0].message.model_dump()
    assert message["reasoning_content"] == message["reasoning"] == THOUGHT
    assert message["content"] == "It is 5. "
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == num_inside
    texts, reason, usage = streamed(client)
    assert texts == {
        "role": "assistant",
        "reasoning_content": THOUGHT,
        "reasoning": THOUGHT,
        "content": "It is 5. ",
    }
    assert (reason, usage) == ("stop", whole.usage)


def test_reasoning_is_streamed_as_it_is_generated(
    thinking_server: Server, client: openai.OpenAI
) -> None:
    thinking_server.say(TEXT)
    stream = client.chat.completions.create(model="tiny", messages=ASK, stream=True)
    deltas = [chunk.choices[0].delta.model_dump() for chunk in stream]
    assert sum(bool(delta.get("reasoning")) for delta in deltas) > 10


def test_counted_prompt_has_the_variables_of_its_template(
    thinking_server: Server, client: openai.OpenAI
) -> None:
    variables = {"chat_template_kwargs": {"enable_thinking": False, "other": 1}}
    client.chat.completions.create(model="tiny", messages=ASK, extra_body=variables)
    body = {"messages": ASK, **variables}
    found = httpx.post(f"{thinking_server.url}/tokenize", json=body).json()["tokens"]
    (request,) = thinking_server.engine.log.submitted
    assert found == list(request.prompt_token_ids)
    assert "</think>" in thinking_server.tokenizer.decode(found)


@pytest.mark.parametrize(
    ("options", "text", "found"),
    [
        ({"reasoning_effort": "high"}, "hm</think>Yes", ("hm", "Yes")),
        (
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
            "Yes",
            (None, "Yes"),
        ),
        ({"extra_body": {"include_reasoning": False}}, TEXT, (None, "It is 5. ")),
        ({}, "No <think>", (None, "No <think>")),
        ({}, "<think>cut", ("cut", "")),
        ({"n": 2}, TEXT, (THOUGHT, "It is 5. ")),
    ],
)
def test_prompt_decides_where_a_turn_begins(
    thinking_server: Server,
    client: openai.OpenAI,
    options: dict[str, Any],
    text: str,
    found: tuple[str | None, str],
) -> None:
    thinking_server.say(text)
    whole = client.chat.completions.create(model="tiny", messages=ASK, **options)
    for choice in whole.choices:
        message = choice.message.model_dump()
        assert (message.get("reasoning"), message["content"]) == found


@pytest.mark.parametrize("is_stream", [False, True])
def test_calls_follow_reasoning(
    thinking_server: Server, client: openai.OpenAI, is_stream: bool
) -> None:
    thinking_server.say(f"<think>I look {CALL}</think>\n\n{CALL}")
    if is_stream:
        texts, reason, _ = streamed(client, tools=TOOLS)
        assert (texts["reasoning"], texts.get("content", "")) == (f"I look {CALL}", "")
        assert reason == "tool_calls"
        return
    whole = client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    (choice,) = whole.choices
    assert choice.message.model_dump()["reasoning"] == f"I look {CALL}"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1}  # type: ignore[union-attr]  # a function


def test_reasoning_of_earlier_turns_reaches_the_template(
    thinking_server: Server, client: openai.OpenAI
) -> None:
    thinking_server.say("ok")
    turn: Any = {"role": "assistant", "content": "5", "reasoning_content": "hm"}
    client.chat.completions.create(model="tiny", messages=[*ASK, turn, *ASK])
    (request,) = thinking_server.engine.log.submitted
    assert "assistant(hm)=5;" in thinking_server.tokenizer.decode(request.prompt_token_ids)


def test_responses_have_reasoning_items(thinking_server: Server, client: openai.OpenAI) -> None:
    thinking_server.say(f"{TEXT}{CALL}")
    tools: list[Any] = [{"type": "function", "strict": None, **FUNCTION}]
    whole = client.responses.create(model="tiny", input="hi", tools=tools)
    Response.model_validate_json(whole.model_dump_json())
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    reasoning: Any = whole.output[0]
    assert reasoning.content[0].text == THOUGHT
    assert whole.output_text == "It is 5."
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 5
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = list(client.responses.create(model="tiny", input="hi", tools=tools, stream=True))
    for event in events:
        adapter.validate_python(event.model_dump())
    kinds = [event.type for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    parts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(parts) == THOUGHT
    assert len(parts) > 5
    final: Any = events[-1]
    assert [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in final.response.model_dump()["output"]
    ] == [
        {name: value for name, value in item.items() if name not in ("id", "call_id")}
        for item in whole.model_dump()["output"]
    ]


def test_messages_have_thinking_blocks(thinking_server: Server) -> None:
    thinking_server.engine.reset()
    thinking_server.say(TEXT)
    body = {"model": "tiny", "max_tokens": 512, "messages": ASK}
    url = f"{thinking_server.url}/v1/messages"
    whole = httpx.post(url, json=body, timeout=60).json()
    assert whole["content"] == [
        {"type": "thinking", "thinking": THOUGHT, "signature": ""},
        {"type": "text", "text": "It is 5. ", "citations": None},
    ]
    streamed = httpx.post(url, json=body | {"stream": True}, timeout=60).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert blocks == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
    ]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("text", "") for delta in deltas) == "It is 5. "
    signatures = [i for i, delta in enumerate(deltas) if delta["type"] == "signature_delta"]
    assert signatures == [sum("thinking" in delta for delta in deltas)]


def test_messages_may_limit_their_thinking(thinking_server: Server) -> None:
    thinking_server.engine.reset()
    thinking_server.say(TEXT)
    body = {"model": "tiny", "max_tokens": 512, "messages": ASK}
    url = f"{thinking_server.url}/v1/messages"
    given: list[dict[str, Any]] = [
        {"type": "enabled", "budget_tokens": 7},
        {"type": "enabled", "budget_tokens": 2048},
        {"type": "enabled"},
        {"type": "adaptive"},
        {"type": "disabled"},
    ]
    for thinking in given:
        answer = httpx.post(url, json=body | {"thinking": thinking}, timeout=60)
        assert answer.status_code == 200, answer.text
    budgets = [one.sampling.thinking_token_budget for one in thinking_server.engine.log.submitted]
    assert budgets == [7, 2048, None, None, None]
    large = {"type": "enabled", "budget_tokens": 2**40}
    answer = httpx.post(url, json=body | {"thinking": large}, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("thinking.budget_tokens must be from 0 to")
    metrics = httpx.get(f"{thinking_server.url}/metrics").text
    assert 'parameter="thinking.budget_tokens"' not in metrics


FORCED = f"<think>\n{THOUGHT}\n</think>\n\n" + '{"a": 1}'


def test_a_forced_call_is_an_item_behind_the_reasoning(
    thinking_server: Server, client: openai.OpenAI
) -> None:
    thinking_server.say(FORCED)
    tools: list[Any] = [{"type": "function", "strict": None, **FUNCTION}]
    choice: Any = {"type": "function", "name": "look"}
    ask = {"model": "tiny", "input": "hi", "tools": tools, "tool_choice": choice}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    final: Any = events[-1]
    for response in (whole, final.response):
        reasoning, call = response.output
        assert (reasoning.type, reasoning.content[0].text) == ("reasoning", THOUGHT)
        assert (call.type, call.name, call.arguments) == ("function_call", "look", '{"a": 1}')
    kinds = [event.type for event in events]
    ended = kinds.index("response.reasoning_text.done")
    assert ended < kinds.index("response.function_call_arguments.delta")


def test_a_forced_call_is_a_block_behind_the_thoughts(thinking_server: Server) -> None:
    thinking_server.engine.reset()
    thinking_server.say(FORCED)
    body = {
        "model": "tiny",
        "max_tokens": 512,
        "messages": ASK,
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "look"},
    }
    url = f"{thinking_server.url}/v1/messages"
    thoughts, call = httpx.post(url, json=body, timeout=60).json()["content"]
    assert thoughts["thinking"] == THOUGHT
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "look", {"a": 1})
    streamed = httpx.post(url, json=body | {"stream": True}, timeout=60).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    deltas = [event for event in events if event["type"] == "content_block_delta"]
    assert "".join(one["delta"].get("thinking", "") for one in deltas) == THOUGHT
    parts = [one for one in deltas if one["delta"]["type"] == "input_json_delta"]
    assert {one["index"] for one in parts} == {1}
    assert "".join(one["delta"]["partial_json"] for one in parts) == '{"a": 1}'


def test_grpc_separates_reasoning(thinking_server: Server) -> None:
    thinking_server.engine.reset()
    thinking_server.say(TEXT)
    user = pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")
    past = pb.ChatMessage(role=pb.CHAT_ROLE_ASSISTANT, content="5", reasoning="hm")
    with grpc.insecure_channel(thinking_server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        parts = list(stub.Chat(pb.ChatRequest(messages=[user, past, user])))
        thinking_server.say("5")
        plain = pb.ChatRequest(
            messages=[user], chat_template_kwargs='{"enable_thinking": false, "other": 1}'
        )
        assert "".join(part.sequences[0].content for part in stub.Chat(plain)) == "5"
    first, second = thinking_server.engine.log.submitted
    decode = thinking_server.tokenizer.decode
    assert "assistant(hm)=5;" in decode(first.prompt_token_ids)
    assert decode(second.prompt_token_ids).endswith("</think>\n\n")
    assert "".join(part.sequences[0].reasoning for part in parts) == THOUGHT
    assert "".join(part.sequences[0].content for part in parts) == "It is 5. "
    assert 5 < parts[-1].usage.num_reasoning_tokens < parts[-1].usage.num_generated_tokens


MARKS = Reasoning(begin="<think>", end="</think>")
OPEN = Reasoning(begin="<think>", end="</think>", is_open=True)
PIECES = ("<think>", "</think>", "<", "</", "think>", "thi", "nk>", " ", "\n", "a", "b c", "é")


def read(reasoning: Reasoning, pieces: list[str]) -> tuple[str, str]:
    reader = ReasoningReader(reasoning)
    parts = [reader.read_piece(piece) for piece in pieces] + [reader.read_piece("", is_last=True)]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def expected_of(text: str, *, is_open: bool) -> tuple[str, str]:
    """Return the same from the whole text, by an expression."""
    found = re.fullmatch(r"(?s)[ \t\r\n]{0,16}<think>(.*)", text)
    if found is None and not is_open:
        return "", text
    inside, _, rest = (text if found is None else found[1]).partition("</think>")
    return inside.strip(" \t\r\n"), rest.lstrip(" \t\r\n")


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), is_open=st.booleans())
def test_pieces_are_read_as_the_whole(pieces: list[str], is_open: bool) -> None:
    reasoning = OPEN if is_open else MARKS
    text = "".join(pieces)
    assert read(reasoning, pieces) == expected_of(text, is_open=is_open)
    assert read(reasoning, list(text)) == expected_of(text, is_open=is_open)


@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12), is_open=st.booleans())
def test_tokens_are_followed_as_the_text(pieces: list[str], is_open: bool) -> None:
    reasoning = OPEN if is_open else MARKS
    reader, tracker = ReasoningReader(reasoning), ReasoningTracker(reasoning)
    for piece in pieces:
        reader.read_piece(piece)
        tracker.add_token(0, piece.encode())
        if not (is_open and reader.place is ReasoningPlace.INSIDE):
            assert tracker.place is reader.place


def test_text_is_held_back_only_while_it_may_be_a_mark() -> None:
    reader = ReasoningReader(MARKS)
    steps = [
        ("\n<th", ("", "")), ("ink>\n", ("", "")), ("One <", ("One", "")), ("b", (" <b", "")),
        (" two </thin", (" two", "")), ("k>\n\n", ("", "")), ("An", ("", "An")), (" <", ("", " <")),
    ]  # fmt: skip
    for piece, found in steps:
        assert reader.read_piece(piece) == found
    reader = ReasoningReader(MARKS)
    assert [reader.read_piece(piece) for piece in (" <th", "e> x")] == [("", ""), ("", " <the> x")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<think>\\n' }}", "qwen3"),
        ("{% if '</think>' in content %}", "qwen3"),
        ("{{ '[THINK]' }}", "mistral"),
        ("after 'Here is my thought process:' and", "granite"),
        ("{{ '<seed:think>' }}", "seed_oss"),
        ("{{ '<|channel>thought\\n<channel|>' }}", "gemma4"),
        ("{{ messages }}", "none"),
        ("", "none"),
    ],
)
def test_format_is_found_in_the_template(template: str, name: str) -> None:
    assert detect_reasoning(template) == name


@pytest.mark.parametrize(
    ("end", "is_open", "is_always_open"),
    [
        ("<|assistant|>", False, True),
        ("<|assistant|><think>\n", True, True),
        ("<|assistant|><think>\n\n</think>\n\n", None, None),
        ("say <think><|assistant|>", False, True),
    ],
)
def test_prompt_decides_whether_a_turn_begins_inside(
    end: str, is_open: bool | None, is_always_open: bool | None
) -> None:
    for reasoning, expected in ((MARKS, is_open), (OPEN, is_always_open)):
        found = reasoning_after(reasoning, end)
        assert (None if found is None else found.is_open) is expected
