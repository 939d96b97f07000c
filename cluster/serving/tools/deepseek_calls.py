"""Reader of tool calls as DeepSeek's models write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from cluster.serving.text.marks import overlap
from cluster.serving.tools.object_end import ObjectEnd
from cluster.serving.tools.turn_reader import TurnReader

if TYPE_CHECKING:
    from cluster.serving.tools.turn_reader import ToolSchemas

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
_MAX_HEAD_LENGTH = 256


class DeepSeekReader(TurnReader):
    """Content, then marked calls: `function`, a separator and the name, then JSON in a fence (V3).

    Since V3.1 it is the name, the separator and JSON.
    """

    _where: Literal["content", "between", "head", "arguments"] = "content"

    def __init__(self, tools: ToolSchemas, *, is_parallel: bool, has_short_ids: bool) -> None:
        super().__init__(tools, is_parallel=is_parallel, has_short_ids=has_short_ids)
        self._object = ObjectEnd()

    def _step(self, *, is_end: bool) -> bool:
        match self._where:
            case "content":
                if not self._write_until(DEEPSEEK_BEGIN, is_end=is_end):
                    return False
                self._where = "between"
                return True
            case "between":
                return self._step_between()
            case "head":
                return self._step_head(is_end=is_end)
            case "arguments":
                self._write_arguments(self._take(self._object.read_object(self._buffer)))
                if not self._object.is_closed:
                    return False
                self._where = "between"
                return True

    def _step_between(self) -> bool:
        found = [
            (place, mark)
            for mark in (DEEPSEEK_CALL_BEGIN, DEEPSEEK_END)
            if (place := self._buffer.find(mark)) >= 0
        ]
        if found:
            place, mark = min(found)
            self._take(place + len(mark))
            self._where = "head" if mark == DEEPSEEK_CALL_BEGIN else "content"
            return True
        num_held = max(overlap(self._buffer, mark) for mark in (DEEPSEEK_CALL_BEGIN, DEEPSEEK_END))
        self._take(len(self._buffer) - num_held)
        return False

    def _step_head(self, *, is_end: bool) -> bool:
        length = self._buffer.find("{", 0, _MAX_HEAD_LENGTH)
        if length < 0 and not is_end and len(self._buffer) < _MAX_HEAD_LENGTH:
            return False
        head = self._buffer[:length] if length >= 0 else ""
        first, _, second = head.partition(DEEPSEEK_SEPARATOR)
        name = first.strip()
        if name == "function" and second.strip():
            name = second.split("\n")[0].strip()
        if name not in self._tools:
            self._write(DEEPSEEK_BEGIN + DEEPSEEK_CALL_BEGIN)
            self._where = "content"
            return True
        self._take(length)
        self._begin_call(name)
        self._object = ObjectEnd()
        self._where = "arguments"
        return True
