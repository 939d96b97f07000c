"""The formats in which models write tool calls, by the names of vLLM's parsers.

The format depends on the chat template; each reader knows a format. This module knows no protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cluster.serving.tools.channel_reader import CHANNEL_MARK, ChannelReader
from cluster.serving.tools.json_calls import (
    DEEPSEEK_BEGIN,
    HERMES_BEGIN,
    LLAMA_BEGIN,
    MISTRAL_BEGIN,
    DeepSeekReader,
    HermesReader,
    LlamaReader,
    MistralReader,
)
from cluster.serving.tools.python_calls import PythonReader
from cluster.serving.tools.xml_calls import GlmReader, QwenCoderReader
from cluster.structured.grammar.turn import CallForm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.serving.tools.turn_reader import ToolSchemas, TurnReader

__all__ = ["TOOL_CALL_FORMATS", "ToolCallFormat", "call_form", "detect_format", "turn_reader"]

ToolCallFormat = Literal[
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "hermes",
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
    "glm45": GlmReader,
    "hermes": HermesReader,
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
    ("mistral", (MISTRAL_BEGIN,)),
    ("deepseek_v3", (DEEPSEEK_BEGIN,)),
    ("qwen3_coder", (HERMES_BEGIN, "<function=")),
    ("glm45", (HERMES_BEGIN, "<arg_key>")),
    ("hermes", (HERMES_BEGIN,)),
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
