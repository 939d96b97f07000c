"""AutoGen's assistant with a tool: it names the authors of messages."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelInfo, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def run(url: str) -> None:
    client = OpenAIChatCompletionClient(
        model="tiny-llama",
        base_url=f"{url}/v1",
        api_key="none",
        max_tokens=24,
        temperature=0,
        model_info=ModelInfo(
            vision=False,
            function_calling=True,
            json_output=True,
            structured_output=True,
            family="unknown",
        ),
    )
    asked = UserMessage(content="What does Queue.put do?", source="Ada")
    created = await client.create([asked])
    assert created.content
    pieces = [piece async for piece in client.create_stream([asked])]
    assert pieces[-1].content == created.content
    agent = AssistantAgent("helper", model_client=client)
    result = await agent.run(task="What does Queue.put do?")
    assert result.messages[-1].content
    await client.close()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
