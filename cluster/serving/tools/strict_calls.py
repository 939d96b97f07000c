"""The structure of a turn in which tools may be called, some of which are strict.

A call is written as the model was trained to; its text is free up to the mark of the first one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from cluster.serving.json_bodies.json_text import json_text
from cluster.serving.tools.deepseek_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL_BEGIN,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
)
from cluster.serving.tools.forced_calls import check_length
from cluster.serving.tools.json_calls import HERMES_BEGIN, HERMES_END, MISTRAL_BEGIN
from cluster.structured.grammar.calls import CallsStructure, CallText, Texts
from cluster.structured.grammar.grammar_text import MAX_TEXT_BYTES
from pagedray.request import Structure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.serving.intake.steps import Steps
    from cluster.serving.tools.tool import Tool
    from cluster.serving.tools.tool_calls import ToolCallFormat

__all__ = ["STRICT_FORMATS", "strict_structure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a model writes around the arguments of calls; `{name}` stands for the tool."""

    mark: str
    opening: Texts = ()
    begin: Texts
    end: Texts
    separator: Texts
    closing: Texts = ()


_JSON_BEGIN = ("{{", '"name":', '"{name}",', '"arguments":', "")
_DEEPSEEK = _Form(
    mark=DEEPSEEK_BEGIN,
    begin=(f"{DEEPSEEK_CALL_BEGIN}{{name}}{DEEPSEEK_SEPARATOR}", ""),
    end=("", DEEPSEEK_CALL_END),
    separator=("", ""),
    closing=("", DEEPSEEK_END),
)
_FORMS: Mapping[ToolCallFormat, _Form] = {
    "deepseek_v3": _Form(
        mark=DEEPSEEK_BEGIN,
        begin=(f"{DEEPSEEK_CALL_BEGIN}function{DEEPSEEK_SEPARATOR}{{name}}\n```json\n",),
        end=(f"\n```{DEEPSEEK_CALL_END}",),
        separator=("", ""),
        closing=("", DEEPSEEK_END),
    ),
    "deepseek_v31": _DEEPSEEK,
    "hermes": _Form(
        mark=HERMES_BEGIN,
        opening=("", ""),
        begin=_JSON_BEGIN,
        end=("", "}", HERMES_END),
        separator=("", HERMES_BEGIN, ""),
    ),
    "mistral": _Form(
        mark=MISTRAL_BEGIN,
        opening=("", "[", ""),
        begin=_JSON_BEGIN,
        end=("", "}"),
        separator=(",", ""),
        closing=("", "]"),
    ),
}
STRICT_FORMATS = frozenset(_FORMS)
"""The formats whose calls a grammar can constrain after free text."""


def strict_structure(
    tools: Sequence[Tool], param: str, tool_format: ToolCallFormat, *, is_parallel: bool
) -> Steps[Structure]:
    """Return the structure of free text and calls of these tools, in one of STRICT_FORMATS.

    Raises InvalidRequestError that names `param`.
    """
    form = _FORMS[tool_format]
    calls: list[CallText] = []
    num_characters = 0
    for tool in tools:
        yield
        schema = json_text(tool.schema(), param, most_bytes=MAX_TEXT_BYTES)
        num_characters += len(schema)
        check_length(num_characters, param)
        begin = tuple(text.format(name=tool.name) for text in form.begin)
        calls.append(CallText(tool.name, begin, schema, form.end))
    given = CallsStructure(
        mark=form.mark,
        opening=form.opening,
        calls=tuple(calls),
        separator=form.separator,
        closing=form.closing,
        is_parallel=is_parallel,
    )
    return Structure(kind="calls", text=msgspec.json.encode(given).decode(), mark=form.mark)
