"""Fields of clients that change no answer, names of tools, and suffixes, in every API."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
import transformers

from cluster.serving.text.chat_template import ChatTemplate
from cluster.serving.text.tokenizer import Tokenizer
from cluster.serving.tools.tool import MAX_TOOLS
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import Server, write_tokenizer
from tests.serving.test_messages import TEMPLATE
from tests.serving.text.test_literal_tokens import write_sentencepiece
from tests.slow_params import some_slow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Json = dict[str, Any]  # Any: JSON
CLIENTS_OWN_FIELDS_TEMPLATE = (
    "{# <tool_call> #}{% for tool in tools or [] %}{{ tool | tojson }}"
    "{% if tool.function.x_cost is defined %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{{ message.tool_plan }}{{ message['weather'] }}"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %};{% endfor %}"
)
OWN: Json = {
    "id": "msg_1",
    "provider_specific_fields": {"a": None, "citations": [1]},
    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
    "reasoning_details": [],
    "cache_control": {"type": "ephemeral"},
    "cacheControl": {"type": "ephemeral"},
    "extra_content": {"google": {"thought_signature": "x"}},
    "index": "0",
    "status": "completed",
    "createdAt": 1735689600,
    "metadata": {"<|system|>": "<|system|>"},
    "annotations": [{"type": "url_citation", "url": "x"}],
    "logprobs": None,
    "parsed": {"a": 1},
    "parsed_arguments": {"a": 1},
    "usage": {"input_tokens": 5},
    "stop_reason": "end_turn",
    "model": "other",
    "caller": {"type": "direct"},
    "toolset_name": "x",
    "eager_input_streaming": True,
    "input_examples": [{"city": "Bonn"}],
    "output_schema": {"type": "object"},
    "short_description": "x",
    "tool_name": "x",
    "error": None,
    "title": "x",
    "copy": 1,
    "model_dump": 1,
    "x" * 100: 1,
    "a b\n": 1,
    **{f"field{number}": number for number in range(100)},
}
CHAT: Json = {
    "max_tokens": 4,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "text", "text": "hi"}, {"type": "text", "text": "."}]},
        {"role": "assistant", "content": "ho", "reasoning": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "5"}]},
    ],
    "tools": [{"type": "function", "function": {
        "name": "look", "parameters": {"type": "object", "properties": {}}}}],
}  # fmt: skip
BODIES: dict[str, tuple[Json, list[tuple[str | int, ...]]]] = {
    "/v1/chat/completions": (
        CHAT,
        [
            ("messages", 0),
            ("messages", 1),
            ("messages", 1, "content", 0),
            ("messages", 2),
            ("messages", 2, "tool_calls", 0),
            ("messages", 2, "tool_calls", 0, "function"),
            ("messages", 3),
            ("messages", 3, "content", 0),
            ("tools", 0),
            ("tools", 0, "function"),
        ],
    ),
    "/v1/responses": (
        {
            "max_output_tokens": 4,
            "input": [
                {"type": "message", "role": "user", "content": [
                    {"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": [
                    {"type": "input_text", "text": "5"}]},
                {"role": "assistant", "content": [{"type": "output_text", "text": "ho"}]},
                {"role": "user", "content": "go"},
            ],
            "tools": [
                {"type": "function", "name": "look"},
                {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
            ],
        },
        [
            *(("input", index) for index in range(6)),
            ("input", 0, "content", 0),
            ("input", 1, "content", 0),
            ("input", 3, "output", 0),
            ("input", 4, "content", 0),
            ("tools", 0),
            ("tools", 1),
            ("tools", 1, "tools", 0),
        ],
    ),
    "/v1/messages": (
        {
            "model": "tiny",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [
                        {"type": "text", "text": "5"}]}]},
            ],
            "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        },
        [
            ("system", 0),
            *(("messages", index) for index in range(3)),
            ("messages", 0, "content", 0),
            *(("messages", 1, "content", index) for index in range(3)),
            ("messages", 2, "content", 0),
            ("messages", 2, "content", 0, "content", 0),
            ("tools", 0),
        ],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def own_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    with Server(template_tokenizer(CLIENTS_OWN_FIELDS_TEMPLATE), context=2**15) as server:
        yield server


def with_fields(body: Json, place: tuple[str | int, ...], fields: Json) -> Json:
    """Return a body in which the object at a place has further fields."""
    changed = copy.deepcopy(body)
    found: Any = changed  # Any: objects and lists in turn
    for step in place:
        found = found[step]
    for name, value in fields.items():
        found.setdefault(name, value)
    return changed


def prompt_of(server: Server, path: str, body: Json) -> str:
    """Return the text of the prompt that a body becomes."""
    server.engine.reset()
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    [request] = server.engine.log.submitted
    return server.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


PLACES = [(path, place) for path, (_, places) in BODIES.items() for place in places]


@pytest.mark.parametrize("step", some_slow([4, 1], slow=[1]))
@pytest.mark.parametrize(("path", "place"), PLACES)
def test_fields_that_no_template_reads_change_nothing(
    own_server: Server, path: str, place: tuple[str | int, ...], step: int
) -> None:
    body, _ = BODIES[path]
    plain = prompt_of(own_server, path, body)
    assert prompt_of(own_server, path, with_fields(body, place, OWN)) == plain
    with httpx.Client(base_url=own_server.url) as client:
        # Each field in other places of the body.
        for name in list(OWN)[PLACES.index((path, place)) % step :: step]:
            # Alone, a field might be taken for a misspelled one.
            if not name.startswith("field"):
                answer = client.post(path, json=with_fields(body, place, {name: OWN[name]}))
                assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
def test_counts_take_the_same_fields(own_server: Server, path: str) -> None:
    body, places = BODIES["/v1/messages" if "messages" in path else "/v1/chat/completions"]
    body = {name: one for name, one in body.items() if name != "max_tokens"}
    counts = set()
    for place in ((), *places):
        fields = OWN if place else {}
        answer = httpx.post(f"{own_server.url}{path}", json=with_fields(body, place, fields))
        assert answer.status_code == 200, answer.text
        counts.add(answer.json().get("count") or answer.json()["input_tokens"])
    assert len(counts) == 1


def test_template_reads_the_fields_that_it_names(own_server: Server) -> None:
    fields = {"tool_plan": "First look.", "weather": "<|system|>", "tool_plans": "not read"}
    body = with_fields(CHAT, ("messages", 2), fields)
    prompt = prompt_of(own_server, "/v1/chat/completions", body)
    assert "assistant:hoFirst look.<|system|>" in prompt.replace("\n", "")
    assert "not read" not in prompt
    [request] = own_server.engine.log.submitted
    special = own_server.tokenizer.encode("<|system|>", add_special_tokens=False)
    assert special[0] not in request.prompt_token_ids


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/v1/chat/completions", ("tools", 0, "function")),
        ("/v1/responses", ("tools", 0)),
        ("/v1/messages", ("tools", 0)),
    ],
)
def test_functions_keep_what_transformers_describes(
    own_server: Server, path: str, place: tuple[str | int, ...]
) -> None:
    body, _ = BODIES[path]
    given = {"return": {"type": "string", "x": None}, "x_cost": 5, "y_cost": 6}
    prompt = prompt_of(own_server, path, with_fields(body, place, given))
    assert '"return": {"type": "string", "x": null}, "x_cost": 5}' in prompt
    assert "y_cost" not in prompt


def test_own_fields_do_not_replace_a_message(own_server: Server) -> None:
    # As a template that names its own fields by strings.
    template = ChatTemplate(CLIENTS_OWN_FIELDS_TEMPLATE, {}, origin="test")
    assert {"role", "content"} <= template.names
    body = with_fields(CHAT, ("messages", 0), {"Role": "x", "CONTENT ": "x"})
    answer = httpx.post(f"{own_server.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200


EMPTY: Json = {
    "tool_calls": [],
    "tool_call_id": "",
    "name": "",
    "reasoning": "",
    "reasoning_content": "",
    "refusal": "",
    "function_call": None,
    "audio": None,
    "images": [],
    "prefix": False,
}


@pytest.mark.parametrize("place", [("messages", 0), ("messages", 1), ("messages", 3)])
def test_empty_fields_are_as_none(own_server: Server, place: tuple[str | int, ...]) -> None:
    plain = prompt_of(own_server, "/v1/chat/completions", CHAT)
    assert prompt_of(own_server, "/v1/chat/completions", with_fields(CHAT, place, EMPTY)) == plain


REJECTED: list[tuple[str, tuple[str | int, ...], Json, str]] = [
    ("/v1/chat/completions", ("messages", 0), {"images": ["x"]},
     "messages.0.images is not supported: the model only reads text."),
    ("/v1/chat/completions", ("messages", 2), {"audio": {"id": "x"}},
     "messages.2.audio is not supported: the model only reads text."),
    ("/v1/chat/completions", ("messages", 2), {"prefix": True},
     "messages.2.prefix is not supported: use continue_final_message = true and "
     "add_generation_prompt = false."),
    ("/v1/chat/completions", ("messages", 2), {"partial": True},
     "messages.2.partial is not supported: use continue_final_message = true and "
     "add_generation_prompt = false."),
    ("/v1/chat/completions", ("messages", 1), {"toolCalls": [1]},
     "messages.1.toolCalls is not supported: did you mean tool_calls?"),
    ("/v1/chat/completions", ("tools", 0, "function"), {"descrption": "x"},
     "tools.0.function.descrption is not supported: did you mean description?"),
    ("/v1/messages", ("messages", 2, "content", 0), {"isError": True},
     "messages.2.content.0.isError is not supported: did you mean is_error?"),
    ("/v1/messages", ("tools", 0), {"descriptoin": "x"},
     "tools.0.descriptoin is not supported: did you mean description?"),
    ("/v1/responses", ("input", 2), {"name_space": "x"},
     "input.2.name_space is not supported: did you mean namespace?"),
    ("/v1/chat/completions", (), {"x": 1}, "x is not supported."),
    ("/v1/responses", (), {"x": 1}, "x is not supported."),
    ("/v1/messages", (), {"x": 1}, "x is not supported."),
    ("/v1/chat/completions", (), {"stream": True, "stream_options": {"x": 1}},
     "stream_options.x is not supported."),
    ("/v1/messages", (), {"tool_choice": {"type": "auto", "x": 1}},
     "tool_choice.x is not supported."),
]  # fmt: skip


@pytest.mark.parametrize(("path", "place", "fields", "text"), REJECTED)
def test_fields_that_would_change_the_answer_are_rejected(
    own_server: Server, path: str, place: tuple[str | int, ...], fields: Json, text: str
) -> None:
    body, _ = BODIES[path]
    answer = httpx.post(f"{own_server.url}{path}", json=with_fields(body, place, fields))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, text)


LONG = "mcp__" + "n" * 123
TURN = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object"}
MakeTool = Callable[[str], dict[str, Any]]  # Any: JSON
FORMS: dict[str, tuple[dict[str, Any], MakeTool]] = {
    "/v1/chat/completions": (
        {"max_tokens": 200, **TURN},
        lambda name: {"type": "function", "function": {"name": name, "parameters": SCHEMA}},
    ),
    "/v1/responses": (
        {"max_output_tokens": 200, "input": "hi"},
        lambda name: {"type": "function", "name": name},
    ),
    "/v1/messages": (
        {"model": "tiny", "max_tokens": 200, **TURN},
        lambda name: {"name": name, "input_schema": SCHEMA, "input_examples": [{"a": 1}]},
    ),
    "/v1/messages/count_tokens": (
        {"model": "tiny", **TURN},
        lambda name: {"name": name, "input_schema": SCHEMA, "input_examples": []},
    ),
    "/tokenize": (TURN, lambda name: {"type": "function", "function": {"name": name}}),
}
CALL = f'<tool_call>\n{{"name": "{LONG}", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def tool_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    """A server of a model that calls tools."""
    with Server(template_tokenizer(TEMPLATE), context=2**15) as server:
        yield server


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("num_tools", [1, 129, 187, MAX_TOOLS])
def test_many_tools_with_long_names_are_read(
    tool_server: Server, path: str, num_tools: int
) -> None:
    body, make = FORMS[path]
    names = [LONG, *(f"t{index}" for index in range(num_tools - 1))]
    answer = httpx.post(f"{tool_server.url}{path}", json=body | {"tools": list(map(make, names))})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", FORMS)
def test_one_tool_more_is_rejected(tool_server: Server, path: str) -> None:
    body, make = FORMS[path]
    tools = [make(f"t{index}") for index in range(MAX_TOOLS + 1)]
    answer = httpx.post(f"{tool_server.url}{path}", json=body | {"tools": tools})
    assert answer.status_code == 400
    text = "tools may have at most 1024 entries, not 1025."
    assert answer.json()["error"]["message"] == text


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("name", ["", "n" * 129, "a b", "a/b"])
def test_other_names_are_rejected(tool_server: Server, path: str, name: str) -> None:
    body, make = FORMS[path]
    answer = httpx.post(f"{tool_server.url}{path}", json=body | {"tools": [make(name)]})
    assert answer.status_code == 400
    assert "must be 1 to 128 letters, digits," in answer.json()["error"]["message"]


def test_many_tools_with_long_names_are_read_over_grpc(tool_server: Server) -> None:
    names = [LONG, *(f"t{index}" for index in range(200))]
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role=pb.CHAT_ROLE_USER, content="hi")],
        tools=[pb.Tool(name=name) for name in names],
    )
    tool_server.say(CALL)
    with grpc.insecure_channel(tool_server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        deltas = [
            call
            for response in stub.Chat(request)
            for sequence in response.sequences
            for call in sequence.tool_calls
        ]
    assert deltas[0].name == LONG


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_call_of_a_long_name_is_returned_and_taken_back(
    tool_server: Server, path: str, stream: bool
) -> None:
    body, make = FORMS[path]
    tool_server.say(CALL)
    answer = httpx.post(
        f"{tool_server.url}{path}", json=body | {"tools": [make(LONG)], "stream": stream}
    )
    assert LONG in answer.text
    turns: dict[str, list[dict[str, Any]]] = {
        "/v1/chat/completions": [
            {"role": "assistant", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": LONG, "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "5", "name": LONG},
        ],
        "/v1/responses": [
            {"type": "function_call", "call_id": "c", "name": LONG, "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
        ],
        "/v1/messages": [
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": "c", "name": LONG, "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
        ],
    }  # fmt: skip
    field = "input" if path == "/v1/responses" else "messages"
    first = [{"role": "user", "content": "hi"}]
    again = httpx.post(
        f"{tool_server.url}{path}",
        json=body | {"tools": [make(LONG)], field: first + turns[path]},
    )
    assert again.status_code == 200, again.text


Stub = pagedray_pb2_grpc.GenerationServiceStub
BODY: dict[str, Any] = {"model": "tiny", "prompt": "def quick(", "suffix": "  return fox\n"}
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
END = "<|file_sep|>"


@pytest.fixture(scope="module")
def infill_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("infilling")
    write_tokenizer(folder, special_tokens=(*MARKS, END))
    return folder


@pytest.fixture(scope="module")
def infill_server(infill_folder: Path) -> Iterator[Server]:
    with Server(Tokenizer.from_folder(infill_folder)) as server:
        yield server


def test_prompt_is_that_of_the_model_card(infill_folder: Path, infill_server: Server) -> None:
    infill_server.engine.reset()
    body = BODY | {"prompt": ["def quick(", ""]}
    answer = httpx.post(f"{infill_server.url}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    tokenizer: Any = transformers.PreTrainedTokenizerFast(  # Any: untyped
        tokenizer_file=str(infill_folder / "tokenizer.json")
    )
    for request, prefix in zip(infill_server.engine.log.submitted, body["prompt"], strict=True):
        card = f"<|fim_prefix|>{prefix}<|fim_suffix|>  return fox\n<|fim_middle|>"
        assert request.prompt_token_ids == tuple(tokenizer(card).input_ids)


def test_middle_ends_where_another_file_begins(infill_server: Server) -> None:
    tokenizer = infill_server.tokenizer
    text = tokenizer.encode(f"x): pass{END}import", add_special_tokens=False)
    infill_server.engine.script = lambda request, index: text
    try:
        answers = [
            httpx.post(f"{infill_server.url}/v1/completions", json=body).json()["choices"][0]
            for body in (BODY, BODY | {"ignore_eos": True, "max_tokens": len(text)})
        ]
    finally:
        infill_server.engine.script = infill_server.script
    ends = [(one["text"], one["finish_reason"], one["stop_reason"]) for one in answers]
    assert ends == [("x): pass", "stop", None), ("x): passimport", "length", None)]


@pytest.mark.parametrize(
    ("fields", "message", "param"),
    [
        ({"echo": True}, "suffix cannot be combined with echo.", "suffix"),
        (
            {"truncate_prompt_tokens": 5},
            "suffix cannot be combined with truncate_prompt_tokens.",
            "suffix",
        ),
        ({"prompt": [5]}, "suffix requires prompt to be a string or a list of strings.", "suffix"),
        (
            {"suffix": "~" * 300},
            "prompt has 309 tokens, but the context length of 256 allows at most 255 and one "
            "generated token.",
            "prompt",
        ),
    ],
)
def test_what_has_no_middle_is_rejected(
    infill_server: Server, fields: dict[str, Any], message: str, param: str
) -> None:
    infill_server.engine.reset()
    answer = httpx.post(f"{infill_server.url}/v1/completions", json=BODY | fields)
    assert answer.status_code == 400
    assert (answer.json()["error"]["message"], answer.json()["error"]["param"]) == (message, param)
    assert infill_server.engine.log.submitted == []


@pytest.mark.parametrize("prefix", ["def quick(", ""])
@pytest.mark.parametrize("ignores_eos", [False, True])
def test_grpc_asks_and_ends_as_http_does(
    infill_server: Server, prefix: str, ignores_eos: bool
) -> None:
    tokenizer = infill_server.tokenizer
    text = tokenizer.encode(f"x): pass{END}import", add_special_tokens=False)
    infill_server.engine.reset()
    infill_server.engine.script = lambda request, index: text
    fields = {"prompt": prefix, "max_tokens": len(text), "ignore_eos": ignores_eos}
    message = pb.GenerateRequest(
        text=prefix,
        suffix=BODY["suffix"],
        sampling=pb.SamplingParams(max_tokens=len(text), ignore_eos=ignores_eos),
    )
    try:
        answer = httpx.post(f"{infill_server.url}/v1/completions", json=BODY | fields).json()
        with grpc.insecure_channel(infill_server.grpc_target) as channel:
            stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
            outputs = [one for found in stub.Generate(message) for one in found.sequences]
    finally:
        infill_server.engine.script = infill_server.script
    assert "".join(one.text for one in outputs) == answer["choices"][0]["text"]
    over_http, over_grpc = infill_server.engine.log.submitted
    assert over_grpc.prompt_token_ids == over_http.prompt_token_ids
    assert over_grpc.eos_token_ids == over_http.eos_token_ids


@pytest.mark.parametrize("prompt", [{"token_ids": pb.TokenIds(ids=[5])}, {}])
def test_grpc_rejects_a_suffix_without_a_text(
    infill_server: Server, prompt: dict[str, Any]
) -> None:
    infill_server.engine.reset()
    with grpc.insecure_channel(infill_server.grpc_target) as channel:
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(pb.GenerateRequest(suffix="x", **prompt)))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "suffix requires text."
    assert infill_server.engine.log.submitted == []


def test_middle_keeps_its_leading_space(tmp_path: Path) -> None:
    library = write_sentencepiece(tmp_path, ("[PREFIX]", "[MIDDLE]", "[SUFFIX]"))
    with Server(Tokenizer.from_folder(tmp_path)) as server:
        server.engine.script = lambda request, index: [
            library.piece_to_id("\u2581x"),
            library.piece_to_id("[MIDDLE]"),
        ]
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY).json()
    assert answer["choices"][0]["text"] == " x"


def test_tokenizers_without_the_tokens_are_named(server: Server, stub: Stub) -> None:
    message = (
        "suffix is not supported: the model's tokenizer has no known fill-in-the-middle tokens."
    )
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == message
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(text="x", suffix="y")))
    assert caught.value.details() == message
