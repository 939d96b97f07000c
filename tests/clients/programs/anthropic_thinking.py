"""The anthropic package: thinking that ends at its budget, complete and streamed."""

import sys
from pathlib import Path

import anthropic

ANSWER = "It is six."


def main(url: str, folder: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    given = {
        "model": Path(folder).name,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "What is 1 + 2 + 3?"}],
    }
    assert contents(client.messages.create(**given)) == ["One, two, three.", ANSWER]
    # Agents send budgets like this one.
    wide = {"type": "enabled", "budget_tokens": 31999}
    assert contents(client.messages.create(**given, thinking=wide)) == ["One, two, three.", ANSWER]
    narrow = {"type": "enabled", "budget_tokens": 2}
    message = client.messages.create(**given, thinking=narrow)
    assert contents(message) == ["One, two,", ANSWER]
    assert message.stop_reason == "end_turn", message
    with client.messages.stream(**given, thinking=narrow) as stream:
        thoughts = [event.thinking for event in stream if event.type == "thinking"]
        final = stream.get_final_message()
    assert "".join(thoughts) == "One, two,", thoughts
    assert contents(final) == contents(message)
    assert final.usage.output_tokens == message.usage.output_tokens
    counted = client.messages.count_tokens(
        model=given["model"], messages=given["messages"], thinking=narrow
    )
    assert counted.input_tokens == message.usage.input_tokens, counted
    check_rejected(client, given, {"type": "enabled", "budget_tokens": -1})
    check_rejected(client, given, {"type": "disabled", "budget_tokens": 1024})


def contents(message: anthropic.types.Message) -> list[str]:
    """Return the thinking and the text of a message that has one block of each."""
    thoughts, text = message.content
    assert (thoughts.type, text.type) == ("thinking", "text"), message
    return [thoughts.thinking, text.text]


def check_rejected(client: anthropic.Anthropic, given: dict, thinking: dict) -> None:
    found = None
    try:
        client.messages.create(**given, thinking=thinking)
    except anthropic.BadRequestError as error:
        found = error.body["error"]
    assert found is not None
    assert found["type"] == "invalid_request_error", found
    assert found["message"].startswith("thinking.budget_tokens "), found


if __name__ == "__main__":
    main(*sys.argv[1:])
