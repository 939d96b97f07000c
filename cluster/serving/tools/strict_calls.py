"""The structure of a turn in which tools may be called, some of which are strict.

A call is written as the model was trained to. Text is free up to the mark of the first call, or, in
formats in which a turn consists of calls or text, unless it begins as calls do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import asdict

from cluster.serving.tools.forced_calls import checked_schemas
from cluster.serving.tools.json_calls import (
    DEEPSEEK_BEGIN,
    DEEPSEEK_CALL_BEGIN,
    DEEPSEEK_CALL_END,
    DEEPSEEK_END,
    DEEPSEEK_SEPARATOR,
    GEMMA_BEGIN,
    GEMMA_END,
    HERMES_BEGIN,
    HERMES_END,
    LLAMA_BEGIN,
    MISTRAL_BEGIN,
)
from cluster.serving.tools.tool_calls import LFM2_BEGIN, LFM2_END, PYTHON_MARKS
from cluster.structured.grammar.call_arguments import (
    CallsStructure,
    CallText,
    LeadingCallsStructure,
    Notation,
)
from cluster.structured.grammar.turn import Texts
from pagedray.sampling_params import Structure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.serving.tools.tool import Tool
    from cluster.serving.tools.tool_calls import ToolCallFormat

__all__ = ["strict_structure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """The text around the arguments of calls; `{name}` stands for the tool."""

    mark: str
    opening: Texts = ()
    begin: Texts
    end: Texts
    separator: Texts
    closing: Texts = ()
    notation: Notation = "json"
    beginnings: tuple[Texts, ...] = ()
    """How a turn that consists of calls may begin; empty if text may precede calls."""


_JSON_BEGIN = ("{{", '"name":', '"{name}",', '"arguments":', "")
_NUM_LETTERS = 3
"""Letters of a name that make a list one of calls; each of them is a state of the grammar."""

_LFM2 = _Form(
    mark=LFM2_BEGIN,
    opening=("[", ""),
    begin=("{name}(", ""),
    end=("", ")"),
    separator=("", ",", ""),
    closing=("", f"]{LFM2_END}"),
    notation="python",
)


def _python_form(mark: str) -> _Form:
    return replace(
        _LFM2,
        mark=mark,
        closing=("", "]"),
        beginnings=(*((one,) for one in PYTHON_MARKS), ("[", "{name}")),
    )


_DEEPSEEK = _Form(
    mark=DEEPSEEK_BEGIN,
    begin=(f"{DEEPSEEK_CALL_BEGIN}{{name}}{DEEPSEEK_SEPARATOR}", ""),
    end=("", DEEPSEEK_CALL_END),
    separator=("", ""),
    closing=("", DEEPSEEK_END),
)
_QWEN = _Form(
    mark=HERMES_BEGIN,
    opening=("", ""),
    begin=("<function={name}>", ""),
    end=("</function>", "", HERMES_END),
    separator=("", HERMES_BEGIN, ""),
    notation="parameters",
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
    # In JSON, which the model also writes, and the reader reads.
    "gemma4": _Form(
        mark=GEMMA_BEGIN, begin=("call:{name}",), end=(GEMMA_END,), separator=(GEMMA_BEGIN,)
    ),
    "hermes": _Form(
        mark=HERMES_BEGIN,
        opening=("", ""),
        begin=_JSON_BEGIN,
        end=("", "}", HERMES_END),
        separator=("", HERMES_BEGIN, ""),
    ),
    "glm45": _Form(
        mark=HERMES_BEGIN,
        opening=("", ""),
        begin=("{name}", ""),
        end=(HERMES_END,),
        separator=("", HERMES_BEGIN, ""),
        notation="arg_keys",
    ),
    "lfm2": _LFM2,
    "llama3_json": _Form(
        mark=LLAMA_BEGIN,
        begin=("{{", '"name":', '"{name}",', '"parameters":', ""),
        end=("", "}"),
        separator=("", ";", ""),
        beginnings=((LLAMA_BEGIN,), ("{{",)),
    ),
    "llama4_pythonic": _python_form(PYTHON_MARKS[1]),
    "mistral": _Form(
        mark=MISTRAL_BEGIN,
        opening=("", "[", ""),
        begin=_JSON_BEGIN,
        end=("", "}"),
        separator=(",", ""),
        closing=("", "]"),
    ),
    "pythonic": _python_form(PYTHON_MARKS[0]),
    "qwen3_coder": _QWEN,
    "qwen3_xml": _QWEN,
}
"""All formats but `openai`, in which calls are messages."""


def strict_structure(
    tools: Sequence[Tool], tool_format: ToolCallFormat, *, is_parallel: bool
) -> Structure:
    """Return the structure of free text and calls of these tools, which are part of its text.

    Raises InvalidRequestError.
    """
    form = _FORMS[tool_format]
    calls: list[CallText] = []
    for tool, _, schema in checked_schemas(tools):
        begin = tuple(text.format(name=tool.name) for text in form.begin)
        calls.append(CallText(tool.name, begin, schema, form.end))
    given = CallsStructure(
        mark=form.mark,
        opening=form.opening,
        calls=tuple(calls),
        separator=form.separator,
        closing=form.closing,
        is_parallel=is_parallel,
        notation=form.notation,
    )
    if form.beginnings:
        names = sorted({tool.name[:_NUM_LETTERS] for tool in tools})
        beginnings = {
            tuple(text.format(name=name) for text in one)
            for one in form.beginnings
            for name in names
        }
        leading = LeadingCallsStructure(**asdict(given), beginnings=tuple(sorted(beginnings)))
        return Structure(kind="leading_calls", text=_encoded(leading), mark=form.mark)
    return Structure(kind="calls", text=_encoded(given), mark=form.mark)


def _encoded(given: CallsStructure) -> str:
    return msgspec.json.encode(given).decode()
