"""The openai package's chat and completions: whole, streamed, tools, schemas, errors."""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel

ASKED = {
    "model": "tiny-llama",
    "messages": [{"role": "user", "content": "What does Queue.put do?"}],
    "temperature": 0,
}


class Answer(BaseModel):
    """What the model is to answer."""

    size: Literal["small", "large"]
    is_empty: bool


TOOL = openai.pydantic_function_tool(Answer, name="answer")


def main(url: str, folder: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny-llama"]
    check_chat(client)
    check_completions(client)
    check_structures(client)
    check_rejection(client)


def check_chat(client: openai.OpenAI) -> None:
    """Compare a whole answer and its stream."""
    whole = client.chat.completions.create(
        **ASKED, max_completion_tokens=24, n=2, logprobs=True, top_logprobs=2
    )
    assert len(whole.choices) == 2, whole
    num_tokens = len(whole.choices[0].logprobs.content)
    assert whole.usage.completion_tokens == 2 * num_tokens > 0, whole.usage
    text = whole.choices[0].message.content
    assert text == whole.choices[1].message.content
    with client.chat.completions.stream(**ASKED, max_completion_tokens=24) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == text


def check_completions(client: openai.OpenAI) -> None:
    """Compare whole texts and their stream."""
    asked = {"model": "tiny-llama", "prompt": ["class Queue:", "def put("], "temperature": 0}
    whole = client.completions.create(**asked, max_tokens=16, echo=True, stop=["return"])
    assert [choice.text.startswith(prompt) for choice, prompt in
            zip(whole.choices, asked["prompt"], strict=True)] == [True, True]  # fmt: skip
    texts = ["", ""]
    options = {"include_usage": True}
    for chunk in client.completions.create(
        **asked, max_tokens=16, echo=True, stop=["return"], stream=True, stream_options=options
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert chunk.usage == whole.usage


def check_structures(client: openai.OpenAI) -> None:
    """Let the model answer in a schema, and call a function."""
    parsed = client.chat.completions.parse(**ASKED, max_tokens=100, response_format=Answer)
    assert isinstance(parsed.choices[0].message.parsed, Answer), parsed
    called = client.chat.completions.parse(
        **ASKED, max_tokens=200, tools=[TOOL], tool_choice="required"
    )
    (call,) = called.choices[0].message.tool_calls[:1]
    assert isinstance(call.function.parsed_arguments, Answer)
    arguments = ""
    for chunk in client.chat.completions.create(
        **ASKED,
        max_tokens=200,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "answer"}},
        stream=True,
    ):
        for delta in chunk.choices[0].delta.tool_calls or ():
            arguments += delta.function.arguments or ""
    assert set(json.loads(arguments)) == {"size", "is_empty"}
    messages = [
        *ASKED["messages"],
        parsed.choices[0].message,
        *ASKED["messages"],
        called.choices[0].message,
        *({"role": "tool", "tool_call_id": one.id, "content": "Yes."}
          for one in called.choices[0].message.tool_calls),
    ]  # fmt: skip
    answer = client.chat.completions.create(**{**ASKED, "messages": messages}, max_tokens=8)
    assert answer.choices[0].message.content


def check_rejection(client: openai.OpenAI) -> None:
    """Ask for another model."""
    try:
        client.chat.completions.create(**{**ASKED, "model": "gpt-4o"})
    except openai.NotFoundError as error:
        if error.param == "model":
            return
    raise AssertionError("an unknown model was not rejected")


if __name__ == "__main__":
    main(*sys.argv[1:])
