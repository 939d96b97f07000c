"""Writes random texts that the masks of a turn with tools allow, and reads turns."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.token_matchers import MarkMatcher, ReasoningMatcher, Vocabulary
from cluster.structured.xgrammar_library import XGrammarLibrary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.serving.tools.tool import Tool
    from cluster.serving.tools.tool_calls import ToolCallFormat
    from cluster.serving.tools.turn_reader import TurnDelta
    from cluster.structured.token_matchers import TextMatcher, TokenMatcher
    from pagedray.request import Reasoning

EOS = 0
MISTRAL = "[TOOL_CALLS]"
LLAMA = "<|python_tag|>"
TEXTS = (
    *("", MISTRAL, LLAMA, "</s>", "<tool_call>", "</tool_call>", "l>{", "\n", "\uff5c", "\u2581"),
    *("</parameter>", "</arg_value>"),
    *map(chr, range(32, 127)),
)
NUM_SPECIAL = 4
_ENDS = ("</parameter>", "</arg_value>", '"', "'", "")


def made_library() -> XGrammarLibrary:
    """Return xgrammar with these tokens."""
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

    def __init__(
        self, library: XGrammarLibrary, use: ToolUse, reasoning: Reasoning | None = None
    ) -> None:
        structure = use.structure(None, None)
        assert structure is not None
        self._library = library
        compiled, _ = library.compile_grammar(grammar_text(structure))
        self.mark = structure.mark
        self.text = ""
        self.has_ended = False
        inner: TextMatcher = library.matcher(compiled)
        mark_id = library.special_token_ids.get(self.mark)
        if mark_id is not None:
            index = library.index if structure.kind == "calls" else None
            inner = MarkMatcher(inner, mark_id, self.mark, text_index=index)
        self._matcher: TokenMatcher = inner
        if reasoning is not None:
            self._matcher = ReasoningMatcher(inner, reasoning, library.index, eos_token_ids=(EOS,))

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
            allowed = self.allowed()
            ends = [one for one in allowed if TEXTS[one] in _ENDS]
            chosen = generator.choice(ends if ends and generator.random() < 0.1 else allowed)
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
    return read_pieces(use, text)


def read_pieces(use: ToolUse, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """As `read`, for a text in pieces."""
    reader = use.reader()
    deltas: list[TurnDelta] = [*map(reader.read_piece, pieces), reader.flush()]
    calls: dict[int, list[str]] = {}
    for call in (one for delta in deltas for one in delta.calls):
        begun = calls.setdefault(call.index, [call.name or "", ""])
        begun[1] += call.arguments
    return "".join(delta.content for delta in deltas), [(a, b) for a, b in calls.values()]
