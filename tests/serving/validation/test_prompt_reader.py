"""Where prompts are read: on the event loop if that takes a moment, otherwise in a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, ParamSpec, TypeVar

import pytest

from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt, MessageToolCall
from cluster.serving.text.text_pool import TextPool
from cluster.serving.validation.prompt_reader import PromptReader
from tests.serving.conftest import engine_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.serving.text.tokenizer import Tokenizer

Given = ParamSpec("Given")
Result = TypeVar("Result")


class CountingPool(TextPool):
    """Counts what is rendered in threads."""

    num_runs = 0

    async def run_in_thread(
        self, tenant: str, work: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        self.num_runs += 1
        return await super().run_in_thread(tenant, work, *args, **kwargs)


def tool(num_parameters: int) -> dict[str, object]:
    properties = {f"parameter {number}": {"type": "string"} for number in range(num_parameters)}
    return {"type": "function", "function": {"name": "f", "parameters": properties}}


@pytest.mark.parametrize(
    ("tools", "num_runs"),
    [((), 0), ((tool(8),) * 4, 0), ((tool(64),) * 4, 1), ((tool(1024),), 1)],
    ids=["none", "small", "several", "large"],
)
async def test_large_tools_are_rendered_in_a_thread(
    tokenizer: Tokenizer, tools: tuple[dict[str, object], ...], num_runs: int
) -> None:
    prompt = ChatPrompt((ChatMessage("user", "x"),), tools)
    assert await num_runs_of(prompt, tokenizer) == num_runs


@pytest.mark.parametrize(("num_arguments", "num_runs"), [(8, 0), (1024, 1)])
async def test_large_arguments_are_rendered_in_a_thread(
    tokenizer: Tokenizer, num_arguments: int, num_runs: int
) -> None:
    arguments = {f"argument {number}": "x" for number in range(num_arguments)}
    call = MessageToolCall(id="a", name="f", arguments=arguments)
    prompt = ChatPrompt((ChatMessage("assistant", "", tool_calls=(call,)),))
    assert await num_runs_of(prompt, tokenizer) == num_runs


async def num_runs_of(prompt: ChatPrompt, tokenizer: Tokenizer) -> int:
    pool = CountingPool()
    reader = PromptReader(engine_config(), tokenizer, text_pool=pool)
    await reader.read_prompt(prompt, is_long=False, tenant="ann")
    await pool.close()
    return pool.num_runs
