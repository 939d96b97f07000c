"""Stable positions: where the prompts of other turns differ from a conversation's prompt."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.serving.text.stable_positions import StablePositions
from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt, MessageToolCall
from cluster.serving.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FOLDER = Path("examples/tiny-llama")
# Reasoning is left out of all turns before the last question, as by Qwen3's template.
STRIPS_REASONING = (
    "{% set last = namespace(question=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.question = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% for m in messages %}<{{ m.role }}>\n"
    "{% if m.reasoning_content and loop.index0 > last.question %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}"
    "</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n<think>\n{% endif %}"
)
REPEATS_OUTPUT = STRIPS_REASONING.replace(" and loop.index0 > last.question", "")
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "rain",
    "falls",
    "on",
    "small",
    "towns",
]
TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {}}},)
CALL = MessageToolCall(id="call00000", name="look", arguments={})


def tokenizer_with(template: str) -> Tokenizer:
    return Tokenizer.from_folder(FOLDER, chat_template=template)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next(index for index, pair in enumerate(pairs) if pair[0] != pair[1])


def texts(seed: int) -> Callable[[], str]:
    choice = random.Random(seed)
    return lambda: " ".join(choice.choices(WORDS, k=choice.randrange(1, 40)))


def tokens_of(tokenizer: Tokenizer, prompt: ChatPrompt) -> list[int]:
    return tokenizer.encode(tokenizer.render_chat(prompt), add_special_tokens=False)


def assert_reused(tokenizer: Tokenizer, first: ChatPrompt, second: ChatPrompt) -> None:
    """Assert that a position of `first` is where `second` differs, or at most two tokens before."""
    tokens = tokens_of(tokenizer, first)
    common = common_length(tokens, tokens_of(tokenizer, second))
    assert common < len(tokens)
    positions = StablePositions(tokenizer).of(first, len(tokens))
    assert any(common - 2 <= position <= common for position in positions), (positions, common)


@pytest.mark.parametrize("template", [STRIPS_REASONING, REPEATS_OUTPUT])
@pytest.mark.parametrize("seed", range(4))
def test_each_turn_of_a_chat_repeats_the_prompt_up_to_a_position(template: str, seed: int) -> None:
    tokenizer, text = tokenizer_with(template), texts(seed)
    prompt = ChatPrompt((ChatMessage("system", text()), ChatMessage("user", text())))
    for _ in range(10):
        answer = ChatMessage("assistant", text(), reasoning=None if seed % 2 else text())
        following = replace(
            prompt, messages=(*prompt.messages, answer, ChatMessage("user", text()))
        )
        if seed % 2 or template is STRIPS_REASONING:
            assert_reused(tokenizer, prompt, following)
        prompt = following


def test_a_tool_loop_repeats_its_reasoning_until_the_next_question() -> None:
    tokenizer, text = tokenizer_with(STRIPS_REASONING), texts(5)
    asked = ChatPrompt((ChatMessage("user", text()),), TOOLS)
    call = ChatMessage("assistant", "", tool_calls=(CALL,), reasoning=text())
    result = ChatMessage("tool", text(), tool_call_id=CALL.id, name="look")
    looked = replace(asked, messages=(*asked.messages, call, result))
    again = replace(asked, messages=(*looked.messages, replace(call, reasoning=None), result))
    answered = (ChatMessage("assistant", text()), ChatMessage("user", text()))
    question = replace(asked, messages=looked.messages + answered)
    assert_reused(tokenizer, looked, again)
    assert_reused(tokenizer, looked, question)


@pytest.mark.parametrize("tools", [(), TOOLS])
def test_other_conversations_repeat_the_instructions(tools: tuple[dict[str, object], ...]) -> None:
    tokenizer, text = tokenizer_with(STRIPS_REASONING), texts(7)
    system = ChatMessage("system", text())
    first, second = (
        ChatPrompt((system, ChatMessage("user", question)), tools)
        for question in ("Why?", "How? " + text())
    )
    assert_reused(tokenizer, first, second)


def test_a_continued_message_and_rejected_turns_have_no_positions() -> None:
    prompt = ChatPrompt((ChatMessage("user", "Why?"),))
    rejecting = tokenizer_with(
        "{% if messages | length > 1 %}{{ raise_exception('one message') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    positions = StablePositions(rejecting)
    assert positions.of(prompt, 9) == ()
    positions = StablePositions(tokenizer_with(STRIPS_REASONING))
    assert positions.of(replace(prompt, continues_final_message=True), 9) == ()
    assert positions.of(replace(prompt, adds_generation_prompt=False), 9) == ()
