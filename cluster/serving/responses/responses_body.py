"""The body of POST /v1/responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from cluster.serving.http.schema import Body, BodyPart, Defaults, named_schema, read_part
from cluster.serving.inputs import ChatPrompt, GenerationInput
from cluster.serving.json_text import json_text
from cluster.serving.openai.bodies.chat_body import MAX_MESSAGES
from cluster.serving.openai.bodies.generation_body import bounds
from cluster.serving.openai.bodies.parameters import IGNORED, MODERATION
from cluster.serving.responses.items import ITEMS, read_items
from cluster.serving.text.templates.chat_template import ChatMessage
from cluster.serving.text.templates.template_arguments import Effort, TemplateArguments
from cluster.serving.tools.tool import MAX_TOOLS
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.structured.grammar.grammar_text import MAX_TEXT_BYTES
from pagedray.errors import InvalidRequestError
from pagedray.request import Structure

if TYPE_CHECKING:
    from cluster.serving.intake.steps import Steps
    from cluster.serving.responses.function_tools import FunctionTools
    from cluster.serving.tools.tool_calls import ToolCallFormat

__all__ = ["Echo", "ResponsesBody", "TextConfig"]

_encode = msgspec.json.Encoder().encode

_LOGPROBS = "message.output_text.logprobs"


class NamedTool(BodyPart):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class Reasoning(BodyPart):
    """Sets `reasoning_effort` of the chat template."""

    context: Literal["auto"] | None = Field(
        None, description="The chat template decides which thoughts it reads."
    )
    effort: Effort | None = None
    mode: Literal["standard"] | None = None
    summary: Any = Field(None, description="Ignored; thoughts are not summarized.")
    generate_summary: Any = Field(None, description="Ignored; thoughts are not summarized.")


class TextFormat(BodyPart):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(None, alias="schema")  # Any: a JSON schema
    strict: bool | None = None


class TextConfig(BodyPart):
    """How the text is written."""

    format: Any = Field(  # Any: nulls in the schema are values
        None,
        description="`text`, `json_object`, or `json_schema` with a name and a schema.",
        json_schema_extra={"type": "object"},
    )
    verbosity: Any = Field(None, description="Ignored; a hint for models of OpenAI.")


@dataclass(frozen=True, slots=True)
class Echo:
    """The parameters that a response repeats."""

    fields: Mapping[str, object]
    large: bytes
    """Those that may be large, as members of a JSON object."""


class ResponsesBody(Body):
    """A conversation for the model to continue."""

    defaults: ClassVar[Defaults] = {
        "background": (False,),
        "context_management": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    ignored: ClassVar[Mapping[str, str]] = {
        **{
            name: IGNORED[name]
            for name in (
                "metadata",
                "prompt_cache_key",
                "prompt_cache_options",
                "prompt_cache_retention",
                "safety_identifier",
                "service_tier",
                "user",
            )
        },
        "client_metadata": "labels for the logs of OpenAI",
        "max_tool_calls": "OpenAI's own tools are not available",
        "stream_options": "streams are not obfuscated",
    }
    refused: ClassVar[Mapping[str, str]] = {
        "access_programs": "there are no programs with access of their own",
        "background": "the response is the answer to the request",
        "context_management": "shorten the input instead",
        "conversation": "use previous_response_id, or send the earlier items as input",
        "image": "the output is text",
        "moderation": MODERATION,
        "prompt": "prompts are not stored; send instructions and input",
        "top_logprobs": "use /v1/chat/completions",
        "truncation": "shorten the input instead",
    }
    max_entries: ClassVar[Mapping[str, int]] = {"input": MAX_MESSAGES, "tools": MAX_TOOLS}
    with_nulls: ClassVar[frozenset[str]] = frozenset(("reasoning",))

    model: str
    input: Any = Field(  # Any: read where it is used
        json_schema_extra={
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {"anyOf": [named_schema(part.__name__) for part in ITEMS.values()]},
                    "minItems": 1,
                    "maxItems": MAX_MESSAGES,
                },
            ]
        }
    )
    instructions: str | None = Field(None, description="A first message of the system.")
    previous_response_id: str | None = Field(
        None, description="The stored response whose conversation the input continues."
    )
    store: bool | None = Field(
        None,
        description="Whether the response is kept in memory, so that it can be continued, read and "
        "deleted by its id; true by default.",
    )
    max_output_tokens: int | None = bounds(1)
    temperature: float | None = bounds(0, 100)
    top_p: float | None = bounds(0, 1)
    tools: Any = Field(  # Any: read separately, which keeps nulls in schemas
        None,
        json_schema_extra={
            "type": "array",
            "items": {"anyOf": [named_schema("FunctionTool"), named_schema("NamespaceTool")]},
            "maxItems": MAX_TOOLS,
        },
    )
    tool_choice: Any = Field(  # Any: a string or an object
        None,
        json_schema_extra={"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]},
    )
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: Any = Field(None, json_schema_extra=named_schema("TextConfig"))  # Any: as its format
    include: Any = Field(  # Any: only known strings
        None,
        description="Ignored, but for log-probabilities, which are refused.",
        json_schema_extra={"type": "array", "items": {"type": "string"}},
    )
    stream: bool = False

    def check_fields(self) -> None:
        if self.include is None:
            return
        if not isinstance(self.include, list) or _LOGPROBS in self.include:
            raise InvalidRequestError(
                f"include must be a list, and {_LOGPROBS} is not supported: use "
                "/v1/chat/completions.",
                param="include",
            )

    def tool_use(
        self, functions: FunctionTools, tool_format: ToolCallFormat | None
    ) -> Steps[ToolUse]:
        """Return how the call uses tools, and add them to `functions`.

        Raises InvalidRequestError.
        """
        yield from functions.read(self.tools)
        tools = functions.tools
        return ToolUse(tools, self._choice(has_tools=bool(tools)), tool_format=tool_format)

    def to_input(
        self,
        client_id: str | None,
        tools: ToolUse,
        *,
        known_variables: frozenset[str],
        note_ignored: Callable[[str], None],
        earlier: tuple[ChatMessage, ...] = (),
    ) -> Steps[GenerationInput]:
        """Return the input of the call, after the `earlier` messages. Raises
        InvalidRequestError."""
        messages = (*earlier, *(yield from read_items(self.input)))
        if self.instructions:
            messages = (ChatMessage("system", self.instructions), *messages)
        effort = None if self.reasoning is None else self.reasoning.effort
        variables = TemplateArguments(None, effort).variables(known_variables, note_ignored)
        sampling: dict[str, object] = {}
        for name in ("temperature", "top_p"):
            if getattr(self, name) is not None:
                sampling[name] = getattr(self, name)
        if self.max_output_tokens is not None:
            sampling["max_tokens"] = self.max_output_tokens
        structure = yield from tools.structure(self._structure(), "text.format")
        if structure is not None:
            sampling["structure"] = structure
        return GenerationInput(
            prompts=(ChatPrompt(messages, tools.for_template, variables=variables),),
            sampling=sampling,
            model=self.model,
            client_id=client_id,
            # Some models mark a call with special tokens.
            skips_special_tokens=not tools.is_read,
        )

    def echoed(self, *, is_stored: bool) -> Steps[Echo]:
        """Return the parameters that a response repeats."""
        tools: list[bytes] = []
        for tool in self.tools or ():
            yield
            tools.append(_encode(tool))
        instructions = _encode(self.instructions)
        yield
        text = _encode(self.text or {"format": {"type": "text"}})
        yield
        parts = (instructions, text, b",".join(tools))
        large = b'"instructions":%b,"text":%b,"tools":[%b]' % parts
        fields = {
            "max_output_tokens": self.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": {
                "effort": None if self.reasoning is None else self.reasoning.effort,
                "summary": None,
            },
            "store": is_stored,
            "temperature": self.temperature,
            "tool_choice": self.tool_choice or "auto",
            "top_p": self.top_p,
            "truncation": "disabled",
        }
        return Echo(fields, large)

    def _choice(self, *, has_tools: bool) -> ToolChoice:
        given, is_parallel = self.tool_choice, self.parallel_tool_calls
        if given is None:
            given = "auto" if has_tools else "none"
        if isinstance(given, dict):
            named = read_part(NamedTool, given, "tool_choice")
            return ToolChoice(kind="named", name=named.name, is_parallel=is_parallel)
        if given == "none" or given == "auto" or given == "required":
            return ToolChoice(kind=given, is_parallel=is_parallel)
        raise InvalidRequestError(
            "tool_choice must be none, auto, required or a named function.", param="tool_choice"
        )

    def _structure(self) -> Structure | None:
        if self.text is None:
            return None
        if not isinstance(self.text, dict):
            raise InvalidRequestError("text must be an object.", param="text")
        given, param = self.text.get("format"), "text.format"
        kept = {name: one for name, one in self.text.items() if name != "format"}
        read_part(TextConfig, kept, "text")
        if given is None:
            return None
        schema = given.get("schema") if isinstance(given, dict) else None
        read = read_part(
            TextFormat, {**given, "schema": {}} if schema is not None else given, param
        )
        if read.type == "text":
            return None
        if read.type == "json_object":
            return Structure(kind="json_object")
        if not isinstance(schema, dict):
            raise InvalidRequestError(
                f"{param}.schema must be a JSON Schema.", param=f"{param}.schema"
            )
        text = json_text(schema, f"{param}.schema", most_bytes=MAX_TEXT_BYTES)
        return Structure(kind="json_schema", text=text)
