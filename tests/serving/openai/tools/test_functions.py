"""Functions, which tools have replaced, over HTTP, through the openai client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.serving.openai.tools.chats import (
    ASK,
    AUTO,
    PARAMETERS,
    TOOLS,
    prompt_of,
    schema_of,
    write,
)

if TYPE_CHECKING:
    from tests.serving.conftest import Server

FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]  # Any: as above


def function_stream(
    client: openai.OpenAI, **options: Any
) -> tuple[str, str | None, str, str | None]:
    """Return content, name, arguments and finish reason, as a client assembles them."""
    content, name, arguments, reason = "", None, "", None
    for chunk in client.chat.completions.create(model="tiny", messages=ASK, stream=True, **options):
        (choice,) = chunk.choices
        assert choice.delta.tool_calls is None
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        if choice.delta.function_call is not None:
            name = choice.delta.function_call.name or name
            arguments += choice.delta.function_call.arguments or ""
    return content, name, arguments, reason


def test_functions_are_called_as_the_tools_that_replaced_them(
    client: openai.OpenAI, tool_server: Server
) -> None:
    write(tool_server, AUTO)
    client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    with_tools = prompt_of(tool_server)
    answer = client.chat.completions.create(model="tiny", messages=ASK, functions=FUNCTIONS)
    assert prompt_of(tool_server) == with_tools
    (choice,) = answer.choices
    call = choice.message.function_call
    assert call is not None
    assert choice.message.tool_calls is None
    expected = ("weather", '{"city": "K\u00f6ln \U0001f642"}', "function_call")
    assert (call.name, call.arguments, choice.finish_reason) == expected
    assert choice.message.content == "I ask."
    assert function_stream(client, functions=FUNCTIONS) == ("I ask.", *expected)


def test_named_function_call_follows_its_schema(client: openai.OpenAI, tool_server: Server) -> None:
    write(tool_server, '{"city": "Bonn"}')
    options: dict[str, Any] = {"functions": FUNCTIONS, "function_call": {"name": "weather"}}
    answer = client.chat.completions.create(model="tiny", messages=ASK, **options)
    assert schema_of(tool_server) == PARAMETERS
    assert answer.choices[0].message.content is None
    assert function_stream(client, **options) == ("", "weather", '{"city": "Bonn"}', "stop")


def test_with_function_call_none_the_model_sees_no_functions(
    client: openai.OpenAI, tool_server: Server
) -> None:
    write(tool_server, "Fine.")
    options: dict[str, Any] = {"functions": FUNCTIONS, "function_call": "none"}
    assert function_stream(client, **options) == ("Fine.", None, "", "stop")
    assert "Tells it." not in prompt_of(tool_server)


def test_function_messages_reach_the_template_as_calls_and_results(
    client: openai.OpenAI, tool_server: Server
) -> None:
    write(tool_server, "Rain.")
    call = {"name": "weather", "arguments": '{"city": "Bonn"}'}
    messages: list[Any] = [  # Any: as above
        *ASK,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
        {"role": "function", "name": "time", "content": "noon"},
    ]
    client.chat.completions.create(model="tiny", messages=messages, functions=FUNCTIONS)
    text = prompt_of(tool_server)
    assert '(call00001 weather {"city": "Bonn"})' in text
    assert "rain[call00001 weather]" in text
    # No call of this function came before.
    assert text.endswith("noon")


# fmt: off
INVALID_FUNCTIONS: list[tuple[dict[str, Any], str, str]] = [  # Any: JSON
    ({"functions": FUNCTIONS, "tools": TOOLS},
     "functions cannot be combined with tools.", "functions"),
    ({"functions": FUNCTIONS, "tool_choice": "auto"},
     "functions cannot be combined with tool_choice.", "functions"),
    ({"function_call": "auto"}, "function_call requires functions.", "function_call"),
    ({"functions": FUNCTIONS, "function_call": {"name": "x"}},
     "function_call names 'x', which is not in functions.", "function_call"),
    ({"functions": FUNCTIONS, "function_call": "required"},
     "function_call must be none, auto or a named function.", "function_call"),
    ({"functions": FUNCTIONS * 2}, "functions must have unique names.", "functions"),
    ({"functions": {}}, "functions must be a list.", "functions"),
    ({"functions": [{"name": "a b"}]},
     "functions.0.name must be 1 to 128 letters, digits, underscores, dashes or dots.",
     "functions.0.name"),
    ({"functions": [{"name": "a", "paramters": {}}]},
     "functions.0.paramters is not supported: did you mean parameters?", "functions.0.paramters"),
    ({"messages": [{"role": "function", "content": "x"}]},
     "messages.0.name is required with role = function.", "messages.0.name"),
    ({"messages": [{"role": "user", "function_call": {"name": "a"}}]},
     "messages.0.function_call requires role = assistant.", "messages.0.function_call"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "a", "arguments": "["}}]},
     "messages.0.function_call.arguments must be a JSON object as a string.",
     "messages.0.function_call.arguments"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "a"},
                    "tool_calls": [{"id": "c", "function": {"name": "a"}}]}]},
     "messages.0.function_call cannot be combined with tool_calls.", "messages.0.function_call"),
]
# fmt: on


@pytest.mark.parametrize(("fields", "message", "param"), INVALID_FUNCTIONS)
def test_invalid_functions_are_rejected_by_their_names(
    client: openai.OpenAI, fields: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as rejected:
        client.post(
            "/chat/completions", cast_to=object, body={"model": "tiny", "messages": ASK, **fields}
        )
    assert rejected.value.body is not None
    assert (rejected.value.body["message"], rejected.value.param) == (message, param)  # type: ignore[index]  # an object
