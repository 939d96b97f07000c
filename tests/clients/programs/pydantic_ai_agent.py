"""pydantic-ai: an answer, a stream, a tool with native output, the Responses API."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What does Queue.put do?"


class Answer(BaseModel):
    """What the model is to answer."""

    size: Literal["small", "large"]


async def run(url: str) -> None:
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    settings = ModelSettings(max_tokens=100, temperature=0)
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("tiny-llama", provider=provider)
        agent = Agent(model, model_settings=settings)
        whole = await agent.run(QUESTION)
        assert whole.output, kind
        async with agent.run_stream(QUESTION) as stream:
            deltas = [delta async for delta in stream.stream_text(delta=True)]
        assert "".join(deltas) == whole.output
        for output in (NativeOutput(Answer), ToolOutput(Answer)):
            asked = Agent(model, output_type=output, model_settings=settings, retries=0)
            assert isinstance((await asked.run(QUESTION)).output, Answer), (kind, output)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
