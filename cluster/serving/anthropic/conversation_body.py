"""The fields that the bodies of Anthropic's endpoints have in common."""

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
from cluster.serving.anthropic.tool_fields import (
    NO_TOOLS_OF_ANTHROPIC,
    AnthropicToolChoice,
    read_anthropic_choice,
    read_anthropic_tool,
)
from cluster.serving.anthropic.turns import combine_turns
from cluster.serving.openai.bodies.chat_body import MAX_MESSAGES
from cluster.serving.openai.bodies.field_kinds import bounds, template_variables_field
from cluster.serving.schema.body import Body, BodyPart, Defaults, named_schema
from cluster.serving.schema.body_reader import read_part
from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt
from cluster.serving.text.templates.template_arguments import Effort, TemplateArguments
from cluster.serving.tools.tool import MAX_TOOLS
from cluster.serving.tools.tool_choice import ToolUse, read_each_tool
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from cluster.serving.anthropic.model_support import ModelSupport
    from cluster.serving.tools.tool_calls import ToolCallFormat

__all__ = ["ConversationBody", "OutputConfig"]


class Thinking(BodyPart):
    """Sets `enable_thinking` of the chat template, and may limit the model's reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = bounds(
        "Number of tokens after which the reasoning is ended; requires type = enabled. Ignored if "
        "the model does not reason, or may reason several times in a turn, as gpt-oss.",
        0,
    )
    block_binding: Any = Field(  # Any: a hint
        None, description="Ignored; thinking blocks are valid in every conversation."
    )
    display: str | None = Field(
        None,
        description="Ignored; thoughts are always returned, so that the conversation may contain "
        "them.",
    )


class OutputConfig(BodyPart):
    """The effort and the format of the output."""

    effort: Effort | None = None
    format: Any = Field(None, json_schema_extra=named_schema("OutputFormat"))  # Any: keeps nulls


class ConversationBody(Body):
    """The conversation, its tools and the format of the answer."""

    defaults: ClassVar[Defaults] = {
        "context_management": (
            {},
            {"edits": []},
            # All thoughts are kept.
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "fallbacks": ("default", []),
        "mcp_servers": ([],),
    }
    ignored: ClassVar[Mapping[str, str]] = {
        "billing_policy": "requests are not billed",
        "cache_control": "prefixes are always cached",
        "speed": "there is only one speed",
        "user_profile_id": "an identifier of the end user",
        "workspace_id": "an identifier of the end user",
    }
    max_entries: ClassVar[Mapping[str, int]] = {"messages": MAX_MESSAGES, "tools": MAX_TOOLS}
    rejected: ClassVar[Mapping[str, str]] = {
        "compaction": "shorten the messages instead",
        "container": NO_TOOLS_OF_ANTHROPIC,
        "context_management": "shorten the messages instead",
        "fallbacks": "the server has one model",
        "mcp_servers": NO_TOOLS_OF_ANTHROPIC,
        "thread": "messages are not stored; send the whole conversation",
    }
    synonyms: ClassVar[Mapping[str, str]] = {
        "enable_thinking": "chat_template_kwargs.enable_thinking",
        "input": "messages",
        "instructions": "system",
        "output_format": "output_config.format",
        "prompt": "messages",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
        "thinking_budget": "thinking.budget_tokens",
        "thinking_token_budget": "thinking.budget_tokens",
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
        None,
        description="Sets `enable_thinking` of the chat template; `budget_tokens` limits the "
        "model's reasoning.",
    )
    chat_template_kwargs: Any = template_variables_field()
    output_config: Any = Field(  # Any: read where it is used
        None,
        description="`effort` sets `reasoning_effort` and `enable_thinking` of the chat template, "
        "and `format` is a constraint on the text of the response.",
        json_schema_extra=named_schema("OutputConfig"),
    )

    def check_fields(self) -> None:
        super().check_fields()
        budget = self.thinking_budget
        if budget is None:
            return
        param = "thinking.budget_tokens"
        if self.thinking is not None and self.thinking.type != "enabled":
            raise InvalidRequestError(f"{param} requires thinking.type = enabled.", param=param)
        if budget < 0:
            raise InvalidRequestError(f"{param} must be 0 or more, not {budget}.", param=param)

    @property
    def thinking_budget(self) -> int | None:
        """The number of tokens after which the model's reasoning is ended."""
        return None if self.thinking is None else self.thinking.budget_tokens

    def tool_use(self, tool_format: ToolCallFormat | None) -> ToolUse:
        """Return how the call uses tools. Raises InvalidRequestError."""
        tools = read_each_tool(self.tools, "tools", read_anthropic_tool)
        choice = read_anthropic_choice(self.tool_choice, has_tools=bool(tools))
        return ToolUse(tools, choice, tool_format=tool_format)

    def prompt(
        self, tools: ToolUse, support: ModelSupport, *, note_ignored: Callable[[str], None]
    ) -> ChatPrompt:
        """Return the conversation. Raises InvalidRequestError."""
        messages = read_anthropic_messages(self.messages)
        system = read_system_prompt(self.system)
        if system:
            messages = (ChatMessage("system", system), *messages)
        if has_later_system_messages(messages) and not support.keeps_system_messages():
            messages = merge_system_messages(messages)
        messages = combine_turns(messages)
        # As with Anthropic, the answer continues a last message of the assistant.
        is_open = bool(self.messages) and self.messages[-1].role == "assistant"
        if is_open and messages[-1].tool_calls:
            where = f"messages.{len(self.messages) - 1}"
            raise InvalidRequestError(
                f"{where} ends with a tool call, whose result must follow.", param=where
            )
        arguments = self._template_arguments(support, note_ignored)
        return ChatPrompt(messages, tools.for_template, not is_open, is_open, arguments)

    def _template_arguments(
        self, support: ModelSupport, note_ignored: Callable[[str], None]
    ) -> dict[str, object]:
        """Return the variables of the chat template, `thinking` among them if it has one."""
        effort = None if self.output_config is None else self.read_output_config().effort
        given = TemplateArguments(
            self.chat_template_kwargs, effort, effort_param="output_config.effort"
        )
        arguments = given.variables(support.known_variables, note_ignored)
        thinking = self.thinking
        if thinking is None:
            return arguments
        has_budget = thinking.budget_tokens is not None
        if thinking.type != "adaptive":
            if "enable_thinking" in support.known_variables:
                if "enable_thinking" not in (self.chat_template_kwargs or ()):
                    arguments["enable_thinking"] = thinking.type == "enabled"
            elif not (has_budget and support.can_limit_reasoning):
                note_ignored("thinking")
        if thinking.display == "omitted":
            note_ignored("thinking.display")
        if has_budget and not support.can_limit_reasoning:
            note_ignored("thinking.budget_tokens")
        return arguments

    def read_output_config(self) -> OutputConfig:
        """Return `output_config`, which is given. Raises InvalidRequestError."""
        if not isinstance(self.output_config, dict):
            raise InvalidRequestError("output_config must be an object.", param="output_config")
        # Nulls in the schema are values.
        kept = {name: one for name, one in self.output_config.items() if name != "format"}
        read = read_part(OutputConfig, kept, "output_config")
        return read.model_copy(update={"format": self.output_config.get("format")})
