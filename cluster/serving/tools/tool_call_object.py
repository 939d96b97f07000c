"""An incremental parser of a tool call that the model writes as a JSON object."""

from __future__ import annotations

import json
from enum import Enum, auto

__all__ = ["ToolCallObject"]

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_MAX_HEAD_LENGTH = 4096
"""The most characters of an object before its name."""


class _Where(Enum):
    START = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE_START = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class ToolCallObject:
    """Reads `{"name": ..., "arguments": {...}}`, with keys in any order.

    The arguments are passed on as written; inside their brackets they are not validated.
    """

    def __init__(self) -> None:
        self.raw = ""
        """The text read so far."""
        self.name: str | None = None
        """The tool, once its name has been read."""
        self.is_done = False
        self.is_broken = False
        """Whether the text is not such an object; then no more is read."""
        self._where = _Where.START
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._token = ""
        self._key = ""
        self._arguments = ""
        self._has_arguments = False

    def read_object(self, text: str) -> int:
        """Read text and return how many of its characters belong to the object."""
        length = self._length_of(text)
        self.raw += text[:length]
        if self.name is None and len(self.raw) > _MAX_HEAD_LENGTH:
            self.is_broken = True
        return length

    def take_arguments(self) -> str:
        """Return the new text of the arguments; `{}` at the end of a call without arguments."""
        if self.is_done and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        taken, self._arguments = self._arguments, ""
        return taken

    def _length_of(self, text: str) -> int:
        for position, character in enumerate(text):
            self._step(character)
            if self.is_broken:
                return position
            if self.is_done:
                return position + 1
        return len(text)

    def _step(self, character: str) -> None:
        if self._is_in_string:
            self._step_string(character)
            return
        if self._where is _Where.VALUE:
            self._step_value(character)
            return
        if character in _SPACE:
            return
        match self._where, character:
            case _Where.START, "{":
                self._where = _Where.KEY_OR_END
            case ((_Where.KEY_OR_END | _Where.KEY), '"'):
                self._begin_string(character)
            case ((_Where.KEY_OR_END | _Where.COMMA_OR_END), "}"):
                self._end()
            case _Where.COMMA_OR_END, ",":
                self._where = _Where.KEY
            case _Where.COLON, ":":
                self._where = _Where.VALUE_START
            case _Where.VALUE_START, _ if character not in "]},:":
                self._where = _Where.VALUE
                self._token = ""
                self._step_value(character)
            case _:
                self.is_broken = True

    def _begin_string(self, character: str) -> None:
        self._is_in_string = True
        self._is_escaped = False
        if self._where is not _Where.VALUE:
            self._token = ""
        self._take(character)

    def _step_string(self, character: str) -> None:
        self._take(character)
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False
            if self._where is not _Where.VALUE:
                self._key = self._loaded_text()
                self._where = _Where.COLON
            elif self._depth == 0:
                self._end_value()

    def _step_value(self, character: str) -> None:
        if self._depth == 0 and self._token and (character in _SPACE or character in ",}"):
            self._end_value()
            self._step(character)
        elif character == '"':
            self._begin_string(character)
        else:
            self._take(character)
            if character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._end_value()
                elif self._depth < 0:
                    self.is_broken = True

    def _take(self, character: str) -> None:
        if self._where is _Where.VALUE and self._key in _ARGUMENTS:
            # Arguments that are a JSON string can only be decoded at its end.
            if not self._token:
                self._token = character
            elif self._token[0] == '"':
                self._token += character
            if self._token[0] != '"':
                self._has_arguments = True
                self._arguments += character
        else:
            self._token += character

    def _end_value(self) -> None:
        self._where = _Where.COMMA_OR_END
        if self._key == "name":
            name = self._loaded_text()
            # The call of the first name may have begun.
            self.name = name if self.name is None else self.name
        elif self._key in _ARGUMENTS and self._token.startswith('"'):
            self._has_arguments = True
            self._arguments += self._loaded_text()
        self._token = ""

    def _end(self) -> None:
        if self.name is None:
            self.is_broken = True
        else:
            self.is_done = True

    def _loaded_text(self) -> str:
        try:
            loaded = json.loads(self._token, strict=False)
        except ValueError:
            loaded = None
        if isinstance(loaded, str):
            return loaded
        self.is_broken = True
        return ""
