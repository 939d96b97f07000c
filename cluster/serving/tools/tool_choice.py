"""How a request uses its tools: their part of the prompt, the forced structure, and the reader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from cluster.serving.tools.channel_reader import ChannelReader
from cluster.serving.tools.forced_calls import (
    call_structure,
    list_structure,
    message_structure,
    turn_structure,
)
from cluster.serving.tools.json_calls import ChoiceReader, ListReader, NamedReader
from cluster.serving.tools.strict_calls import strict_structure
from cluster.serving.tools.tool import MAX_TOOLS, Tool
from cluster.serving.tools.tool_calls import call_form, turn_reader
from pagedray.errors import InvalidRequestError, invalid_field
from pagedray.sampling_params import Structure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cluster.serving.tools.tool_calls import ToolCallFormat
    from cluster.serving.tools.turn_reader import TurnReader
    from cluster.structured.grammar.turn import CallForm

__all__ = ["ToolChoice", "ToolUse", "check_allowed", "check_tools", "read_each_tool"]

_PARAM = "tools"
_ANY_OBJECT = {"type": "object"}
_FREE_TEXT = Structure(kind="structural_tag", text='{"format":{"type":"any_text"}}')


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether and which tools may or must be called."""

    kind: Literal["none", "auto", "required", "named"] = "auto"
    name: str = ""
    """The tool, if the kind is `named`."""
    is_parallel: bool = True
    """Whether a turn may contain several calls."""
    allowed: tuple[Tool, ...] | None = None
    """The tools that the choice is restricted to, each by its name or as a whole; None are all."""


class ToolUse:
    """The tools of one request with its tool choice."""

    def __init__(
        self, tools: Sequence[Tool], choice: ToolChoice, *, tool_format: ToolCallFormat | None
    ) -> None:
        """The limits of each tool have been checked. Raises InvalidRequestError."""
        check_tools(tools)
        if choice.allowed is not None:
            tools = _only_allowed(tools, choice.allowed)
        self._tools = tuple(tools) if choice.kind != "none" else ()
        self._choice = choice
        self._tool_format = tool_format
        self._form: CallForm | None = None
        """How calls are written if a grammar lets the model choose between them and an answer."""
        self._names = tuple(tool.name for tool in self._tools)
        self.sets_structure = self.is_forced
        """Whether the structure comes from the tools alone, once it was read."""
        if choice.kind == "named":
            self._check_named()
        elif choice.kind == "required":
            self._check_any()
        elif self._tools and tool_format is None:
            raise InvalidRequestError(
                "The model's chat template has no known format of tool calls; name the function to "
                "call, or start the server with --tool-call-format.",
                param=_PARAM,
            )

    @property
    def for_template(self) -> tuple[Mapping[str, object], ...]:
        """The tools in the form that chat templates expect."""
        return tuple(tool.for_template() for tool in self._tools)

    @property
    def is_forced(self) -> bool:
        """Whether the turn must consist of tool calls."""
        return self._choice.kind in ("named", "required")

    @property
    def is_read(self) -> bool:
        """Whether the turn's text is parsed for tool calls."""
        return bool(self._tools)

    @property
    def ends_as_text(self) -> bool:
        """Whether a turn with calls has the finish reason `stop`, as OpenAI has for named tools."""
        return self._choice.kind == "named"

    def structure(self, answer: Structure | None, param: str | None) -> Structure | None:
        """Return the structure of a turn with a structured answer, if any, which `param` requests.

        A forced call is not an answer. Raises InvalidRequestError.
        """
        is_parallel = self._choice.is_parallel
        if self._writes_messages and (self.is_forced or (answer is not None and self._tools)):
            if answer is not None and not self.is_forced:
                _check_joined(answer, param)
            forced = None if self.is_forced else answer
            return message_structure(self._callable(), forced)
        if self._choice.kind == "named":
            (tool,) = self._callable()
            return call_structure(tool)
        if self._choice.kind == "required":
            return list_structure(self._tools, is_parallel=is_parallel)
        if answer is None and any(tool.is_strict for tool in self._tools):
            self.sets_structure = True
            return self._strict_structure()
        if answer is None or not self._tools:
            return answer
        _check_joined(answer, param)
        assert self._tool_format is not None
        form = self._form = call_form(self._tool_format)
        return turn_structure(self._tools, form, answer, is_parallel=is_parallel)

    def reader(self) -> TurnReader:
        """Return a reader of one turn."""
        assert self.is_read
        has_short_ids = self._tool_format == "mistral"
        is_parallel = self._choice.is_parallel
        schemas = {tool.name: tool.schema() for tool in self._tools}
        if self._choice.kind == "named":
            named = {self._choice.name: schemas[self._choice.name]}
            return NamedReader(named, is_parallel=False, has_short_ids=has_short_ids)
        if self._choice.kind == "required":
            return ListReader(schemas, is_parallel=is_parallel, has_short_ids=has_short_ids)
        assert self._tool_format is not None
        if self._form is not None:
            return ChoiceReader(
                schemas, mark=self._form.mark, is_parallel=is_parallel, has_short_ids=has_short_ids
            )
        reader = turn_reader(self._tool_format, schemas, is_parallel=is_parallel)
        reader.has_grammar = any(tool.is_strict for tool in self._tools)
        return reader

    def channel_reader(self, *, is_open: bool) -> ChannelReader:
        """Return a reader of one turn in channels; `is_open` is true if it begins in reasoning."""
        if self.is_read and self._writes_messages:
            schemas = {tool.name: tool.schema() for tool in self._callable()}
            return ChannelReader(schemas, is_parallel=self._choice.is_parallel, is_open=is_open)
        return ChannelReader({}, answer=self.reader() if self.is_read else None, is_open=is_open)

    def _strict_structure(self) -> Structure:
        """Return the structure of text and calls in which calls of strict tools are valid."""
        tools = [
            tool if tool.is_strict else replace(tool, parameters=_ANY_OBJECT)
            for tool in self._tools
        ]
        if self._writes_messages:
            return message_structure(tools, _FREE_TEXT)
        assert self._tool_format is not None
        is_parallel = self._choice.is_parallel
        return strict_structure(tools, self._tool_format, is_parallel=is_parallel)

    @property
    def _writes_messages(self) -> bool:
        """Whether calls are messages in channels."""
        return self._tool_format == "openai"

    def _callable(self) -> tuple[Tool, ...]:
        """Return the tools that may be called."""
        if self._choice.kind != "named":
            return self._tools
        return tuple(one for one in self._tools if one.name == self._choice.name)

    def _check_named(self) -> None:
        if self._choice.name not in self._names:
            raise invalid_field(
                "tool_choice", f"names {self._choice.name[:64]!r}, which is not in tools."
            )

    def _check_any(self) -> None:
        if not self._tools:
            raise InvalidRequestError("tool_choice requires tools.", param=_PARAM)


def _only_allowed(tools: Sequence[Tool], allowed: Sequence[Tool]) -> list[Tool]:
    """Return the allowed tools. Raises InvalidRequestError if a name in `allowed` is no tool."""
    by_name = {tool.name: tool for tool in tools}
    for one in allowed:
        if one.name not in by_name:
            raise invalid_field("tool_choice", f"names {one.name[:64]!r}, which is not in tools.")
        if one not in (by_name[one.name], Tool(name=one.name)):
            raise invalid_field("tool_choice", f"and tools define {one.name[:64]!r} differently.")
    names = {one.name for one in allowed}
    return [tool for tool in tools if tool.name in names]


def _check_joined(answer: Structure, param: str | None) -> None:
    if answer.kind == "grammar":
        raise invalid_field(
            param or "structure",
            "cannot be combined with tools: use a JSON schema, a regular expression or choices.",
        )


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise InvalidRequestError for too many tools, or for two with the same name."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools may have at most {MAX_TOOLS} entries, not {len(tools)}.", param=_PARAM
        )
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequestError("tools must have unique names.", param=_PARAM)


def check_allowed(given: object, param: str) -> None:
    """Raise InvalidRequestError if a list of allowed tools has no entry, or too many."""
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_TOOLS:
        raise invalid_field(param, f"must be a list of 1 to {MAX_TOOLS} tools.")


def read_each_tool(
    given: object, param: str, read_tool: Callable[[object, str], Tool]
) -> list[Tool]:
    """Return the tools of a parameter; `read_tool` reads a tool, given its place in the body.

    Raises InvalidRequestError.
    """
    tools: list[Tool] = []
    if given is None:
        return tools
    if not isinstance(given, list):
        raise invalid_field(param, "must be a list.")
    for index, one in enumerate(given):
        tools.append(read_tool(one, f"{param}.{index}"))
    return tools
