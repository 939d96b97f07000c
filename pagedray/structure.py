"""The constraint on the generated text of a request."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Structure", "StructureKind"]

StructureKind = Literal[
    "json_object",
    "json_schema",
    "regex",
    "grammar",
    "choice",
    "structural_tag",
    "turn",
    "calls",
    "leading_calls",
    "messages",
]


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the generated text.

    `text` is validated when it is compiled.
    """

    kind: StructureKind
    text: str = ""
    """A JSON schema, a regular expression, an EBNF grammar, a structural tag in JSON, or choices as
    a JSON list of strings; empty for `json_object`. For `turn`, `calls`, `leading_calls` and
    `messages`, a `TurnStructure`, `CallsStructure`, `LeadingCallsStructure` or `MessagesStructure`
    in JSON.
    """
    mark: str = ""
    """The beginning of a `turn` with tool calls, and of the `calls` after a text, which may be a
    special token; `leading_calls` may begin with it.
    """
    headers: tuple[tuple[str, str], ...] = ()
    """For a message that must be a tool call, in models whose turns are messages in channels: the
    allowed headers, each with the beginning of the text that it stands for.
    """
