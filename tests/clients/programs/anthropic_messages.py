"""The anthropic package: messages, streams, tools, counting, errors."""

import sys

import anthropic

TOOL = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
USER = {"role": "user", "content": "What does Queue.put do?"}


def main(url: str, folder: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    given = {
        "model": "tiny-llama",
        "max_tokens": 24,
        "messages": [USER],
        "extra_body": {"temperature": 0},
    }
    message = client.messages.create(**given, system="Be brief.")
    assert message.content[0].type == "text", message
    assert message.usage.output_tokens <= 24
    with client.messages.stream(**given, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == message.content[0].text == final.content[0].text
    assert final.stop_reason == message.stop_reason
    counted = client.messages.count_tokens(
        model="tiny-llama", messages=[USER], system="Be brief."
    ).input_tokens
    usage = message.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    # Consecutive messages of a role are one.
    parts = [{"role": "user", "content": text} for text in ("What does", "Queue.put do?")]
    joined = {"role": "user", "content": "What does\n\nQueue.put do?"}
    first, second = (
        client.messages.count_tokens(model="tiny-llama", messages=one).input_tokens
        for one in (parts, [joined])
    )
    assert first == second
    check_tools(client)
    check_tool_runner(client)
    rejected = error_of(client, {**given, "max_tokens": 0})
    assert isinstance(rejected, anthropic.BadRequestError)
    assert "max_tokens must be" in rejected.message
    assert isinstance(error_of(client, {**given, "model": "x"}), anthropic.NotFoundError)
    check_missing_endpoint(client)


def check_missing_endpoint(client: anthropic.Anthropic) -> None:
    """Errors below the endpoint have their shape, and the id of the request."""
    found = None
    try:
        client.messages.batches.list(extra_headers={"x-request-id": "mine"})
    except anthropic.NotFoundError as error:
        found = error.request_id, error.body["request_id"], error.body["error"]["type"]
    assert found == ("mine", "mine", "not_found_error"), found


def error_of(client: anthropic.Anthropic, given: dict) -> Exception | None:
    """Return the error that a request raises."""
    try:
        client.messages.create(**given)
    except anthropic.APIError as error:
        return error
    return None


def check_tools(client: anthropic.Anthropic) -> None:
    """Force a call, whole and streamed, and give its result back."""
    given = {
        "model": "tiny-llama",
        "max_tokens": 120,
        "extra_body": {"temperature": 0},
        "messages": [USER],
        "tools": [TOOL],
        "tool_choice": {"type": "tool", "name": "weather"},
    }
    message = client.messages.create(**given)
    (use,) = message.content
    assert use.type == "tool_use", message
    assert set(use.input) == {"city"}, use
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**given) as stream:
        final = stream.get_final_message()
    assert final.content[0].input == use.input
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Rain."}
    answer = client.messages.create(
        model="tiny-llama",
        max_tokens=8,
        messages=[
            USER,
            {"role": "assistant", "content": message.content},
            {"role": "user", "content": [result]},
        ],
    )
    assert answer.type == "message"


def check_tool_runner(client: anthropic.Anthropic) -> None:
    """Let the library call a function for the model, twice."""
    cities = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Return the weather in a city."""
        cities.append(city)
        return "Rain."

    runner = client.beta.messages.tool_runner(
        model="tiny-llama",
        max_tokens=200,
        extra_body={"temperature": 0},
        messages=[USER],
        tools=[weather],
        tool_choice={"type": "any"},
        max_iterations=2,
    )
    assert [message.stop_reason for message in runner] == ["tool_use"] * 2
    assert len(cities) >= 1, cities


if __name__ == "__main__":
    main(*sys.argv[1:])
