"""Reader of tool calls as DeepSeek's models write them."""

from __future__ import annotations

import re
from typing import Literal

from cluster.serving.tools.turn_reader import ArgumentsReader

__all__ = [
    "DEEPSEEK_BEGIN",
    "DEEPSEEK_CALL_BEGIN",
    "DEEPSEEK_CALL_END",
    "DEEPSEEK_END",
    "DEEPSEEK_SEPARATOR",
    "DeepSeekReader",
]

DEEPSEEK_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
DEEPSEEK_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
DEEPSEEK_CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
DEEPSEEK_CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
DEEPSEEK_SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
_MARKS = (DEEPSEEK_CALL_BEGIN, DEEPSEEK_CALL_END, DEEPSEEK_END, DEEPSEEK_BEGIN)
_MAX_HEAD_LENGTH = 256
_FENCE = "```"
_HEAD_END = re.compile("|".join(map(re.escape, ("{", *_MARKS))))
_FUNCTION_NAME = re.compile(r"\s*([^\s`{]+)")
_FENCE_BEGIN = re.compile(r"\s*(?:```(?:json)?)?")


class DeepSeekReader(ArgumentsReader):
    """Content, then marked calls: `function`, a separator and the name, then JSON in a fence (V3).

    Since V3.1 it is the name, the separator and JSON.
    """

    _marks = _MARKS
    _where: Literal["content", "between", "head", "arguments", "behind"] = "content"

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content" | "between":
                marks = _MARKS if self._where == "between" else (_MARKS[0], _MARKS[-1])
                found = self._write_until(*marks, is_end=is_end)
                if found == DEEPSEEK_END:
                    self._where = "content"
                elif found:
                    self._where = "head" if found == DEEPSEEK_CALL_BEGIN else "between"
                    self._head += "" if found == DEEPSEEK_CALL_END else found
                return bool(found)
            case "head":
                return self._step_head(is_end=is_end)
            case "arguments":
                if self._step_arguments(is_end=is_end):
                    self._where = "behind"
                    return True
                return False
            case "behind":
                begun = self._buffer.lstrip()
                if not is_end and _FENCE.startswith(begun):
                    return False
                self._buffer = begun.removeprefix(_FENCE)
                self._where = "between"
                return True

    def _write(self, content: str) -> None:
        if self._head:
            # A mark of calls precedes the content.
            self._head += content
            if not content.strip():
                return
            content, self._head = self._head, ""
        super()._write(content)

    def _step_head(self, *, is_end: bool) -> bool:
        found = _HEAD_END.search(self._buffer, 0, _MAX_HEAD_LENGTH)
        if found is None and not is_end and len(self._buffer) < _MAX_HEAD_LENGTH:
            return False
        is_known = found is not None or (is_end and not self._is_cut_off)
        head = self._buffer if found is None else self._buffer[: found.start()]
        first, separator, second = head.partition(DEEPSEEK_SEPARATOR)
        name, length = first.strip(), len(first) + len(separator)
        function = _FUNCTION_NAME.match(second)
        if name == "function" and function is not None:
            name, length = function[1], length + function.end()
        if not is_known or name not in self._tools:
            self._write_head()
            self._where = "content"
            return bool(self._buffer)
        fence = _FENCE_BEGIN.match(self._buffer, length)
        assert fence is not None
        self._take(fence.end())
        self._begin_call(name)
        self._where = "arguments"
        return True
