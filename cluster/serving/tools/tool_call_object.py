"""An incremental parser of a tool call that the model writes as an object."""

from __future__ import annotations

import json

from cluster.serving.tools.object_text import MAX_DEPTH, ObjectText

__all__ = ["ToolCallObject"]

_ARGUMENTS = ("arguments", "parameters")
_MAX_HEAD_LENGTH = 4096
"""The most characters of an object before its name, without its arguments."""


class ToolCallObject(ObjectText):
    """Reads `{"name": ..., "arguments": {...}}`, with keys in any order.

    Arguments may also be a string that contains the object. Arguments of another type are left out.
    """

    def __init__(self, *, marks: tuple[str, ...] = ()) -> None:
        super().__init__(marks=marks)
        self.raw = ""
        """The text read so far."""
        self.name: str | None = None
        """The tool, once its name has been read."""
        self._key = ""
        self._value = ""
        self._is_argument = False
        """Whether the value that is open is the object of the arguments."""
        self._arguments = ""
        self._has_arguments = False

    @property
    def is_broken(self) -> bool:
        """Whether the text is not such an object; then no more is read."""
        num_others = 0 if self._is_argument else len(self.raw) - len(self._arguments)
        return self.name is None and (self.is_closed or num_others > _MAX_HEAD_LENGTH)

    def read_object(self, text: str, *, is_end: bool = False) -> int:
        length = super().read_object(text, is_end=is_end)
        self.raw += text[:length]
        return length

    def take_arguments(self) -> str:
        """Return the new text of the arguments; `{}` at the end of a call without arguments."""
        if self.is_closed and not self._has_arguments:
            self._has_arguments = True
            return "{}"
        taken, self._arguments = self._arguments, ""
        return taken

    def _write(self, text: str) -> None:
        if len(self._open) > MAX_DEPTH:
            return
        if self._is_argument:
            self._arguments += text
        elif len(self._open) == 1 and self._where == "key":
            self._key += text
        elif self._open:
            self._value += text
            if self._value == "{" and not self._has_arguments:
                self._is_argument = self._has_arguments = json.loads(self._key) in _ARGUMENTS
                self._arguments = self._value if self._is_argument else ""

    def _write_between(self, text: str) -> None:
        if len(self._open) > 1:
            self._write(text)

    def _end_value(self) -> None:
        super()._end_value()
        if len(self._open) != 1:
            return
        if self._value and not self._is_argument:
            self._read_member(json.loads(self._key))
        self._key = self._value = ""
        self._is_argument = False

    def _read_member(self, key: str) -> None:
        value = json.loads(self._value) if self._value[0] == '"' else None
        if not isinstance(value, str):
            # A name of another type is none.
            self.is_closed = self.is_closed or (key == "name" and self.name is None)
        elif key == "name" and self.name is None:
            # The call of the first name may have begun.
            self.name = value
        elif key in _ARGUMENTS and not self._has_arguments and value.lstrip()[:1] == "{":
            inner = ObjectText()
            inner.read_object(value, is_end=True)
            inner.close()
            self._has_arguments = True
            self._arguments += inner.take_text()

    def _damage(self) -> None:
        super()._damage()
        # Other text may begin with a bracket, too.
        self.is_closed = self.is_closed or (self.name is None and not self._is_argument)

    def _skip(self) -> int:
        if self.name is not None and len(self._open) == 1:
            # The rest is no part of the call.
            self.close()
            return 0
        return super()._skip()
