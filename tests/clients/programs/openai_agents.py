"""openai-agents with its defaults, which are the Responses API: an answer, a stream, a tool."""

import asyncio
import sys

import openai
from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)

called = []


@function_tool
def weather(city: str) -> str:
    """Return the weather in a city."""
    called.append(city)
    return "Rain."


async def run(url: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    set_default_openai_client(client, use_for_tracing=False)
    set_tracing_disabled(True)
    settings = ModelSettings(max_tokens=40, temperature=0)
    agent = Agent(name="a", instructions="Be brief.", model="tiny-llama", model_settings=settings)
    result = await Runner.run(agent, "What does Queue.put do?")
    assert result.final_output
    streamed = Runner.run_streamed(agent, "What does Queue.put do?")
    deltas = [
        event.data.delta
        async for event in streamed.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == result.final_output == streamed.final_output
    forced = Agent(
        name="b",
        model="tiny-llama",
        tools=[weather],
        model_settings=ModelSettings(max_tokens=200, temperature=0, tool_choice="weather"),
        tool_use_behavior="stop_on_first_tool",
    )
    result = await Runner.run(forced, "Weather?")
    assert len(called) == 1
    assert result.final_output == "Rain."


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
