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
    a JSON list of strings; empty for `json_object`. For `turn`, tool calls or an answer, what
    `TurnStructure` describes; for `calls`, what `CallsStructure` describes; for
    `leading_calls`, what `LeadingCallsStructure` describes; for `messages`, what
    `MessagesStructure` describes."""
    mark: str = ""
    """What a `turn` with tool calls begins with, and the `calls` after a text, which may be a
    special token; `leading_calls` may begin with it."""
    headers: tuple[tuple[str, str], ...] = ()
    """For a message that must be a tool call, in models whose turns are messages in channels: the
    headers it may have, each with the beginning of the text for which it stands."""
