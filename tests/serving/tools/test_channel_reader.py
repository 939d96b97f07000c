"""Turns of gpt-oss: what is reasoning, content and calls, and how structures are framed."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from cluster.serving.text.text_stream import SequenceOutput
from cluster.serving.tools.channel_reader import ChannelReader, ChannelTexts, ChannelTokens
from cluster.serving.tools.tool import Tool
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.serving.tools.turns import Turns
from pagedray.reasoning import AnswerHeader, Reasoning, ReasoningPlace, ReasoningTracker
from pagedray.request import FinishReason

TRANSCRIPTS: list[dict[str, Any]] = json.loads(  # Any: JSON
    Path(__file__).with_name("harmony_transcripts.json").read_text()
)
SCHEMAS: dict[str, dict[str, object]] = {"look": {}, "add": {}}
TOOLS = [Tool(name=name, parameters={}) for name in SCHEMAS]
MARKS = Reasoning(
    begin="<|channel|>analysis<|message|>", end="<|end|>", answer_headers=(AnswerHeader((1,)),)
)
ANSWER = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"


class CharacterTokens:
    """A vocabulary whose tokens are characters."""

    def bytes_of(self, token_id: int) -> bytes:
        return chr(token_id).encode()


def split(text: str, generator: random.Random) -> list[str]:
    """Return the text in pieces of random lengths."""
    pieces: list[str] = []
    while text:
        length = generator.randint(1, 12)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def read(reader: ChannelReader, pieces: list[str]) -> tuple[str, str, list[list[str]]]:
    """Return reasoning, content and calls."""
    reasoning = content = ""
    calls: list[list[str]] = []
    for delta in [*map(reader.read_piece, pieces), reader.flush()]:
        reasoning += delta.reasoning
        content += delta.content
        for call in delta.calls:
            if call.name is not None:
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return reasoning, content, calls


def expected(messages: list[dict[str, Any]]) -> tuple[str, str, list[list[str]]]:
    """Return what the messages of OpenAI's reader are here."""
    calls = [
        [one["recipient"].removeprefix("functions."), one["content"]]
        for one in messages
        if one["recipient"] is not None
    ]
    others = [one for one in messages if one["recipient"] is None]
    return (
        "\n".join(one["content"] for one in others if one["channel"] == "analysis"),
        "".join(one["content"] for one in others if one["channel"] != "analysis"),
        calls,
    )


@pytest.mark.parametrize("seed", range(4))
def test_turns_are_those_of_openai_harmony(seed: int) -> None:
    generator = random.Random(seed)
    for transcript in TRANSCRIPTS:
        pieces = split(transcript["text"], generator)
        assert read(ChannelReader(SCHEMAS), pieces) == expected(transcript["messages"])


CASES = [
    ("<|channel|>final<|message|>Hi.<|return|>", ("", "Hi.", [])),
    # A model that knows no channels.
    ("Hi <b>.", ("", "Hi <b>.", [])),
    # A function that the request does not have, and what is no object.
    ("<|channel|>commentary to=functions.x json<|message|>{}<|call|>",
     ("", "<|channel|>commentary to=functions.x json<|message|>{}", [])),
    ("<|channel|>commentary to=functions.add<|message|>[1]<|call|>", ("", "[1]", [])),
    ("<|channel|>commentary to=functions.add<|message|><|call|>", ("", "", [["add", "{}"]])),
    ("<|channel|>commentary to=functions.add<|message|>{\"a\": 1} and",
     ("", "and", [["add", '{"a": 1}']])),
    # A tool of the model's own, which it uses while it reasons.
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    # Cut off inside of a header, and an object without its end.
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assist", ("Hm.", "", [])),
    ("<|channel|>commentary to=functions.add<|message|>{\"a", ("", "", [["add", '{"a": null}']])),
    ("<|channel|>" + "x" * 600, ("", "<|channel|>" + "x" * 600, [])),
    ("to=functions.add<|channel|>comm", ("", "", [])),
    ("<|channel|>final<|message|>Hi.<|end|>\n<|sta", ("", "Hi.", [])),
    # Marks in texts, and what follows one without a header.
    ("<|channel|>final<|message|>The token <|end|> closes a message.",
     ("", "The token <|end|> closes a message.", [])),
    ("<|channel|>final<|message|><|start|> opens it, <|end|> and <|return|> close it.",
     ("", "<|start|> opens it, <|end|> and <|return|> close it.", [])),
    ("<|channel|>final<|message|>Not <|end|><|start|>this is no header, is it?",
     ("", "Not <|end|><|start|>this is no header, is it?", [])),
    ("<|start|> opens a message.", ("", "<|start|> opens a message.", [])),
    ("<|channel|>analysis<|message|>Hm.<|end|>The answer is 4.", ("Hm.", "The answer is 4.", [])),
    ("<|channel|>commentary to=functions.add<|message|>{}<|call|>Now.",
     ("", "Now.", [["add", "{}"]])),
    ("<|channel|>commentary to=functions.add<|message|>{\"a\": \"'<|end|>' <|start|>\"}<|call|>",
     ("", "", [["add", "{\"a\": \"'<|end|>' <|start|>\"}"]])),
    # What follows a call after reasoning, which ends at fewer marks.
    (f"{ANSWER.removesuffix('<|channel|>final<|message|>')} to=functions.add<|message|>{{}}"
     "<|call|><|start|>assistant<|channel|>final<|message|>Hi.", ("Hm.", "Hi.", [["add", "{}"]])),
    ("to=be, or not to=be", ("", "to=be, or not to=be", [])),
    ("Hm.<|end|>to=functions.add<|message|>{}",
     ("", "Hm.<|end|>to=functions.add<|message|>{}", [])),
    # Blanks before a mark, as many as where a grammar waits for it, and more.
    (" " * 16 + "<|channel|>final<|message|>Hi.", ("", "Hi.", [])),
    (" " * 17 + "<|channel|>final", ("", " " * 17 + "<|channel|>final", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "found"), CASES)
def test_other_turns(text: str, found: tuple[str, str, list[list[str]]]) -> None:
    assert read(ChannelReader(SCHEMAS), [text]) == found
    assert read(ChannelReader(SCHEMAS), list(text)) == found


@pytest.mark.parametrize("inside", ["<|start|>", "<|call|>", "<|return|>"])
def test_reasoning_ends_where_grammars_begin(inside: str) -> None:
    text = f"<|channel|>analysis<|message|>Hm. {inside}assistant<|channel|>final<|message|>Free."
    tracker = ReasoningTracker(MARKS)
    for character in text:
        tracker.add_token(ord(character), character.encode())
    assert tracker.place is ReasoningPlace.INSIDE
    thoughts = text.removeprefix(MARKS.begin)
    assert read(ChannelReader(SCHEMAS), list(text)) == (thoughts, "", [])
    answer = "<|end|><|start|>assistant<|channel|>final<|message|>{}"
    assert read(ChannelReader(SCHEMAS), list(text + answer)) == (thoughts, "{}", [])


def test_calls_without_arguments_need_no_mark() -> None:
    text = "<|channel|>commentary to=functions.add<|message|>"
    assert turn_of(ToolChoice(), text)[:3] == ("", "", [["add", "{}"]])
    for reason in (FinishReason.LENGTH, FinishReason.ABORT):
        assert turn_of(ToolChoice(), text, reason)[:3] == ("", "", [])
    cut = text.removesuffix("<|message|>")
    assert turn_of(ToolChoice(), cut)[:3] == ("", "", [])


def turn_of(
    choice: ToolChoice, text: str, reason: FinishReason = FinishReason.STOP
) -> tuple[str, str, list[list[str]], int]:
    """Return reasoning, content, calls and the number of reasoning tokens of a turn."""
    use = ToolUse(TOOLS, choice, tool_format="openai")
    turns = Turns(use, MARKS, CharacterTokens())  # type: ignore[arg-type]  # its only method
    turn = turns.begin_turn()
    delta = turn.read(
        SequenceOutput(
            index=0,
            text=text,
            token_ids=tuple(map(ord, text)),
            finish_reason=reason,
        )
    )
    calls: list[list[str]] = []
    for call in delta.calls:
        if call.name is not None:
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    assert turn.has_calls == bool(calls)
    return delta.reasoning, delta.content, calls, turns.num_reasoning_tokens


def reasoning_tokens(text: str, size: int, *, is_open: bool = False) -> int:
    """Return the count of a turn whose tokens are its marks, and `size` characters elsewhere."""
    counter = ChannelTokens(SCHEMAS, is_open=is_open)
    for part in re.split(r"(<\|\w+\|>)", text):
        is_mark = part.startswith("<|")
        for place in range(0, len(part), len(part) if is_mark else size):
            counter.add_token(part[place : place + (len(part) if is_mark else size)].encode())
    return counter.num_reasoning


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
COUNTED = [
    # Three marks, eight characters of the channel's name, and the text.
    (f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>Hm. analysis", 14),
    (f"{THOUGHT}{PREAMBLE}<|start|>assistant{THOUGHT}<|start|>assistant<|channel|>final", 28),
    (f"{THOUGHT}<|start|>assistant{THOUGHT}", 28),
    (f"to=python{THOUGHT.replace('<|end|>', '<|call|>')}", 14),
    ("<|channel|>analysis to=python code<|message|>1<|return|>Yes.", 27),
    # A call while it reasons is none of it.
    ("<|channel|>analysis to=functions.add<|message|>{}<|call|>", 0),
    ("<|channel|>analysis<|message|>a<|start|>b<|call|>c<|end|>d", 16),
    (f"Text <|start|> {THOUGHT}", 0),
    ("<|channel|>analysis", 0),
    ("<|channel|>final<|message|>Yes.<|end|>", 0),
    ("Yes.", 0),
]


@pytest.mark.parametrize(("text", "number"), COUNTED)
def test_tokens_of_every_message_of_reasoning_count(text: str, number: int) -> None:
    assert reasoning_tokens(text, 1) == number


def test_count_does_not_depend_on_where_tokens_end() -> None:
    text = f"{THOUGHT}{PREAMBLE}<|start|>assistant{THOUGHT}<|start|>assistant<|channel|>final"
    # Three marks, the channel's name in one or two tokens, and the text in one.
    assert reasoning_tokens(text, 100) == 10
    assert reasoning_tokens(text, 4) == 12


@pytest.mark.parametrize("seed", range(4))
def test_what_is_read_as_reasoning_is_counted(seed: int) -> None:
    for transcript in TRANSCRIPTS:
        text = transcript["text"]
        messages = [one["content"] for one in transcript["messages"]
                    if one["channel"] == "analysis" and one["recipient"] is None]  # fmt: skip
        counted = reasoning_tokens(text, 1 + seed)
        least = sum(math.ceil(len(one) / (1 + seed)) for one in messages)
        assert least <= counted <= least + (3 + 8) * len(messages)


def test_prompt_may_begin_a_message_of_reasoning() -> None:
    text = "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hi."
    assert read(ChannelReader(SCHEMAS, is_open=True), list(text)) == ("Hm.", "Hi.", [])
    assert reasoning_tokens(text, 1, is_open=True) == 4


CALL = "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"


def test_forced_calls_are_messages_of_their_own() -> None:
    named = ToolChoice(kind="named", name="add")
    found = turn_of(named, THOUGHT + CALL.format("add", '{"a": 1}'))
    assert found == ("Hm.", "", [["add", '{"a": 1}']], len(THOUGHT))
    found = turn_of(ToolChoice(kind="required"), THOUGHT + CALL.format("look", "{}"))
    assert found == ("Hm.", "", [["look", "{}"]], len(THOUGHT))
    answered = turn_of(ToolChoice(kind="none"), f"{ANSWER}Hi.")
    assert answered == ("Hm.", "Hi.", [], len(THOUGHT))


def test_usage_counts_every_message_of_reasoning() -> None:
    text = f"{THOUGHT}{PREAMBLE}<|start|>assistant{THOUGHT}<|start|>assistant<|channel|>final"
    found = turn_of(ToolChoice(), f"{text}<|message|>Hi.")
    assert found == ("Hm.\nHm.", "I look.Hi.", [], 2 * len(THOUGHT))


def test_texts_of_channels_join() -> None:
    texts = ChannelTexts()
    found = [texts.read_piece(one, is_last=False) for one in f"{ANSWER}Hi."]
    found.append(texts.read_piece("", is_last=True))
    assert ("".join(one for one, _ in found), "".join(one for _, one in found)) == ("Hm.", "Hi.")
