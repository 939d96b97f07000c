"""The bodies of POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, groupby, takewhile
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import FailFast, Field

from cluster.serving.anthropic.blocks import (
    AnthropicMessage,
    read_anthropic_messages,
    read_system_prompt,
)
from cluster.serving.inputs import GenerationInput, TokenizeInput
from cluster.serving.json_body import (
    Body,
    BodyPart,
    Defaults,
    OpenPart,
    described,
    json_text,
    named_schema,
    read_part,
)
from cluster.serving.openai.bodies.chat_body import MAX_MESSAGES
from cluster.serving.openai.bodies.sampling_fields import (
    IGNORED,
    bounds,
    cache_salt_field,
    template_variables_field,
)
from cluster.serving.text.template_arguments import (
    ChatMessage,
    ChatPrompt,
    Effort,
    TemplateArguments,
)
from cluster.serving.tools.tool import MAX_TOOLS, NAME_PATTERN, Tool
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse, read_each_tool
from cluster.structured.grammar.grammar_text import MAX_TEXT_BYTES
from pagedray.errors import invalid_field
from pagedray.sampling_params import MAX_STOP, MAX_STOP_LENGTH, Structure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cluster.serving.tools.tool_calls import ToolCallFormat

__all__ = ["CountBody", "MessagesBody", "ModelSupport", "merge_system_messages"]

_COMBINED = ("user", "assistant")
_ANSWERED = ("tool", "user")
NO_TOOLS_OF_ANTHROPIC = "tools run by Anthropic are not available"


class AnthropicTool(OpenPart):
    """A function that the model may call."""

    name: str = Field(json_schema_extra={"pattern": NAME_PATTERN})
    type: Literal["custom"] = "custom"
    description: str | None = None
    input_schema: Any = Field(json_schema_extra={"type": "object"})  # Any: a JSON schema
    defer_loading: Literal[False] = False
    allowed_callers: list[Literal["direct"]] | None = None
    strict: bool | None = described("Whether calls that are not forced follow the schema, too.")


class AnthropicToolChoice(BodyPart):
    """Whether and which tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


def read_anthropic_tool(given: object, where: str) -> Tool:
    """Return the tool of a request, `where` in it. Raises InvalidRequestError."""
    if isinstance(given, dict) and given.get("type") not in (None, "custom"):
        raise invalid_field(f"{where}.type", f"must be custom: {NO_TOOLS_OF_ANTHROPIC}.")
    schema = given.get("input_schema") if isinstance(given, dict) else None
    # Nulls in the schema are values.
    kept = {**given, "input_schema": {}} if isinstance(given, dict) and schema else given
    read = read_part(AnthropicTool, kept, where)
    if not isinstance(schema, dict):
        param = f"{where}.input_schema"
        raise invalid_field(param, "must be a JSON Schema object.")
    tool = Tool(
        name=read.name,
        description=read.description,
        parameters=schema,
        is_strict=bool(read.strict),
        extra=read.model_extra,
    )
    tool.check_limits(where, schema_param=f"{where}.input_schema")
    return tool


def read_anthropic_choice(given: AnthropicToolChoice | None, *, has_tools: bool) -> ToolChoice:
    """Return which tools must be called. Raises InvalidRequestError."""
    if given is None:
        return ToolChoice(kind="auto" if has_tools else "none")
    is_parallel = not given.disable_parallel_tool_use
    if given.type == "tool":
        if given.name is None:
            raise invalid_field("tool_choice.name", "is required.")
        return ToolChoice(kind="named", name=given.name, is_parallel=is_parallel)
    if given.type == "any":
        return ToolChoice(kind="required", is_parallel=is_parallel)
    return ToolChoice(kind=given.type, is_parallel=is_parallel)


class Thinking(BodyPart):
    """Sets `enable_thinking` of the chat template, and may limit the model's reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = bounds(
        "Number of tokens after which the reasoning is ended; requires type = enabled. Ignored if "
        "the model does not reason, or may reason several times in a turn, as gpt-oss.",
        0,
    )
    block_binding: Any = described(  # Any: a hint
        "Ignored; thinking blocks are valid in every conversation."
    )
    display: str | None = described(
        "Ignored; thoughts are always returned, so that the conversation may contain them."
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

    model: str = described("The name of the model, which `/v1/models` lists.", ...)
    messages: Annotated[list[AnthropicMessage], FailFast()] = described(
        "The messages of the conversation; the response continues a last message of the assistant.",
        ...,
        minItems=1,
        maxItems=MAX_MESSAGES,
    )
    system: Any = described(  # Any: read where it is used
        "A system message before the other messages.",
        anyOf=[{"type": "string"}, {"type": "array", "items": named_schema("TextBlock")}],
    )
    tools: Any = described(  # Any: read separately, which keeps nulls in schemas
        "Functions that the model may call.",
        type="array",
        items=named_schema("AnthropicTool"),
        maxItems=MAX_TOOLS,
    )
    tool_choice: AnthropicToolChoice | None = described(
        "Whether the model must call a function (`any` or `tool`), may call one (`auto`), or must "
        "not call any (`none`)."
    )
    thinking: Thinking | None = described(
        "Sets `enable_thinking` of the chat template; `budget_tokens` limits the model's reasoning."
    )
    chat_template_kwargs: Any = template_variables_field()
    output_config: Any = described(  # Any: read where it is used
        "`effort` sets `reasoning_effort` and `enable_thinking` of the chat template, and "
        "`format` is a constraint on the text of the response.",
        **named_schema("OutputConfig"),
    )

    def check_fields(self) -> None:
        super().check_fields()
        budget = self.thinking_budget
        if budget is None:
            return
        param = "thinking.budget_tokens"
        if self.thinking is not None and self.thinking.type != "enabled":
            raise invalid_field(param, "requires thinking.type = enabled.")
        if budget < 0:
            raise invalid_field(param, f"must be 0 or more, not {budget}.")

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
            raise invalid_field(where, "ends with a tool call, whose result must follow.")
        arguments = self._template_arguments(support, note_ignored)
        return ChatPrompt(messages, tools.for_template, not is_open, is_open, arguments)

    def _template_arguments(
        self, support: ModelSupport, note_ignored: Callable[[str], None]
    ) -> dict[str, object]:
        """Return the variables of the chat template, with `thinking` if the template has it."""
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
            raise invalid_field("output_config", "must be an object.")
        # Nulls in the schema are values.
        kept = {name: one for name, one in self.output_config.items() if name != "format"}
        read = read_part(OutputConfig, kept, "output_config")
        return read.model_copy(update={"format": self.output_config.get("format")})


def combine_turns(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return a conversation in which a message of the user or the assistant never follows another.

    Results of tools and system messages remain separate.
    """
    combined: list[ChatMessage] = []
    for role, group in groupby(messages, key=lambda message: message.role):
        turns = list(group)
        combined += [_as_one(turns)] if role in _COMBINED and len(turns) > 1 else turns
    return tuple(combined)


def joined_texts(texts: Iterable[str]) -> str:
    """Return the texts, separated by blank lines, without empty texts."""
    return "\n\n".join(text for text in texts if text)


def _as_one(turns: Sequence[ChatMessage]) -> ChatMessage:
    reasoning = [one.reasoning for one in turns if one.reasoning is not None]
    return replace(
        turns[0],
        content=joined_texts(one.content for one in turns),
        tool_calls=tuple(chain.from_iterable(one.tool_calls for one in turns)),
        reasoning=joined_texts(reasoning) if reasoning else None,
    )


def has_later_system_messages(messages: Sequence[ChatMessage]) -> bool:
    """Return whether a system message is not the first message."""
    return any(message.role == "system" for message in messages[1:])


def merge_system_messages(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return a conversation with no system message, except possibly as the first message.

    System messages at the beginning become one message. A later system message becomes the end of
    the user's turn or of the tool's result before it; after a turn of the assistant, it becomes a
    part of the next message.
    """
    leading = tuple(takewhile(lambda message: message.role == "system", messages))
    merged = (
        [ChatMessage("system", joined_texts(one.content for one in leading))] if leading else []
    )
    waiting: list[str] = []
    for message in messages[len(leading) :]:
        if message.role == "system":
            waiting.append(message.content)
            continue
        merged.append(_with_text(merged, waiting, message))
        waiting = []
    if waiting:
        merged += _ending(merged, waiting)
    return tuple(merged)


def _with_text(
    merged: list[ChatMessage], waiting: Sequence[str], following: ChatMessage
) -> ChatMessage:
    """Put the waiting texts into the last message, or into the returned following message."""
    if not waiting:
        return following
    if merged[-1].role in _ANSWERED or following.role not in _ANSWERED:
        merged += _ending(merged, waiting)
        return following
    # The result of a tool remains the first that follows its call.
    texts = (
        [following.content, *waiting] if following.role == "tool" else [*waiting, following.content]
    )
    return replace(following, content=joined_texts(texts))


def _ending(merged: list[ChatMessage], waiting: Sequence[str]) -> list[ChatMessage]:
    """Put the waiting texts into the last message, or return a message of the user with them."""
    last = merged[-1]
    if last.role not in _ANSWERED:
        return [ChatMessage("user", joined_texts(waiting))]
    merged[-1] = replace(last, content=joined_texts([last.content, *waiting]))
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSupport:
    """Features that a model and its chat template support; tools may have another template."""

    known_variables: frozenset[str]
    """The variables of the chat template that a request may set."""
    keeps_system_messages: Callable[[], bool]
    """Returns whether the template writes later system messages at their places.

    The first call renders the template.
    """
    can_limit_reasoning: bool
    """Whether the model's reasoning can be ended after a number of tokens."""


class OutputFormat(BodyPart):
    """The schema that the text follows."""

    type: Literal["json_schema"]
    schema_: Any = Field(alias="schema", json_schema_extra={"type": "object"})  # Any: as above


class MessagesBody(ConversationBody):
    """A conversation for the model to continue."""

    defaults: ClassVar[Defaults] = {**ConversationBody.defaults, "seed": (-1,)}
    ignored: ClassVar[Mapping[str, str]] = {
        **ConversationBody.ignored,
        "diagnostics": "diagnostics are not available",
        "fallback_credit_token": "requests are not billed",
        "inference_geo": "requests are always processed where the server runs",
        "metadata": "an identifier of the end user",
        "service_tier": "there is only one service tier",
        "vllm_xargs": IGNORED["vllm_xargs"],
    }
    rejected: ClassVar[Mapping[str, str]] = {
        **ConversationBody.rejected,
        "seed": "use /v1/chat/completions",
    }
    synonyms: ClassVar[Mapping[str, str]] = {
        **ConversationBody.synonyms,
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "stop": "stop_sequences",
    }

    max_tokens: int = described("Maximum number of tokens to generate.", ..., minimum=1)
    stop_sequences: Any = described(  # Any: checked by the validator
        "Strings that end the output.",
        type="array",
        items={"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
        maxItems=MAX_STOP,
    )
    temperature: float | None = bounds("Sampling temperature; 0 is greedy.", 0, 100)
    top_p: float | None = bounds(
        "Cumulative probability of the most likely tokens to sample from.", 0, 1
    )
    top_k: int | None = bounds(
        "Number of most likely tokens to sample from; 0 or -1 samples from all.", -1
    )
    cache_salt: str | None = cache_salt_field()
    stream: bool = described("Whether the response is a stream of server-sent events.", False)

    def to_input(
        self,
        client_id: str | None,
        tools: ToolUse,
        support: ModelSupport,
        *,
        note_ignored: Callable[[str], None],
    ) -> GenerationInput:
        """Return the input of the call. Raises InvalidRequestError."""
        prompt = self.prompt(tools, support, note_ignored=note_ignored)
        sampling: dict[str, object] = {"max_tokens": self.max_tokens}
        for name in ("temperature", "top_p", "top_k"):
            if getattr(self, name) is not None:
                sampling[name] = getattr(self, name)
        if support.can_limit_reasoning and self.thinking_budget is not None:
            sampling["thinking_token_budget"] = self.thinking_budget
        if self.stop_sequences is not None:
            is_list = isinstance(self.stop_sequences, list)
            sampling["stop"] = tuple(self.stop_sequences) if is_list else self.stop_sequences
        structure = tools.structure(self._structure(), "output_config.format")
        if structure is not None:
            sampling["structure"] = structure
        return GenerationInput(
            prompts=(prompt,),
            sampling=sampling,
            model=self.model,
            client_id=client_id,
            cache_salt=self.cache_salt or "",
            # Some models mark a call with special tokens.
            skips_special_tokens=not tools.is_read,
        )

    def _structure(self) -> Structure | None:
        given = None if self.output_config is None else self.read_output_config().format
        if given is None:
            return None
        param = "output_config.format"
        schema = given.get("schema") if isinstance(given, dict) else None
        read_part(OutputFormat, {**given, "schema": {}} if schema is not None else given, param)
        if not isinstance(schema, dict):
            raise invalid_field(f"{param}.schema", "must be a JSON Schema.")
        text = json_text(schema, f"{param}.schema", most_bytes=MAX_TEXT_BYTES)
        return Structure(kind="json_schema", text=text)


class CountBody(ConversationBody):
    """A conversation whose tokens are counted."""

    def to_input(
        self, tools: ToolUse, support: ModelSupport, *, note_ignored: Callable[[str], None]
    ) -> TokenizeInput:
        """Return the input of the call. Raises InvalidRequestError."""
        prompt = self.prompt(tools, support, note_ignored=note_ignored)
        return TokenizeInput(prompt=prompt, model=self.model)
