"""The formats in which models write tool calls, by the names of vLLM's parsers.

The format depends on the chat template; each reader knows a format. This module knows no protocol.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar, Literal

from cluster.serving.tools.channel_reader import CHANNEL_MARK, ChannelReader
from cluster.serving.tools.json_calls import (
    DEEPSEEK_BEGIN,
    GEMMA_BEGIN,
    GEMMA_END,
    HERMES_BEGIN,
    LLAMA_BEGIN,
    MISTRAL_BEGIN,
    DeepSeekReader,
    GemmaReader,
    HermesReader,
    LlamaReader,
    MistralReader,
)
from cluster.serving.tools.object_text import ObjectText
from cluster.serving.tools.turn_reader import TurnReader
from cluster.serving.tools.xml_calls import GlmReader, QwenCoderReader
from cluster.structured.grammar.turn import CallForm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.serving.tools.turn_reader import ToolSchemas

__all__ = [
    "LFM2_BEGIN",
    "LFM2_END",
    "PYTHON_MARKS",
    "TOOL_CALL_FORMATS",
    "ToolCallFormat",
    "call_form",
    "detect_format",
    "turn_reader",
]

PYTHON_MARKS = ("<|python_tag|>", "<|python_start|>")
LFM2_BEGIN = "<|tool_call_start|>"
LFM2_END = "<|tool_call_end|>"
_LIST_BEGIN = re.compile(r"\[\s*([\w.\-]*)\s*(\()?")
_CALL = re.compile(r"\s*([\w.\-]*)\s*(\()?")
_MAX_BEGIN_LENGTH = 128
"""Characters up to the first call's arguments."""


class PythonReader(TurnReader):
    """`[name(key=value, ...), ...]` alone; a call is returned once it is complete."""

    _marks: ClassVar[tuple[str, ...]] = PYTHON_MARKS
    """The marks before a list."""
    _end_mark: ClassVar[str] = "<|python_end|>"
    _where: Literal["start", "calls", "arguments", "content"] = "start"
    _name = ""
    _text = ""
    """The text of the call that is being read."""
    _arguments = ObjectText()

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content":
                return self._step_content(is_end=is_end)
            case "start":
                return self._step_start(is_end=is_end)
            case "calls":
                return self._step_name(is_end=is_end)
            case "arguments":
                return self._step_arguments(is_end=is_end)

    def _step_content(self, *, is_end: bool) -> bool:
        """Read content; no calls follow it."""
        self._write(self._take(len(self._buffer)))
        return False

    def _step_start(self, *, is_end: bool) -> bool:
        begun = self._buffer.lstrip()
        marks = (*self._marks, self._end_mark) if self.num_calls else self._marks
        for mark in marks:
            if begun.startswith(mark):
                self._buffer = begun[len(mark) :]
                return True
        found = _LIST_BEGIN.match(begun)
        is_short = found is not None and found.end() <= _MAX_BEGIN_LENGTH
        if found is not None and is_short and found[2] and found[1] in self._tools:
            self._head += "[" if not self.num_calls else ""
            self._buffer = begun[1:]
            self._where = "calls"
            return True
        is_mark = any(mark.startswith(begun) for mark in marks)
        is_list = found is not None and found.end() == len(begun) < _MAX_BEGIN_LENGTH
        if not is_end and (is_mark or is_list):
            return False
        self._write_head()
        self._where = "content"
        return bool(self._buffer)

    def _step_name(self, *, is_end: bool) -> bool:
        self._buffer = self._buffer.lstrip(" \t\r\n,")
        if self._buffer.startswith("]"):
            self._take(1)
            self._where = "start"
            return True
        found = _CALL.match(self._buffer)
        assert found is not None
        if found[2] and found[1] in self._tools:
            self._name = found[1]
            self._text = self._take(found.end())
            self._arguments = ObjectText(is_python=True)
            self._where = "arguments"
            return True
        if not is_end and found.end() == len(self._buffer) < _MAX_BEGIN_LENGTH and not found[2]:
            return False
        self._write_head()
        self._where = "content"
        return bool(self._buffer)

    def _step_arguments(self, *, is_end: bool) -> bool:
        found = self._arguments
        is_last = is_end and not self._is_cut_off
        self._text += self._take(found.read_object(self._buffer, is_end=is_last))
        if is_last and not (found.is_closed or found.is_in_string):
            found.close()
        if found.is_closed and not found.is_damaged:
            self._begin_call(self._name)
            self._write_arguments(found.take_text())
            self._where = "calls"
            return True
        if found.is_damaged or is_end:
            # Not a call with literals.
            self._buffer = self._text + self._buffer
            self._write_head()
            self._where = "content"
            return bool(self._buffer)
        return False


class Lfm2Reader(PythonReader):
    """Content, and any number of lists as of `PythonReader` between two marks."""

    _marks = (LFM2_BEGIN,)
    _end_mark = LFM2_END
    _where: Literal["start", "calls", "arguments", "content"] = "content"

    def _step_content(self, *, is_end: bool) -> bool:
        found = self._write_until(LFM2_BEGIN, is_end=is_end)
        if found:
            self._head, self._where = found, "start"
        return bool(found)


ToolCallFormat = Literal[
    "deepseek_v3",
    "deepseek_v31",
    "gemma4",
    "glm45",
    "hermes",
    "lfm2",
    "llama3_json",
    "llama4_pythonic",
    "mistral",
    "openai",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
]
_READERS: Mapping[ToolCallFormat, type[TurnReader]] = {
    "deepseek_v3": DeepSeekReader,
    "deepseek_v31": DeepSeekReader,
    "gemma4": GemmaReader,
    "glm45": GlmReader,
    "hermes": HermesReader,
    "lfm2": Lfm2Reader,
    "llama3_json": LlamaReader,
    "llama4_pythonic": PythonReader,
    "mistral": MistralReader,
    "openai": ChannelReader,
    "pythonic": PythonReader,
    "qwen3_coder": QwenCoderReader,
    "qwen3_xml": QwenCoderReader,
}
TOOL_CALL_FORMATS: tuple[ToolCallFormat, ...] = tuple(sorted(_READERS))
_SHOWN_BY: tuple[tuple[ToolCallFormat, tuple[str, ...]], ...] = (
    ("openai", (f"{CHANNEL_MARK}commentary",)),
    ("gemma4", (GEMMA_BEGIN,)),
    ("mistral", (MISTRAL_BEGIN,)),
    ("deepseek_v3", (DEEPSEEK_BEGIN,)),
    ("qwen3_coder", (HERMES_BEGIN, "<function=")),
    ("glm45", (HERMES_BEGIN, "<arg_key>")),
    ("hermes", (HERMES_BEGIN,)),
    ("lfm2", (LFM2_BEGIN,)),
    ("lfm2", ("List of tools: ", "<|im_start|>")),
    ("pythonic", ("[func_name1(",)),
    ("llama3_json", (LLAMA_BEGIN,)),
    ("llama3_json", ('"parameters": dictionary',)),
)
"""The texts in a template that show a format, all of them; the first row that matches counts."""
_TAGGED = CallForm(
    mark=HERMES_BEGIN,
    opening="\n",
    separator="\n</tool_call>\n<tool_call>\n",
    closing="\n</tool_call>",
)
_FORMS: Mapping[ToolCallFormat, CallForm] = {
    "deepseek_v3": CallForm(mark=DEEPSEEK_BEGIN, opening="[", separator=", ", closing="]"),
    "deepseek_v31": CallForm(mark=DEEPSEEK_BEGIN, opening="[", separator=", ", closing="]"),
    "gemma4": CallForm(mark=GEMMA_BEGIN, separator=f"{GEMMA_END}{GEMMA_BEGIN}", closing=GEMMA_END),
    "lfm2": CallForm(mark=LFM2_BEGIN, opening="[", separator=", ", closing=f"]{LFM2_END}"),
    "llama3_json": CallForm(mark=LLAMA_BEGIN, separator="; ", arguments="parameters"),
    "mistral": CallForm(mark=MISTRAL_BEGIN, opening="[", separator=", ", closing="]"),
}
"""How calls are written where a grammar lets the model choose between them and an answer, by the
formats that have a mark of their own for it. They are JSON in every format."""


def call_form(tool_format: ToolCallFormat) -> CallForm:
    """Return how calls are written if the answer may instead follow a structure."""
    return _FORMS.get(tool_format, _TAGGED)


def detect_format(template: str) -> ToolCallFormat | None:
    """Return the format of a chat template's tool calls; None if it is unknown."""
    if "tools" not in template:
        return None
    return next(
        (name for name, texts in _SHOWN_BY if all(text in template for text in texts)), None
    )


def turn_reader(
    tool_format: ToolCallFormat, tools: ToolSchemas, *, is_parallel: bool
) -> TurnReader:
    """Return the reader of a turn in which the model may call tools.

    Unless `is_parallel`, all calls but the first are dropped.
    """
    return _READERS[tool_format](
        tools, is_parallel=is_parallel, has_short_ids=tool_format == "mistral"
    )
