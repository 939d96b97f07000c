"""Common part of the bodies of the Responses API: a conversation, tools and a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from cluster.serving.json_body import Body, BodyPart, described, json_text, named_schema, read_part
from cluster.serving.openai.bodies.chat_body import MAX_MESSAGES
from cluster.serving.openai.bodies.messages import read_choice_of
from cluster.serving.openai.bodies.sampling_fields import (
    RequestedStructure,
    template_variables_field,
)
from cluster.serving.responses.items import ITEMS, FunctionTools, read_items
from cluster.serving.text.template_arguments import (
    ChatMessage,
    ChatPrompt,
    Effort,
    TemplateArguments,
)
from cluster.serving.tools.tool import MAX_TOOLS
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse, check_allowed
from cluster.structured.grammar.grammar_text import MAX_TEXT_BYTES
from pagedray.errors import invalid_field

if TYPE_CHECKING:
    from cluster.serving.tools.tool_calls import ToolCallFormat

__all__ = ["InputBody", "Reasoning", "TextConfig", "TextFormat"]


class NamedTool(BodyPart):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(BodyPart):
    """Restricts a call to some of its tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Any  # Any: read separately, which keeps nulls in schemas


class Reasoning(BodyPart):
    """Sets `reasoning_effort` of the chat template."""

    context: Literal["auto"] | None = described(
        "The chat template decides which reasoning it reads."
    )
    effort: Effort | None = None
    mode: Literal["standard"] | None = None
    summary: Any = described("Ignored; thoughts are not summarized.")
    generate_summary: Any = described("Ignored; thoughts are not summarized.")


class TextFormat(BodyPart):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema")  # Any: a JSON schema
    strict: bool | None = None


class TextConfig(BodyPart):
    """How the text is written."""

    format: Any = described(  # Any: nulls in the schema are values
        "`text`, `json_object`, or `json_schema` with a name and a schema.", type="object"
    )
    verbosity: Any = described("Ignored; it only applies to models of OpenAI.")


class InputBody(Body):
    """The fields of all bodies: the conversation, its tools and the format of the answer."""

    rejected: ClassVar[Mapping[str, str]] = {
        "conversation": "use previous_response_id, or send the earlier items as input",
        "truncation": "shorten the input instead",
    }
    synonyms: ClassVar[Mapping[str, str]] = {
        "enable_thinking": "chat_template_kwargs.enable_thinking",
        "messages": "input",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "system": "instructions",
    }
    max_entries: ClassVar[Mapping[str, int]] = {"input": MAX_MESSAGES, "tools": MAX_TOOLS}
    with_nulls: ClassVar[frozenset[str]] = frozenset(("reasoning",))

    input: Any = described(  # Any: read where it is used
        "A text, or a list of messages, function calls, their outputs and reasoning items.",
        ...,
        anyOf=[
            {"type": "string"},
            {
                "type": "array",
                "items": {"anyOf": [named_schema(part.__name__) for part in ITEMS.values()]},
                "minItems": 1,
                "maxItems": MAX_MESSAGES,
            },
        ],
    )
    instructions: str | None = described("A system message before the input.")
    previous_response_id: str | None = described(
        "The stored response whose conversation the input continues."
    )
    tools: Any = described(  # Any: read separately, which keeps nulls in schemas
        "Functions that the model may call.",
        type="array",
        items={"anyOf": [named_schema("FunctionTool"), named_schema("NamespaceTool")]},
        maxItems=MAX_TOOLS,
    )
    tool_choice: Any = described(  # Any: a string or an object
        "Whether the model must call a function, may call one (`auto`), or must not call any "
        "(`none`).",
        anyOf=[{"enum": ["none", "auto", "required"]}, {"type": "object"}],
    )
    parallel_tool_calls: bool = described(
        "Whether a response may contain more than one function call.", True
    )
    reasoning: Reasoning | None = described(
        "`effort` sets `reasoning_effort` and `enable_thinking` of the chat template."
    )
    chat_template_kwargs: Any = template_variables_field()
    text: Any = described(  # Any: as its format
        "`format` is a constraint on the text of the response.", **named_schema("TextConfig")
    )

    def tool_use(self, functions: FunctionTools, tool_format: ToolCallFormat | None) -> ToolUse:
        """Return how the call uses tools, and add them to `functions`.

        Raises InvalidRequestError.
        """
        functions.read(self.tools)
        tools = functions.tools
        choice = self._choice(has_tools=bool(tools))
        return ToolUse(tools, choice, tool_format=tool_format)

    def prompt(
        self,
        tools: ToolUse,
        *,
        known_variables: frozenset[str],
        note_ignored: Callable[[str], None],
        earlier: tuple[ChatMessage, ...] = (),
    ) -> ChatPrompt:
        """Return the conversation, after the `earlier` messages. Raises InvalidRequestError."""
        messages = (*earlier, *(read_items(self.input)))
        if self.instructions:
            messages = (ChatMessage("system", self.instructions), *messages)
        effort = None if self.reasoning is None else self.reasoning.effort
        given = TemplateArguments(
            self.chat_template_kwargs, effort, effort_param="reasoning.effort"
        )
        variables = given.variables(known_variables, note_ignored)
        return ChatPrompt(messages, tools.for_template, variables=variables)

    def requested_structure(self) -> RequestedStructure:
        """Return the requested structure of the text. Raises InvalidRequestError."""
        requested = RequestedStructure()
        if self.text is None:
            return requested
        if not isinstance(self.text, dict):
            raise invalid_field("text", "must be an object.")
        given, param = self.text.get("format"), "text.format"
        kept = {name: one for name, one in self.text.items() if name != "format"}
        read_part(TextConfig, kept, "text")
        if given is None:
            return requested
        schema = given.get("schema") if isinstance(given, dict) else None
        read = read_part(
            TextFormat, {**given, "schema": {}} if schema is not None else given, param
        )
        if read.type == "json_object":
            requested.add_structure("json_object", "", param)
        elif read.type == "json_schema":
            if not isinstance(schema, dict):
                raise invalid_field(f"{param}.schema", "must be a JSON Schema.")
            text = json_text(schema, f"{param}.schema", most_bytes=MAX_TEXT_BYTES)
            requested.add_structure("json_schema", text, param)
        return requested

    def _choice(self, *, has_tools: bool) -> ToolChoice:
        return read_choice_of(
            self.tool_choice,
            is_parallel=self.parallel_tool_calls,
            has_tools=has_tools,
            read_name=lambda named: read_part(NamedTool, named, "tool_choice").name,
            read_allowed=_allowed_choice,
        )


def _allowed_choice(given: dict[str, object], is_parallel: bool) -> ToolChoice:
    """Return the choice among some of the tools. Raises InvalidRequestError."""
    param = "tool_choice.tools"
    read = read_part(AllowedFunctions, given, "tool_choice")
    check_allowed(read.tools, param)
    functions = FunctionTools()
    functions.read(read.tools, param)
    return ToolChoice(kind=read.mode, is_parallel=is_parallel, allowed=tuple(functions.tools))
