"""litellm: chat and completions of two providers, streams, tools, Responses, a rejection."""

import json
import sys

import litellm

ASKED = {
    "messages": [{"role": "user", "content": "What does Queue.put do?"}],
    "temperature": 0,
    "max_tokens": 24,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"day": {"enum": ["today", "tomorrow"]}},
            "required": ["day"],
            "additionalProperties": False,
        },
    },
}


def main(url: str, folder: str) -> None:
    litellm.num_retries = 0
    texts = {check_chat(provider, url) for provider in ("openai", "hosted_vllm")}
    assert len(texts) == 1
    given = {"api_base": f"{url}/v1", "api_key": "none"}
    completed = litellm.text_completion(
        model="text-completion-openai/tiny-llama", prompt="class Queue:", max_tokens=8, **given
    )
    assert completed.choices[0].text
    answer = litellm.responses(
        model="openai/tiny-llama", input="What does Queue.put do?", max_output_tokens=8, **given
    )
    assert answer.output
    try:
        litellm.completion(model="openai/tiny-llama", **{**ASKED, "temperature": 500}, **given)
    except litellm.BadRequestError as error:
        if "temperature" in str(error):
            return
    raise AssertionError("temperature = 500 was not rejected")


def check_chat(provider: str, url: str) -> str:
    """Return an answer, which its stream equals."""
    given = {"model": f"{provider}/tiny-llama", "api_base": f"{url}/v1", "api_key": "none"}
    text = litellm.completion(**given, **ASKED).choices[0].message.content
    chunks = litellm.completion(**given, **ASKED, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    forced = {"type": "function", "function": {"name": "weather"}}
    called = litellm.completion(
        **given, **{**ASKED, "max_tokens": 100}, tools=[TOOL], tool_choice=forced
    )
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["day"] in ("today", "tomorrow")
    return text


if __name__ == "__main__":
    main(*sys.argv[1:])
