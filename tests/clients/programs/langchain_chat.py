"""langchain-openai: an answer, a stream, a batch, tools, structured output, the Responses API."""

import sys
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = "What does Queue.put do?"


class Answer(BaseModel):
    """What the model is to answer."""

    size: Literal["small", "large"]


@tool
def weather(day: Literal["today", "tomorrow"]) -> str:
    """Return the weather."""
    return f"Rain {day}."


def main(url: str, folder: str) -> None:
    given = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "temperature": 0}
    chat = ChatOpenAI(model="tiny-llama", max_tokens=40, **given)
    whole = chat.invoke(QUESTION)
    assert whole.content, whole
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in chat.stream(QUESTION)) == whole.content
    assert [one.content for one in chat.batch([QUESTION, QUESTION])] == [whole.content] * 2
    for method in ("json_schema", "function_calling"):
        answer = chat.with_structured_output(Answer, method=method).invoke(QUESTION)
        assert isinstance(answer, Answer), (method, answer)
    called = chat.bind_tools([weather], tool_choice="weather").invoke(QUESTION)
    (call,) = called.tool_calls[:1]
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    history = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), result]
    assert isinstance(chat.invoke(history), AIMessage)
    responses = ChatOpenAI(model="tiny-llama", max_tokens=40, use_responses_api=True, **given)
    assert responses.invoke(QUESTION).text == whole.text
    assert OpenAI(model="tiny-llama", max_tokens=8, **given).invoke("class Queue:")


if __name__ == "__main__":
    main(*sys.argv[1:])
