"""Reader of tool calls written as a list of Python calls, by some models of Llama and Gemma."""

from __future__ import annotations

import re
from typing import Literal

from cluster.serving.tools.object_text import ObjectText
from cluster.serving.tools.turn_reader import TurnReader

__all__ = ["PYTHON_MARKS", "PythonReader"]

PYTHON_MARKS = ("<|python_tag|>", "<|python_start|>")
_END_MARK = "<|python_end|>"
_LIST_BEGIN = re.compile(r"\[\s*([\w.\-]*)\s*(\()?")
_CALL = re.compile(r"\s*([\w.\-]*)\s*(\()?")
_MAX_BEGIN_LENGTH = 128
"""Characters up to the first call's arguments."""


class PythonReader(TurnReader):
    """`[name(key=value, ...), ...]` alone; a call is returned once it is complete."""

    _where: Literal["start", "calls", "arguments", "content"] = "start"
    _name = ""
    _text = ""
    """The text of the call that is being read."""
    _arguments = ObjectText()

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content":
                self._write(self._take(len(self._buffer)))
                return False
            case "start":
                return self._step_start(is_end=is_end)
            case "calls":
                return self._step_name(is_end=is_end)
            case "arguments":
                return self._step_arguments(is_end=is_end)

    def _step_start(self, *, is_end: bool) -> bool:
        begun = self._buffer.lstrip()
        marks = (*PYTHON_MARKS, _END_MARK) if self.num_calls else PYTHON_MARKS
        for mark in marks:
            if begun.startswith(mark):
                self._buffer = begun[len(mark) :]
                return True
        found = _LIST_BEGIN.match(begun)
        is_short = found is not None and found.end() <= _MAX_BEGIN_LENGTH
        if found is not None and is_short and found[2] and found[1] in self._tools:
            self._head = "[" if not self.num_calls else ""
            self._buffer = begun[1:]
            self._where = "calls"
            return True
        is_mark = any(mark.startswith(begun) for mark in marks)
        is_list = found is not None and found.end() == len(begun) < _MAX_BEGIN_LENGTH
        if not is_end and (is_mark or is_list):
            return False
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
