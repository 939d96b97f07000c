"""Grammars of free text with calls of strict tools: random texts that they allow, read back."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import jsonschema
import numpy as np
import pytest

from cluster.serving.intake.steps import finish
from cluster.serving.tools.strict_calls import STRICT_FORMATS
from cluster.serving.tools.tool import Tool
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.matchers.mark_matcher import MarkMatcher
from cluster.structured.matchers.vocabulary import Vocabulary
from cluster.structured.matchers.xgrammar_library import XGrammarLibrary
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.serving.tools.tool_calls import ToolCallFormat
    from cluster.serving.tools.turn_reader import TurnDelta
    from cluster.structured.matchers.token_matcher import TokenMatcher

EOS = 0
MISTRAL = "[TOOL_CALLS]"
TEXTS = (
    *("", MISTRAL, "</s>", "<tool_call>", "</tool_call>", "l>{", "\n", "\uff5c", "\u2581"),
    *map(chr, range(32, 127)),
)
NUM_SPECIAL = 3
SCHEMAS = {
    "look": {
        "type": "object",
        "properties": {"where": {"enum": ["a", 1]}, "deep": {"$ref": "#/$defs/n"}},
        "additionalProperties": False,
        "required": ["where"],
        "$defs": {"n": {"type": "integer"}},
    },
    "look.again": {"type": "object", "properties": {}, "additionalProperties": False},
}
STRICT = [Tool(name=name, parameters=one, is_strict=True) for name, one in SCHEMAS.items()]
UNSUPPORTED = {"type": "object", "properties": {"x": {"not": {"type": "null"}}}}
LOOSE = Tool(name="loose", parameters=UNSUPPORTED)


@pytest.fixture(scope="module")
def library() -> XGrammarLibrary:
    tokens = tuple(b"" if at < NUM_SPECIAL else text.encode() for at, text in enumerate(TEXTS))
    return XGrammarLibrary(
        Vocabulary(
            tokens=tokens,
            eos_token_ids=(EOS,),
            special_token_ids={text: TEXTS.index(text) for text in TEXTS[1:NUM_SPECIAL]},
        )
    )


class Writer:
    """Writes texts that the masks of a turn with tools allow."""

    def __init__(self, library: XGrammarLibrary, use: ToolUse) -> None:
        structure = finish(use.structure(None, None))
        assert structure is not None
        self._library = library
        compiled, _ = library.load_grammar(library.compile_grammar(grammar_text(structure)))
        self.mark = structure.mark
        self.text = ""
        self.has_ended = False
        inner = library.matcher(compiled)
        self._matcher: TokenMatcher = inner
        mark_id = library.special_token_ids.get(self.mark)
        if mark_id is not None:
            self._matcher = MarkMatcher(inner, mark_id, self.mark, text_index=library.index)

    def restart(self) -> None:
        """Return to the start of the turn."""
        self._matcher.reset()
        self.text = ""
        self.has_ended = False

    def allowed(self) -> list[int]:
        masks = np.zeros((1, self._library.num_mask_words), dtype=np.int32)
        self._matcher.write_mask(masks, 0)
        bits = np.unpackbits(masks[0].view(np.uint8), count=len(TEXTS), bitorder="little")
        found: list[int] = np.flatnonzero(bits).tolist()
        return found

    def write(self, tokens: Sequence[str]) -> None:
        """Write tokens, each of which must be allowed."""
        for token in tokens:
            assert TEXTS.index(token) in self.allowed(), (self.text, token)
            assert self._matcher.accept_token(TEXTS.index(token))
            self.text += token

    def write_randomly(self, seed: int) -> None:
        """Write until the end, or for a while."""
        generator = random.Random(seed)
        for _ in range(500):
            chosen = generator.choice(self.allowed())
            if chosen == EOS:
                self.has_ended = True
                return
            self.write([TEXTS[chosen]])


def use_of(
    tool_format: ToolCallFormat, tools: Iterable[Tool], *, is_parallel: bool = True
) -> ToolUse:
    return ToolUse([*tools], ToolChoice(is_parallel=is_parallel), tool_format=tool_format)


def read(use: ToolUse, text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the content of a turn, and the name and arguments of each call."""
    reader = use.reader()
    deltas: list[TurnDelta] = [*map(reader.read_piece, text), reader.flush()]
    calls: dict[int, list[str]] = {}
    for call in (one for delta in deltas for one in delta.calls):
        begun = calls.setdefault(call.index, [call.name or "", ""])
        begun[1] += call.arguments
    return "".join(delta.content for delta in deltas), [(a, b) for a, b in calls.values()]


@pytest.mark.parametrize("is_parallel", [False, True])
@pytest.mark.parametrize("tool_format", sorted(STRICT_FORMATS))
def test_calls_behind_a_text_are_valid(
    library: XGrammarLibrary, tool_format: ToolCallFormat, is_parallel: bool
) -> None:
    use = use_of(tool_format, [*STRICT, LOOSE], is_parallel=is_parallel)
    writer = Writer(library, use)
    names, most_calls = set(), 0
    for seed in range(40):
        writer.restart()
        writer.write("a {<[ ")
        writer.write(list(writer.mark))
        writer.write_randomly(seed)
        if not writer.has_ended:
            continue
        content, calls = read(use, writer.text)
        assert content == "a {<["
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS.get(name, {"type": "object"}))
        names |= {name for name, _ in calls}
        most_calls = max(most_calls, len(calls))
    assert names == {"look", "look.again", "loose"}
    assert most_calls > 1 if is_parallel else most_calls == 1


def test_text_may_end_without_a_call(library: XGrammarLibrary) -> None:
    writer = Writer(library, use_of("hermes", STRICT))
    writer.write([*"{ <tool_cal", "</tool_call>", *"l>"])
    assert EOS in writer.allowed()


def test_token_that_completes_the_mark_must_begin_a_call(library: XGrammarLibrary) -> None:
    writer = Writer(library, use_of("hermes", STRICT))
    writer.write([*"<tool_cal", "l>{"])
    assert [TEXTS[one] for one in writer.allowed()] == ["\n", " ", '"']


def test_special_token_marks_calls_behind_a_text(library: XGrammarLibrary) -> None:
    for text in ("", "ab [TOOL_"):
        writer = Writer(library, use_of("mistral", STRICT))
        writer.write([*text, MISTRAL])
        assert EOS not in writer.allowed()
        writer.write('[{"name": "look.again", "arguments": {}}]')
        assert writer.allowed() == [EOS]


def test_special_token_cannot_be_written_in_a_call(library: XGrammarLibrary) -> None:
    writer = Writer(library, use_of("mistral", [LOOSE, STRICT[0]]))
    writer.write([*MISTRAL, *'[{"name": "loose", "arguments": {"'])
    assert TEXTS.index("T") in writer.allowed()
    assert TEXTS.index(MISTRAL) not in writer.allowed()


def test_error_names_the_strict_tool() -> None:
    strict = Tool(name="strict", parameters=UNSUPPORTED, is_strict=True)
    structure = finish(use_of("hermes", [LOOSE, strict]).structure(None, None))
    assert structure is not None
    with pytest.raises(InvalidRequestError, match="strict tool 'strict', which has an unsupported"):
        grammar_text(structure)


def test_tools_that_are_not_strict_are_called_freely() -> None:
    assert finish(use_of("hermes", [LOOSE]).structure(None, None)) is None
