"""Grammars that let the model call tools or answer: random texts that they allow, read back."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest

from cluster.serving.tools.tool import Tool
from cluster.serving.tools.tool_calls import TOOL_CALL_FORMATS
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.token_matchers import MarkMatcher, ReasoningMatcher
from cluster.structured.vocabulary import Vocabulary
from cluster.structured.xgrammar_library import XGrammarLibrary
from pagedray.errors import InvalidRequestError
from pagedray.reasoning import AnswerHeader, Reasoning
from pagedray.structure import Structure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.serving.tools.tool_calls import ToolCallFormat
    from cluster.serving.tools.turn_reader import TurnDelta
    from cluster.structured.token_matchers import TokenMatcher

EOS = 0
SPECIAL = ("[TOOL_CALLS]", "<|python_tag|>")
TEXTS = (
    *("", *SPECIAL, "<tool_call>", "</tool_call>", "\n", "\uff5c", "\u2581"),
    *map(chr, range(32, 127)),
)
INTEGER = {"type": "integer"}
TOOLS = [
    Tool(
        name="look",
        parameters={
            "type": "object",
            "properties": {"where": {"enum": ["a", 1]}},
            "additionalProperties": False,
            "required": [],
        },
    ),
    Tool(
        name="add",
        parameters={
            "type": "object",
            "properties": {
                "x": {"$ref": "#/$defs/n"},
                "y": {"$ref": "#/properties/x"},
                "more": {"$ref": "#"},
            },
            "additionalProperties": False,
            "required": ["x"],
            "$defs": {"n": INTEGER},
        },
    ),
]
SCHEMA = {
    "type": "object",
    "properties": {"k": {"$ref": "#/$defs/n"}},
    "required": ["k"],
    "$defs": {"n": {"enum": [True, 2]}},
}
ANSWER = Structure(kind="json_schema", text=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def library() -> XGrammarLibrary:
    tokens = tuple(b"" if text in SPECIAL else text.encode() for text in TEXTS)
    special = {text: TEXTS.index(text) for text in SPECIAL}
    return XGrammarLibrary(
        Vocabulary(tokens=tokens, eos_token_ids=(EOS,), special_token_ids=special)
    )


def use_of(tool_format: ToolCallFormat, *, is_parallel: bool) -> tuple[ToolUse, Structure]:
    use = ToolUse(TOOLS, ToolChoice(is_parallel=is_parallel), tool_format=tool_format)
    structure = use.structure(ANSWER, "response_format")
    assert structure is not None
    return use, structure


def written(
    library: XGrammarLibrary,
    compiled: Any,  # Any: the library's own type
    mark: str,
    seed: int,
) -> tuple[str, bool]:
    """Return a random text that the masks allow, and whether it has ended."""
    inner = library.matcher(compiled)
    mark_id = library.special_token_ids.get(mark)
    matcher: TokenMatcher = inner
    if mark_id is not None:
        matcher = MarkMatcher(inner, mark_id, mark)
    return sampled(library, matcher, TEXTS, seed)


def sampled(
    library: XGrammarLibrary, matcher: TokenMatcher, texts: Sequence[str], seed: int
) -> tuple[str, bool]:
    """Return a random text that the masks of a matcher allow, and whether it has ended."""
    generator = random.Random(seed)
    output = ""
    for _ in range(400):
        masks = np.zeros((1, library.num_mask_words), dtype=np.int32)
        matcher.write_mask(masks, 0)
        bits = np.unpackbits(masks[0].view(np.uint8), count=len(texts), bitorder="little")
        chosen = generator.choice(np.flatnonzero(bits).tolist())
        if chosen == EOS:
            return output, True
        assert matcher.accept_token(chosen), (output, texts[chosen])
        output += texts[chosen]
    return output, False


def joined(deltas: Iterable[TurnDelta]) -> tuple[str, dict[int, tuple[str | None, str]]]:
    """Return the content, and the name and the arguments of each call."""
    content = ""
    calls: dict[int, tuple[str | None, str]] = {}
    for delta in deltas:
        content += delta.content
        for call in delta.calls:
            name, arguments = calls.get(call.index, (call.name, ""))
            calls[call.index] = (name, arguments + call.arguments)
    return content, calls


def check_call(name: str, arguments: str) -> None:
    (schema,) = [tool.schema() for tool in TOOLS if tool.name == name]
    jsonschema.validate(json.loads(arguments), schema)


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("tool_format", [one for one in TOOL_CALL_FORMATS if one != "openai"])
def test_model_chooses_calls_or_the_answer(
    library: XGrammarLibrary, tool_format: ToolCallFormat, is_parallel: bool
) -> None:
    most_calls = num_answers = 0
    use, structure = use_of(tool_format, is_parallel=is_parallel)
    compiled, _ = library.compile_grammar(grammar_text(structure))
    for seed in range(30):
        text, has_ended = written(library, compiled, structure.mark, seed)
        if not has_ended:
            continue
        reader = use.reader()
        content, calls = joined([*map(reader.read_piece, text), reader.flush()])
        if calls:
            assert not content
            assert len(calls) == text.count('"name"')
            for name, arguments in calls.values():
                check_call(name or "", arguments)
        else:
            assert json.loads(content)["k"] in (True, 2)
            assert content == text
            num_answers += 1
        most_calls = max(most_calls, len(calls))
    assert num_answers > 2
    assert most_calls > 1 if is_parallel else most_calls == 1


CHANNELS = (
    *("", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>"),
    *("assistant", "analysis", "final", "commentary", "functions", "json"),
    *map(chr, range(32, 127)),
)
NUM_SPECIAL = 6


def channel_ids(text: str) -> tuple[int, ...]:
    """Return the tokens of a header."""
    words = re.findall("|".join([*map(re.escape, CHANNELS[1:12]), "."]), text)
    return tuple(map(CHANNELS.index, words))


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("kind", ["named", "required", "auto", "strict"])
def test_calls_in_channels_are_valid(kind: Any, is_open: bool) -> None:
    texts = [b"" if number < NUM_SPECIAL else one.encode() for number, one in enumerate(CHANNELS)]
    special = {text: CHANNELS.index(text) for text in CHANNELS[1:NUM_SPECIAL]}
    channels = XGrammarLibrary(
        Vocabulary(tokens=tuple(texts), eos_token_ids=(EOS,), special_token_ids=special)
    )
    answer = ANSWER if kind == "auto" else None
    choice = ToolChoice(kind="auto" if kind == "strict" else kind, name="add")
    tools = [replace(tool, is_strict=kind == "strict") for tool in TOOLS]
    use = ToolUse(tools, choice, tool_format="openai")
    structure = use.structure(answer, "response_format")
    assert structure is not None
    reasoning = Reasoning(
        begin="<|channel|>analysis<|message|>",
        end="<|end|>",
        mark_tokens=tuple((one, text) for text, one in special.items()),
        answer_headers=tuple(
            AnswerHeader(channel_ids(header), text) for header, text in structure.headers
        ),
        num_prompt_tokens=2,
        is_open=is_open,
    )
    compiled, _ = channels.compile_grammar(grammar_text(structure))
    seen = set()
    for seed in range(60):
        matcher = ReasoningMatcher(
            channels.matcher(compiled), reasoning, channels.index, eos_token_ids=(EOS,)
        )
        text, has_ended = sampled(channels, matcher, CHANNELS, seed)
        if not has_ended:
            continue
        reader = use.channel_reader(is_open=is_open)
        content, calls = joined([*map(reader.read_piece, text), reader.flush()])
        if calls:
            ((name, arguments),) = calls.values()
            check_call(name or "", arguments)
            seen.add(name)
            assert not content
        else:
            assert kind == "strict" or json.loads(content)["k"] in (True, 2)
            seen.add("an answer")
    expected = {"named": {"add"}, "required": {"look", "add"}}
    assert seen == expected.get(kind, {"look", "add", "an answer"})


def test_forced_call_leaves_the_answer_out() -> None:
    for kind in ("required", "named"):
        choice = ToolChoice(kind=kind, name="add")
        use = ToolUse(TOOLS, choice, tool_format="hermes")
        structure = use.structure(ANSWER, "response_format")
        assert structure is not None
        assert structure.kind == "json_schema"
        assert "true" not in structure.text


def test_grammar_of_a_client_cannot_be_joined() -> None:
    use = ToolUse(TOOLS, ToolChoice(), tool_format="hermes")
    with pytest.raises(InvalidRequestError, match="guided_grammar cannot be combined with tools"):
        use.structure(Structure(kind="grammar", text='root ::= "a"'), "guided_grammar")
