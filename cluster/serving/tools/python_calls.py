"""Reader of tool calls written as a list of Python calls, by some models of Llama and Gemma."""

from __future__ import annotations

import ast
import json
import re
from typing import Literal

from cluster.serving.tools.turn_reader import TurnReader

__all__ = ["PYTHON_MARKS", "PythonReader"]

PYTHON_MARKS = ("<|python_tag|>", "<|python_start|>")
_LIST_BEGIN = re.compile(r"\[\s*([\w.\-]*)\s*(\()?")
_CALL = re.compile(r"\s*([\w.\-]+)\s*\(")
_MAX_BEGIN_LENGTH = 128
"""Characters up to the first call's arguments."""
_MAX_CALL_LENGTH = 2**14
"""Characters of a call; to parse longer ones would hold the event loop."""
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


class PythonReader(TurnReader):
    """`[name(key=value, ...), ...]` alone; a call is returned once it is complete."""

    _where: Literal["start", "calls", "content"] = "start"
    _num_scanned = 0
    """Characters of the call at the beginning of the buffer that were looked at."""
    _depth = 0
    _quote = ""
    _is_escaped = False

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content":
                self._write(self._take(len(self._buffer)))
                return False
            case "start":
                return self._step_start(is_end=is_end)
            case "calls":
                return self._step_call(is_end=is_end)

    def _step_start(self, *, is_end: bool) -> bool:
        begun = self._buffer.lstrip()
        for mark in PYTHON_MARKS:
            if begun.startswith(mark):
                self._buffer = begun[len(mark) :]
                return True
        found = _LIST_BEGIN.match(begun)
        is_short = found is not None and found.end() <= _MAX_BEGIN_LENGTH
        if found is not None and is_short and found[2] and found[1] in self._tools:
            self._buffer = begun[1:]
            self._where = "calls"
            return True
        is_mark = any(mark.startswith(begun) for mark in PYTHON_MARKS)
        is_list = found is not None and found.end() == len(begun) < _MAX_BEGIN_LENGTH
        if not is_end and (is_mark or is_list):
            return False
        self._where = "content"
        return bool(self._buffer)

    def _step_call(self, *, is_end: bool) -> bool:
        if not self._num_scanned:
            self._buffer = self._buffer.lstrip(" \t\r\n,")
            if self._buffer.startswith("]"):
                self._take(1)
                self._where = "content"
                return bool(self._buffer)
        length = self._scan()
        if length is None:
            if not is_end and len(self._buffer) <= _MAX_CALL_LENGTH:
                return False
            self._write_rest("")
            return bool(self._buffer)
        text = self._take(length)
        self._num_scanned = 0
        read = _read_call(text) if len(text) <= _MAX_CALL_LENGTH else None
        if read is None or read[0] not in self._tools:
            self._write_rest(text)
        else:
            self._begin_call(read[0])
            self._write_arguments(read[1])
        return True

    def _write_rest(self, text: str) -> None:
        """Return a text that is not a call, and all that follows, to the content."""
        bracket = "" if self.num_calls else "["
        self._buffer = bracket + text + self._buffer
        self._where = "content"

    def _scan(self) -> int | None:
        """Return the length of the call at the beginning of the buffer once it is complete."""
        for position in range(self._num_scanned, len(self._buffer)):
            character = self._buffer[position]
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            else:
                step = _BRACKETS.get(character, 0)
                self._depth += step
                if step < 0 and self._depth <= 0:
                    self._depth = 0
                    return position + 1
        self._num_scanned = len(self._buffer)
        return None


def _read_call(text: str) -> tuple[str, str] | None:
    """Return the name and the arguments as JSON; None if the text is not a call with literals."""
    found = _CALL.match(text)
    if found is None:
        return None
    try:
        # A name with a dash is not a name of Python.
        call = ast.parse(f"f({text[found.end() :]}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {keyword.arg or "": _value_of(keyword.value) for keyword in call.keywords}
        if "" in arguments:
            return None
        return found[1], json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None


def _value_of(node: ast.expr) -> object:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List):
        return [_value_of(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key)): _value_of(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)


_JSON_NAMES = {"true": True, "false": False, "null": None}
"""Constants of JSON, which models mix up with those of Python."""
