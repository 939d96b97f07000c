"""The tools of a request, each of them a function that the model may call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.serving.json_body import json_text
from cluster.structured.grammar.schema_keywords import STANDALONE
from pagedray.errors import invalid_field
from pagedray.text import quote

__all__ = ["MAX_ID_LENGTH", "MAX_TOOLS", "NAME_PATTERN", "Tool", "check_id"]

MAX_TOOLS = 1024
_MAX_NAME_LENGTH = 128
"""This limit is Anthropic's; OpenAI's is 64."""
NAME_PATTERN = f"^[A-Za-z0-9_.-]{{1,{_MAX_NAME_LENGTH}}}$"
_MAX_BYTES = 2**16
"""Bytes of a tool's description and parameters as JSON."""
_NAME = re.compile(NAME_PATTERN)
_OBJECT = "object"

MAX_ID_LENGTH = 128
"""Characters of an id or a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, object] | None = None
    """The JSON schema of its arguments; None for no arguments."""
    is_strict: bool = field(default=False, compare=False)
    """Whether arguments must follow the schema even if the model need not call a tool."""
    extra: Mapping[str, object] | None = field(default=None, compare=False)
    """Further fields that the chat template may read."""

    def check_limits(self, param: str, *, schema_param: str) -> None:
        """Raise InvalidRequestError for an invalid name or schema, or a tool that is too large."""
        if _NAME.fullmatch(self.name) is None:
            raise invalid_field(
                f"{param}.name",
                f"must be 1 to {_MAX_NAME_LENGTH} letters, digits, underscores, dashes or dots.",
            )
        kind = None if self.parameters is None else self.parameters.get("type")
        if isinstance(kind, str | list) and not _allows_objects(kind):
            raise invalid_field(f"{schema_param}.type", f"must be object, not {quote(kind)}.")
        json_text(self.for_template(), param, most_bytes=_MAX_BYTES)

    def for_template(self) -> dict[str, object]:
        """Return the tool in the form that chat templates expect."""
        function: dict[str, object] = {"name": self.name, "description": self.description or ""}
        function["parameters"] = _NO_ARGUMENTS if self.parameters is None else self.parameters
        function.update(self.extra or {})
        return {"type": "function", "function": function}

    def schema(self) -> Mapping[str, object]:
        """Return the JSON schema of its arguments, which are an object if it names no type."""
        given = _NO_ARGUMENTS if self.parameters is None else self.parameters
        kind = given.get("type")
        if isinstance(kind, list) or (kind is None and STANDALONE.isdisjoint(given)):
            return {**given, "type": _OBJECT}
        return given


_NO_ARGUMENTS: Mapping[str, object] = {"type": _OBJECT, "properties": {}}


def _allows_objects(kind: str | list[object]) -> bool:
    return kind == _OBJECT if isinstance(kind, str) else _OBJECT in kind


def check_id(text: str, param: str) -> None:
    """Raise InvalidRequestError if a text is too long for an id or name, or empty."""
    if not 0 < len(text) <= MAX_ID_LENGTH:
        raise invalid_field(param, f"must have 1 to {MAX_ID_LENGTH} characters.")
