"""OpenAI's Responses API: what the model reads, what clients get, and what is rejected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseStreamEvent,
)
from pydantic import BaseModel, TypeAdapter

from cluster.serving.generation_call import GenerationOutput, Usage
from cluster.serving.intake import BufferLimits, ReaderLimits
from cluster.serving.responses.response import ResponsesResponse
from cluster.serving.responses.responses_body import Echo
from cluster.serving.responses.stored_responses import StoreLimits
from cluster.serving.text.text_stream import SequenceOutput
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.serving.tools.turns import Turns
from pagedray.request import FinishReason
from pagedray.sampling_params import Structure
from tests.serving.conftest import Server, wait_until
from tests.serving.responses.response_calls import CALL, OUTPUT, SPACE, TEMPLATE, TOOL, USE, posted

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from cluster.serving.text.tokenizer import Tokenizer


class City(BaseModel):
    """What the client parses."""

    city: str


PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({}, "user()=hi;>"),
    ({"instructions": "Be brief."}, "system()=Be brief.;user()=hi;>"),
    ({"tools": [TOOL]}, "[look]user()=hi;>"),
    ({"tools": [TOOL, SPACE], "client_metadata": {"a": "b"}}, "[lookeyes.look]user()=hi;>"),
    ({"input": [{**USE, "namespace": "eyes"}, OUTPUT]},
     "assistant()=!eyes.look{};tool()c1=5;>"),
    ({"reasoning": {"effort": "low", "summary": "auto"}}, "True low user()=hi;>"),
    ({"chat_template_kwargs": {"reasoning_effort": "odd"}}, "odd user()=hi;>"),
    ({"reasoning": {"effort": "none"}}, "False none user()=hi;>"),
    ({"input": [{"role": "developer", "content": "A"},
                {"role": "user", "content": [{"type": "input_text", "text": "B"},
                                             {"type": "input_text", "text": "C"}]}]},
     "system()=A;user()=BC;>"),
    ({"input": [{"role": "user", "content": "x"},
                {"type": "reasoning", "id": "r", "summary": [],
                 "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "id": "m", "status": "completed",
                 "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
                USE, OUTPUT]},
     "user()=x;assistant(hm)=ok!look{};tool()c1=5;>"),
    ({"input": [{"role": "assistant", "content": [
        {"type": "output_text", "text": "hi "}, {"type": "refusal", "refusal": "no"}]}]},
     "assistant()=hi no;>"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text"), PROMPTS)
def test_template_reads_the_input(tool_server: Server, given: dict[str, Any], text: str) -> None:
    tool_server.engine.reset()
    assert posted(tool_server, given).status_code == 200
    (request,) = tool_server.engine.log.submitted
    assert tool_server.tokenizer.decode(request.prompt_token_ids) == text


def test_parameters_of_vllm_are_those_of_the_request(tool_server: Server) -> None:
    given = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 3,
        "ignore_eos": True,
        "stop": ["a"],
    }
    tool_server.engine.reset()
    salted = {"cache_salt": "b", "priority": 2}
    assert posted(tool_server, given | salted).status_code == 200
    (request,) = tool_server.engine.log.submitted
    found = {name: getattr(request.sampling, name) for name in given}
    assert found == given | {"stop": ("a",)}
    assert (request.priority, bool(request.cache_salt)) == (2, True)


def test_biases_and_structures_of_vllm_are_those_of_the_request(tool_server: Server) -> None:
    tool_server.engine.reset()
    given = {"logit_bias": {"5": -2}, "structured_outputs": {"regex": "a+"}, "request_id": "mine"}
    answer = posted(tool_server, given)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "mine")
    (request,) = tool_server.engine.log.submitted
    assert request.sampling.logit_bias == {5: -2}
    assert request.sampling.structure == Structure(kind="regex", text="a+")
    assert request.grammar is not None


def test_text_may_include_its_end(tool_server: Server, client: openai.OpenAI) -> None:
    tool_server.say("One, two, three.")
    whole, kept = (
        client.responses.create(
            model="tiny",
            input="hi",
            extra_body={"stop": [" two"], "include_stop_str_in_output": kept},
        )
        for kept in (False, True)
    )
    assert (whole.output_text, kept.output_text) == ("One,", "One, two")


def test_text_may_include_special_tokens(tool_server: Server, client: openai.OpenAI) -> None:
    (special,) = tool_server.tokenizer.encode("<|system|>", add_special_tokens=False)
    hello = tool_server.tokenizer.encode("Hello", add_special_tokens=False)
    tool_server.engine.script = lambda request, index: [special, *hello, 1]
    skipped, kept = (
        client.responses.create(model="tiny", input="hi", extra_body={"skip_special_tokens": skips})
        for skips in (True, False)
    )
    assert skipped.output_text == "Hello"
    assert kept.output_text.startswith("<|system|>Hello")


def test_special_tokens_that_mark_calls_are_read(
    template_tokenizer: Callable[..., Tokenizer],
) -> None:
    tokenizer = template_tokenizer(TEMPLATE, special_tokens=("<tool_call>", "</tool_call>"))
    with Server(tokenizer, context=1024, store_limits=StoreLimits()) as model:
        model.say(CALL)
        answer = posted(model, {"tools": [TOOL], "max_output_tokens": 100})
    call, *others = answer.json()["output"]
    assert (call["type"], call["arguments"], others) == ("function_call", '{"a": 1}', [])


def test_response_has_their_shape(tool_server: Server, client: openai.OpenAI) -> None:
    tool_server.say("Hello.")
    response = client.responses.create(model="tiny", input="hi", metadata={"a": "b"}, store=False)
    Response.model_validate_json(response.model_dump_json())
    assert (response.output_text, response.status) == ("Hello.", "completed")
    assert response.usage is not None
    assert response.usage.output_tokens == len(tool_server.engine.script(None, 0))  # type: ignore[arg-type]  # any request
    cut = client.responses.create(model="tiny", input="hi", max_output_tokens=2)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_metadata_is_repeated(client: openai.OpenAI) -> None:
    labels = {str(number): "é" * 512 for number in range(16)}
    whole = client.responses.create(model="tiny", input="hi", metadata=labels)
    assert whole.metadata == client.responses.retrieve(whole.id).metadata == labels
    events = client.responses.create(model="tiny", input="hi", metadata=labels, stream=True)
    repeated = [event.response.metadata for event in events if hasattr(event, "response")]
    assert repeated == [labels] * len(repeated)
    assert client.responses.create(model="tiny", input="hi").metadata == {}


def test_stream_joins_to_the_response(tool_server: Server, client: openai.OpenAI) -> None:
    whole = client.responses.create(model="tiny", input="hi", max_output_tokens=40)
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = list(
        client.responses.create(model="tiny", input="hi", max_output_tokens=40, stream=True)
    )
    for number, event in enumerate(events):
        adapter.validate_python(event.model_dump())
        assert event.sequence_number == number
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    with client.responses.stream(model="tiny", input="hi", max_output_tokens=40) as stream:
        final = [event for event in stream if event.type == "response.incomplete"]
    assert final[0].response.output_text == text


def test_items_that_the_client_parsed_may_be_sent_again(
    tool_server: Server, client: openai.OpenAI
) -> None:
    look: Any = {**TOOL, "parameters": {"type": "object", "properties": {}}, "strict": True}
    sent: list[Any] = [{"role": "user", "content": "hi"}]  # Any: of the client
    for text in ('<tool_call>{"name": "look", "arguments": {}}</tool_call>', '{"city": "Bonn"}'):
        tool_server.say(text)
        response = client.responses.parse(model="tiny", input="hi", tools=[look], text_format=City)
        sent += [item.model_dump() for item in response.output]
    assert response.output_parsed == City(city="Bonn")
    assert "parsed_arguments" in sent[1]
    client.responses.create(model="tiny", input=sent, tools=[look])
    request = tool_server.engine.log.submitted[-1]
    text = tool_server.tokenizer.decode(request.prompt_token_ids)
    assert text.endswith('!look{};assistant()={"city": "Bonn"};>')


@pytest.mark.parametrize("is_stream", [False, True])
def test_tools_are_called(tool_server: Server, client: openai.OpenAI, is_stream: bool) -> None:
    tool_server.say(f"I look. {CALL}")
    given: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [TOOL]}
    if is_stream:
        with client.responses.stream(**given) as stream:
            response: Any = stream.get_final_response()
    else:
        response = client.responses.create(**given)
    message, call = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(call, ResponseFunctionToolCall)
    assert response.output_text == "I look."
    assert (call.name, call.arguments) == ("look", '{"a": 1}')
    again = client.responses.create(
        model="tiny",
        input=[
            {"role": "user", "content": "hi"},
            *[item.model_dump(exclude_none=True) for item in response.output],
            {"type": "function_call_output", "call_id": call.call_id, "output": "5"},
        ],
    )
    prompt = tool_server.tokenizer.decode(tool_server.engine.log.submitted[-1].prompt_token_ids)
    assert prompt.endswith(f"tool(){call.call_id}=5;>")
    assert again.status == "completed"


def test_calls_of_strict_tools_follow_the_schema(
    tool_server: Server, client: openai.OpenAI
) -> None:
    tool_server.say(CALL)
    strict: Any = TOOL | {"strict": True}
    client.responses.create(model="tiny", input="hi", tools=[strict])
    structure = tool_server.engine.log.submitted[-1].sampling.structure
    assert structure is not None
    assert (structure.kind, structure.mark) == ("calls", "<tool_call>")
    strict = strict | {"parameters": {"type": "object", "not": {}}}
    with pytest.raises(openai.BadRequestError, match="tools has the strict tool 'look', which"):
        client.responses.create(model="tiny", input="hi", tools=[strict])


@pytest.mark.parametrize("is_stream", [False, True])
def test_calls_name_their_namespace(
    tool_server: Server, client: openai.OpenAI, is_stream: bool
) -> None:
    tool_server.say(CALL.replace("look", "eyes.look"))
    given: dict[str, Any] = {"model": "tiny", "input": "hi", "tools": [SPACE]}
    if is_stream:
        with client.responses.stream(**given) as stream:
            response: Any = stream.get_final_response()
    else:
        response = client.responses.create(**given)
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert (call.namespace, call.name, call.arguments) == ("eyes", "look", '{"a": 1}')


@pytest.mark.parametrize("name", ["eyes.look", "look"])
def test_only_allowed_tools_are_called(
    tool_server: Server, client: openai.OpenAI, name: str
) -> None:
    tool_server.say(CALL.replace("look", "eyes.look"))
    tool = {"type": "function", "name": name}
    given: dict[str, Any] = {
        "tools": [SPACE, TOOL],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [tool]},
    }
    response = client.responses.create(model="tiny", input="hi", **given)
    assert [item.type for item in response.output] == [
        "function_call" if name == "eyes.look" else "message"
    ]
    assert response.to_dict()["tool_choice"] == given["tool_choice"]


async def test_repeated_parameters_count_as_unread_output_until_the_call_ends(
    tool_server: Server, client: openai.OpenAI
) -> None:
    tool_server.say("Hi.")
    buffers = tool_server.frontends.servicer.buffers
    description = "x" * 50_000
    tool = TOOL | {"description": description}
    given = {"tools": [tool], "tool_choice": "none", "instructions": "Be brief.", "stream": True}
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 8} | given
    held = []
    with httpx.stream("POST", f"{tool_server.url}/v1/responses", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            held.append(buffers.num_bytes)
            if line.startswith("data:") and '"response.completed"' in line:
                assert '"instructions":"Be brief."' in line
                assert description in line
    assert max(held) > 50_000
    await wait_until(lambda: not buffers.num_bytes)


BAD_METADATA: list[object] = [
    [],
    {"a": 1},
    {"a": "b" * 513},
    {"a" * 65: "b"},
    {str(number): "" for number in range(17)},
]
CASES: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input is required.", "input"),
    ({"input": []}, "input must be a string or a non-empty list of items.", "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]},
     "input.0 is not supported: items of item_reference; the model reads function_call, "
     "function_call_output, message, reasoning.", "input.0"),
    ({"input": [None]}, "input.0 must be an object.", "input.0"),
    ({"input": [{"type": ["message"]}]},
     "input.0 is not supported: items of this kind; the model reads function_call, "
     "function_call_output, message, reasoning.", "input.0"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input.0.content.0 is not supported: the model only reads text, not input_image parts.",
     "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
     "input.0.content.0.type must be one of 'text', 'input_text' or 'output_text', not 'refusal'.",
     "input.0.content.0.type"),
    ({"input": [{**USE, "arguments": "[]"}]},
     "input.0.arguments must be a JSON object as a string.", "input.0.arguments"),
    ({"input": [{**USE, "arguments": '{"a": -1e400}'}]},
     "input.0.arguments has a number that exceeds the range of a double.", "input.0.arguments"),
    ({"previous_response_id": "resp_1"}, "Previous response with id 'resp_1' not found.",
     "previous_response_id"),
    ({"tools": [{"type": "web_search"}]},
     "tools.0.type must be function or namespace: OpenAI's own tools are not available.",
     "tools.0.type"),
    ({"tools": [{**SPACE, "tools": [{"type": "custom", "name": "x"}]}]},
     "tools.0.tools.0.type must be function: OpenAI's own tools are not available.",
     "tools.0.tools.0.type"),
    ({"tools": [{**SPACE, "tools": None}]}, "tools.0.tools is required.", "tools.0.tools"),
    ({"tools": [{**SPACE, "tools": [TOOL] * 1025}]},
     "tools.0.tools must be a list of at most 1024 functions.", "tools.0.tools"),
    ({"tools": [{**SPACE, "tools": [TOOL] * 600}, {**SPACE, "tools": [TOOL] * 600}]},
     "tools may have at most 1024 entries, not 1200.", "tools"),
    ({"tools": [{**SPACE, "name": "n" * 126}]},
     "tools.0.tools.0.name must be 1 to 128 letters, digits, underscores, dashes or dots.",
     "tools.0.tools.0.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
     "tool_choice.tools must be a list of 1 to 1024 tools.", "tool_choice.tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "b"}]}},
     "tool_choice names 'b', which is not in tools.", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}},
     "tool_choice.tools.0.type is required.", "tool_choice.tools.0.type"),
    ({"tools": [{**TOOL, "parameters": 5}]}, "tools.0.parameters must be a JSON Schema object.",
     "tools.0.parameters"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}},
     "text.format.schema must be a JSON Schema.", "text.format.schema"),
    ({"tools": [TOOL], "structured_outputs": {"grammar": 'root ::= "a"'}},
     "structured_outputs.grammar cannot be combined with tools: use a JSON schema, a regular "
     "expression or choices.", "structured_outputs.grammar"),
    ({"include": ["message.output_text.logprobs"]},
     "message.output_text.logprobs is not supported in include: use /v1/chat/completions.",
     "include"),
    *[({"include": ["reasoning.encrypted_content", one]},
       "include may contain code_interpreter_call.outputs, computer_call_output.output.image_url, "
       "file_search_call.results, message.input_image.image_url, reasoning.encrypted_content, "
       f"web_search_call.action.sources, web_search_call.results, not {shown}.", "include")
      for one, shown in (("reasoning", "'reasoning'"), ("", "''"), (None, "null"), ([], "a list"))],
    ({"stream": True, "stream_options": {"resumable": True}},
     "stream_options.resumable is not supported: use /v1/chat/completions.",
     "stream_options.resumable"),
    ({"include": ["x"] * 65}, "include may have at most 64 entries, not 65.", "include"),
    ({"include": "reasoning"}, "include must be a list of strings.", "include"),
    *[({"metadata": one},
       "metadata must be an object of at most 16 strings of up to 512 characters, with names of up "
       "to 64.", "metadata")
      for one in BAD_METADATA],
    ({"max_output_tokens": 0}, "max_output_tokens must be 1 or more, not 0.", "max_output_tokens"),
    ({"input": "~" * 3000},
     "input has 3008 tokens, but the context length of 1024 allows at most 1023 and one generated "
     "token.", "input"),
    ({"top_k": -2}, "top_k must be -1 or more, not -2.", "top_k"),
    ({"stop": [""]}, "stop must contain strings of 1 to 512 characters.", "stop"),
    ({"max_tokens": 5}, "max_tokens is not supported: did you mean max_output_tokens?",
     "max_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "text", "param"), CASES)
def test_bad_input_is_rejected(
    tool_server: Server, given: dict[str, Any], text: str, param: str
) -> None:
    tool_server.engine.reset()
    answer = posted(tool_server, given)
    error = answer.json()["error"]
    assert (answer.status_code, error["message"], error["param"]) == (400, text, param)
    assert tool_server.engine.log.submitted == []


def test_more_than_a_tenant_may_keep_is_rejected(
    template_tokenizer: Callable[..., Tokenizer],
) -> None:
    limits = ReaderLimits(unread_buffer=BufferLimits(total_bytes=2**19))
    tools = [TOOL | {"name": f"f{number}", "description": "x" * 60_000} for number in range(3)]
    with Server(template_tokenizer(TEMPLATE), reader_limits=limits) as server:
        answer = posted(server, {"tools": tools, "tool_choice": "none"})
        assert answer.status_code == 400
        assert "exceeds 131072 bytes" in answer.json()["error"]["message"]
        assert not server.frontends.servicer.buffers.num_bytes


def output(text: str, finish_reason: FinishReason | None = None) -> GenerationOutput:
    sequence = SequenceOutput(index=0, text=text, token_ids=(5,), finish_reason=finish_reason)
    usage = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_generated_tokens=1)
    return GenerationOutput(sequences=(sequence,), usage=usage, is_last=finish_reason is not None)


@pytest.mark.parametrize(("num_bytes", "is_large"), [(2**15, True), (100, False)])
async def test_only_events_that_repeat_the_request_are_in_parts(
    num_bytes: int, is_large: bool
) -> None:
    async def outputs() -> AsyncGenerator[GenerationOutput]:
        for text in "abc":
            yield output(text)
        yield output("d", FinishReason.STOP)

    call: Any = SimpleNamespace(
        id="r", replayed=None, continuation=None, outputs=outputs
    )  # Any: a part of it
    large = b'"instructions":"%b"' % (b"x" * num_bytes)
    response = ResponsesResponse(
        call,
        Turns(ToolUse((), ToolChoice(kind="none"), tool_format=None)),
        model="tiny",
        created_s=0,
        echo=Echo({}, large),
        response_id="resp_r",
        names={},
    )
    events = [event async for event in response.events()]
    assert [isinstance(event, tuple) for event in events] == [is_large, False, False, is_large]
    joined = [b"".join(event) if isinstance(event, tuple) else event for event in events]
    # Two events at the start, one at the end.
    assert [event.count(large) for event in joined] == [2, 0, 0, 1]
