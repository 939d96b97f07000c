"""The openai package's Responses API: whole, streamed, tools, a schema, errors."""

import json
import sys

import openai

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASKED = {"model": "tiny-llama", "input": "What does Queue.put do?", "temperature": 0}


def main(url: str, folder: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    whole = client.responses.create(**ASKED, max_output_tokens=24)
    assert whole.output_text, whole
    with client.responses.stream(**ASKED, max_output_tokens=24) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
    assert text == whole.output_text
    forced = client.responses.create(
        **ASKED, max_output_tokens=120, tools=[TOOL], tool_choice="required"
    )
    call = forced.output[0]
    assert call.type == "function_call", forced
    assert set(json.loads(call.arguments)) == {"city"}
    items = [{"role": "user", "content": ASKED["input"]}, call.model_dump(exclude_none=True)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rain."})
    answer = client.responses.create(**{**ASKED, "input": items}, max_output_tokens=8)
    assert answer.status in ("completed", "incomplete")
    schema = {"type": "json_schema", "name": "city", "schema": TOOL["parameters"], "strict": True}
    written = client.responses.create(**ASKED, max_output_tokens=120, text={"format": schema})
    assert set(json.loads(written.output_text)) == {"city"}
    check_conversation(client)
    check_rejection(client)


def check_conversation(client: openai.OpenAI) -> None:
    """Continue a stored response, read it and delete it."""
    first = client.responses.create(**ASKED, max_output_tokens=8)
    second = client.responses.create(**ASKED, max_output_tokens=8, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens, second.usage
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "assistant", "user"], items
    assert items[1].content[0].text == first.output_text
    counted = client.responses.input_tokens.count(
        model=ASKED["model"], input=ASKED["input"], previous_response_id=first.id
    )
    assert counted.input_tokens == second.usage.input_tokens, counted
    try:
        client.responses.cancel(first.id)
    except openai.BadRequestError as error:
        rejection = error.message
    assert "background" in rejection, rejection
    client.responses.delete(first.id)


def check_rejection(client: openai.OpenAI) -> None:
    """Continue a response that is not stored."""
    try:
        client.responses.create(**ASKED, previous_response_id="resp_1")
    except openai.BadRequestError as error:
        if error.param == "previous_response_id":
            return
    raise AssertionError("previous_response_id was not rejected")


if __name__ == "__main__":
    main(*sys.argv[1:])
