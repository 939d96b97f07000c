"""The bodies of POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field

from cluster.serving.anthropic.blocks import (
    AnthropicMessage,
    read_anthropic_messages,
    read_system_prompt,
)
from cluster.serving.anthropic.system_messages import (
    has_later_system_messages,
    merge_system_messages,
)
from cluster.serving.anthropic.turns import combine_turns
from cluster.serving.http.schema import Body, BodyPart, Defaults, named_schema, read_part
from cluster.serving.inputs import GenerationInput, TokenizeInput
from cluster.serving.json_bodies.json_text import json_text
from cluster.serving.openai.bodies.chat_body import MAX_MESSAGES
from cluster.serving.openai.bodies.field_kinds import bounds
from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt
from cluster.serving.text.templates.template_arguments import Effort, TemplateArguments
from cluster.serving.tools.tool import MAX_TOOLS, Tool
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse, read_each_tool
from cluster.structured.grammar.grammar_text import MAX_TEXT_BYTES
from pagedray.errors import InvalidRequestError
from pagedray.request import MAX_STOP, MAX_STOP_LENGTH, Structure

if TYPE_CHECKING:
    from cluster.serving.intake.steps import Steps
    from cluster.serving.tools.tool_calls import ToolCallFormat

__all__ = ["AnthropicTool", "CountBody", "MessagesBody", "OutputConfig", "OutputFormat"]

_NO_TOOLS_OF_ANTHROPIC = "tools run by Anthropic are not available"


class AnthropicTool(BodyPart):
    """A function that the model may call."""

    name: str = Field(json_schema_extra={"pattern": "^[A-Za-z0-9_.-]{1,64}$"})
    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: Any = Field(json_schema_extra={"type": "object"})  # Any: a JSON schema
    cache_control: Any = Field(None, description="Ignored; prefixes are always cached.")
    defer_loading: Literal[False] = False
    eager_input_streaming: bool | None = Field(
        None, description="Ignored; arguments are streamed as they are generated."
    )
    allowed_callers: list[Literal["direct"]] | None = None
    strict: bool | None = Field(
        None, description="Whether calls that are not forced follow the schema, too."
    )


class AnthropicToolChoice(BodyPart):
    """Whether and which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BodyPart):
    """Sets `enable_thinking` of the chat template; ignored if the template does not read it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, description="Ignored.")
    display: str | None = Field(None, description="Ignored.")


class OutputFormat(BodyPart):
    """The schema that the text follows."""

    type: Literal["json_schema"]
    schema_: Any = Field(alias="schema", json_schema_extra={"type": "object"})  # Any: as above


class OutputConfig(BodyPart):
    """The effort and the format of the output."""

    effort: Effort | None = None
    format: Any = Field(None, json_schema_extra=named_schema("OutputFormat"))  # Any: keeps nulls


class ConversationBody(Body):
    """The fields of both bodies: the conversation, its tools and the format of the answer."""

    defaults: ClassVar[Defaults] = {
        "context_management": (
            {},
            {"edits": []},
            # All thoughts are kept.
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "mcp_servers": ([],),
    }
    ignored: ClassVar[Mapping[str, str]] = {
        "cache_control": "prefixes are always cached",
        "speed": "there is only one speed",
        "user_profile_id": "an identifier of the end user",
        "workspace_id": "an identifier of the end user",
    }
    max_entries: ClassVar[Mapping[str, int]] = {"messages": MAX_MESSAGES, "tools": MAX_TOOLS}
    rejected: ClassVar[Mapping[str, str]] = {
        "container": _NO_TOOLS_OF_ANTHROPIC,
        "context_management": "shorten the messages instead",
        "mcp_servers": _NO_TOOLS_OF_ANTHROPIC,
        "thread": "messages are not stored; send the whole conversation",
    }
    synonyms: ClassVar[Mapping[str, str]] = {
        "input": "messages",
        "instructions": "system",
        "output_format": "output_config.format",
        "prompt": "messages",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
    }
    with_nulls: ClassVar[frozenset[str]] = frozenset(("thinking", "tool_choice"))

    model: str = Field(description="The name of the model, which `/v1/models` lists.")
    messages: Annotated[list[AnthropicMessage], FailFast()] = Field(
        description="The messages of the conversation; the response continues a last message of "
        "the assistant.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_MESSAGES},
    )
    system: Any = Field(  # Any: read where it is used
        None,
        description="A system message before the other messages.",
        json_schema_extra={
            "anyOf": [{"type": "string"}, {"type": "array", "items": named_schema("TextBlock")}]
        },
    )
    tools: Any = Field(  # Any: read separately, which keeps nulls in schemas
        None,
        description="Functions that the model may call.",
        json_schema_extra={
            "type": "array",
            "items": named_schema("AnthropicTool"),
            "maxItems": MAX_TOOLS,
        },
    )
    tool_choice: AnthropicToolChoice | None = Field(
        None,
        description="Whether the model must call a function (`any` or `tool`), may call one "
        "(`auto`), or must not call any (`none`).",
    )
    thinking: Thinking | None = Field(
        None, description="Sets `enable_thinking` of the chat template."
    )
    output_config: Any = Field(  # Any: read where it is used
        None,
        description="`effort` sets `reasoning_effort` of the chat template, and `format` is a "
        "constraint on the text of the response.",
        json_schema_extra=named_schema("OutputConfig"),
    )

    def tool_use(self, tool_format: ToolCallFormat | None) -> Steps[ToolUse]:
        """Return how the call uses tools. Raises InvalidRequestError."""
        tools = yield from read_each_tool(self.tools, "tools", _tool_of)
        return ToolUse(tools, self._choice(has_tools=bool(tools)), tool_format=tool_format)

    def prompt(
        self,
        tools: ToolUse,
        *,
        known_variables: frozenset[str],
        keeps_system_messages: Callable[[], bool],
        note_ignored: Callable[[str], None],
    ) -> Steps[ChatPrompt]:
        """Return the conversation. Raises InvalidRequestError."""
        messages = yield from read_anthropic_messages(self.messages)
        system = yield from read_system_prompt(self.system)
        if system:
            messages = (ChatMessage("system", system), *messages)
        if has_later_system_messages(messages) and not keeps_system_messages():
            messages = merge_system_messages(messages)
        messages = combine_turns(messages)
        # As with Anthropic, the answer continues a last message of the assistant.
        is_open = bool(self.messages) and self.messages[-1].role == "assistant"
        if is_open and messages[-1].tool_calls:
            where = f"messages.{len(self.messages) - 1}"
            raise InvalidRequestError(
                f"{where} ends with a tool call, whose result must follow.", param=where
            )
        effort = None if self.output_config is None else self._output_config().effort
        given = TemplateArguments(None, effort, effort_param="output_config.effort")
        arguments = given.variables(known_variables, note_ignored)
        if self.thinking is not None and self.thinking.type != "adaptive":
            if "enable_thinking" in known_variables:
                arguments["enable_thinking"] = self.thinking.type == "enabled"
            else:
                note_ignored("thinking")
        return ChatPrompt(messages, tools.for_template, not is_open, is_open, arguments)

    def _output_config(self) -> OutputConfig:
        if not isinstance(self.output_config, dict):
            raise InvalidRequestError("output_config must be an object.", param="output_config")
        # Nulls in the schema are values.
        kept = {name: one for name, one in self.output_config.items() if name != "format"}
        read = read_part(OutputConfig, kept, "output_config")
        return read.model_copy(update={"format": self.output_config.get("format")})

    def _choice(self, *, has_tools: bool) -> ToolChoice:
        given = self.tool_choice
        if given is None:
            return ToolChoice(kind="auto" if has_tools else "none")
        is_parallel = not given.disable_parallel_tool_use
        if given.type == "tool":
            if given.name is None:
                raise InvalidRequestError("tool_choice.name is required.", param="tool_choice.name")
            return ToolChoice(kind="named", name=given.name, is_parallel=is_parallel)
        if given.type == "any":
            return ToolChoice(kind="required", is_parallel=is_parallel)
        return ToolChoice(kind=given.type, is_parallel=is_parallel)


class MessagesBody(ConversationBody):
    """A conversation for the model to continue."""

    ignored: ClassVar[Mapping[str, str]] = {
        **ConversationBody.ignored,
        "diagnostics": "diagnostics are not available",
        "inference_geo": "requests are always processed where the server runs",
        "metadata": "an identifier of the end user",
        "service_tier": "there is only one service tier",
    }
    synonyms: ClassVar[Mapping[str, str]] = {
        **ConversationBody.synonyms,
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "stop": "stop_sequences",
    }

    max_tokens: int = Field(
        description="Maximum number of tokens to generate.", json_schema_extra={"minimum": 1}
    )
    stop_sequences: Any = Field(  # Any: checked by the validator
        None,
        description="Strings that end the output.",
        json_schema_extra={
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
            "maxItems": MAX_STOP,
        },
    )
    temperature: float | None = bounds("Sampling temperature; 0 is greedy.", 0, 100)
    top_p: float | None = bounds(
        "Cumulative probability of the most likely tokens to sample from.", 0, 1
    )
    top_k: int | None = bounds(
        "Number of most likely tokens to sample from; 0 or -1 samples from all.", -1
    )
    stream: bool = Field(
        False, description="Whether the response is a stream of server-sent events."
    )

    def to_input(
        self,
        client_id: str | None,
        tools: ToolUse,
        *,
        known_variables: frozenset[str],
        keeps_system_messages: Callable[[], bool],
        note_ignored: Callable[[str], None],
    ) -> Steps[GenerationInput]:
        """Return the input of the call. Raises InvalidRequestError."""
        prompt = yield from self.prompt(
            tools,
            known_variables=known_variables,
            keeps_system_messages=keeps_system_messages,
            note_ignored=note_ignored,
        )
        sampling: dict[str, object] = {"max_tokens": self.max_tokens}
        for name in ("temperature", "top_p", "top_k"):
            if getattr(self, name) is not None:
                sampling[name] = getattr(self, name)
        if self.stop_sequences is not None:
            is_list = isinstance(self.stop_sequences, list)
            sampling["stop"] = tuple(self.stop_sequences) if is_list else self.stop_sequences
        structure = yield from tools.structure(self._structure(), "output_config.format")
        if structure is not None:
            sampling["structure"] = structure
        return GenerationInput(
            prompts=(prompt,),
            sampling=sampling,
            model=self.model,
            client_id=client_id,
            # Some models mark a call with special tokens.
            skips_special_tokens=not tools.is_read,
        )

    def _structure(self) -> Structure | None:
        given = None if self.output_config is None else self._output_config().format
        if given is None:
            return None
        param = "output_config.format"
        schema = given.get("schema") if isinstance(given, dict) else None
        read_part(OutputFormat, {**given, "schema": {}} if schema is not None else given, param)
        if not isinstance(schema, dict):
            raise InvalidRequestError(
                f"{param}.schema must be a JSON Schema.", param=f"{param}.schema"
            )
        text = json_text(schema, f"{param}.schema", most_bytes=MAX_TEXT_BYTES)
        return Structure(kind="json_schema", text=text)


class CountBody(ConversationBody):
    """A conversation whose tokens are counted."""

    def to_input(
        self,
        tools: ToolUse,
        *,
        known_variables: frozenset[str],
        keeps_system_messages: Callable[[], bool],
        note_ignored: Callable[[str], None],
    ) -> Steps[TokenizeInput]:
        """Return the input of the call. Raises InvalidRequestError."""
        prompt = yield from self.prompt(
            tools,
            known_variables=known_variables,
            keeps_system_messages=keeps_system_messages,
            note_ignored=note_ignored,
        )
        return TokenizeInput(prompt=prompt, model=self.model)


def _tool_of(given: object, where: str) -> Tool:
    if isinstance(given, dict) and given.get("type") not in (None, "custom"):
        raise InvalidRequestError(
            f"{where}.type must be custom: {_NO_TOOLS_OF_ANTHROPIC}.", param=f"{where}.type"
        )
    schema = given.get("input_schema") if isinstance(given, dict) else None
    # Nulls in the schema are values.
    kept = {**given, "input_schema": {}} if isinstance(given, dict) and schema else given
    read = read_part(AnthropicTool, kept, where)
    if not isinstance(schema, dict):
        param = f"{where}.input_schema"
        raise InvalidRequestError(f"{param} must be a JSON Schema object.", param=param)
    tool = Tool(
        name=read.name,
        description=read.description,
        parameters=schema,
        is_strict=bool(read.strict),
    )
    tool.check_limits(where, schema_param=f"{where}.input_schema")
    return tool
