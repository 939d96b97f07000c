"""The chat template of a checkpoint, which renders messages to the prompt's text.

Templates run in a sandbox. They come from checkpoints, and from requests if the operator allows it.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension

from cluster.serving.text.templates.rendering_budget import MAX_CPU_S, TemplateLimitError
from cluster.serving.text.templates.template_limits import LimitedEnvironment
from pagedray.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2.parser import Parser

    from cluster.serving.text.thread_pauses import ThreadPauses

__all__ = ["ChatMessage", "ChatTemplate", "MessageToolCall"]

_MAX_REASON_LENGTH = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageToolCall:
    """A tool call of an earlier turn of the assistant."""

    id: str
    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str
    tool_calls: tuple[MessageToolCall, ...] = ()
    """The tool calls of an assistant's turn."""
    tool_call_id: str | None = None
    """In a tool's turn, the id of its call."""
    name: str | None = None
    """The name of the author; in a tool's turn, of the tool."""
    reasoning: str | None = None
    """What the model thought before an assistant's turn."""


class _GenerationBlock(Extension):
    """The tag around the assistant's output, which is used in training only and has no effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and its special tokens."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        origin: str,
        owner: str = "model",
        cpu_s: float = MAX_CPU_S,
    ) -> None:
        """A rendering may take `cpu_s`. Errors of messages call it the template of its owner.

        Raises CheckpointError that names `origin` if the source is invalid.
        """
        environment = self._environment = LimitedEnvironment(
            cpu_s=cpu_s,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.start_compiling()
        try:
            self._template = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        # The library passes on what Python's compiler says of the code that it makes.
        except (
            jinja2.TemplateError,
            SyntaxError,
            ValueError,
            RecursionError,
            MemoryError,
        ) as error:
            raise CheckpointError(
                f"{origin} has an invalid chat template: {_one_line(error)}."
            ) from error
        self._special_tokens = dict(special_tokens)
        self._name = f"The {owner}'s chat template"
        self.source = source
        """The template's source."""
        self._has_channels = "<|channel|>" in source
        own = {*environment.globals, *special_tokens, "messages", "add_generation_prompt", "tools"}
        self.variables = frozenset(variables - own)
        """The variables that it reads and that a request may set."""

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        adds_generation_prompt: bool = True,
        continues_final_message: bool = False,
        variables: Mapping[str, object] = MappingProxyType({}),
        pauses: ThreadPauses | None = None,
    ) -> str:
        """Return the prompt for the next turn, or for the rest of the last one.

        `variables` are some of those that the template reads. The thread takes the pauses, if any.

        Raises InvalidRequestError if the template rejects the messages.
        """
        self._environment.start_rendering(pauses)
        if self._has_channels:
            messages = _in_channels(messages)
        written = [_for_template(message) for message in messages]
        mark = secrets.token_hex(16) if continues_final_message and written else None
        if mark is None:
            return self._render(
                written, tools, variables, adds_generation_prompt=adds_generation_prompt
            )
        content = str(written[-1]["content"])
        # The space shows whether the template keeps spaces around messages.
        written[-1]["content"] = f"{content}{mark} "
        text = self._render(
            written, tools, variables, adds_generation_prompt=adds_generation_prompt
        )
        begin = text.rfind(mark)
        if begin < 0 or content.strip() not in text:
            raise InvalidRequestError(
                f"{self._name} omits the final message or a part of it, so it cannot be continued.",
                param="messages",
            )
        is_kept = text.startswith(" ", begin + len(mark))
        return text[:begin] if is_kept else text[:begin].rstrip()

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]],
        variables: Mapping[str, object],
        *,
        adds_generation_prompt: bool,
    ) -> str:
        try:
            return self._template.render(
                {
                    "documents": None,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": adds_generation_prompt,
                    "tools": list(tools) or None,
                    **self._special_tokens,
                }
            )
        except (TemplateLimitError, RecursionError, MemoryError) as error:
            raise InvalidRequestError(
                f"{self._name} exceeds a limit with these messages: {_one_line(error)}.",
                param="messages",
            ) from error
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"{self._name} rejected the messages: {_one_line(error)}.", param="messages"
            ) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"{self._name} cannot render these messages.", param="messages"
            ) from error


def _one_line(error: Exception) -> str:
    text = str(error)[:_MAX_REASON_LENGTH] or "out of memory"
    return " ".join(text.split()).rstrip(".")


def _in_channels(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages as templates of gpt-oss read them: of one call, before its result.

    They read the first call of a message, take a result for that of the last call, and refuse
    reasoning and content beside a call: both become its reasoning.
    """
    written: list[ChatMessage] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if not message.tool_calls:
            written.append(message)
            continue
        results: dict[str | None, list[ChatMessage]] = {}
        first = place
        while place < len(messages) and messages[place].role == "tool":
            results.setdefault(messages[place].tool_call_id, []).append(messages[place])
            place += 1
        thoughts = "\n".join(text for text in (message.reasoning, message.content) if text)
        num_left = Counter(call.id for call in message.tool_calls)
        for call in message.tool_calls:
            written.append(
                replace(message, content="", tool_calls=(call,), reasoning=thoughts or None)
            )
            found = results.get(call.id, [])
            num_left[call.id] -= 1
            # Of calls with the same id each takes a result, and the last one all that remain.
            num_taken = 1 if num_left[call.id] else len(found)
            written += found[:num_taken]
            del found[:num_taken]
            thoughts = ""
        written += (one for one in messages[first:place] if one.tool_call_id not in num_left)
    return written


def _for_template(message: ChatMessage) -> dict[str, object]:
    written: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": dict(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        written["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        written["name"] = message.name
    if message.reasoning is not None:
        # Templates read one of them.
        written["reasoning_content"] = written["reasoning"] = message.reasoning
        written["thinking"] = message.reasoning
    return written


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # The parameters are those of Transformers, in the same order.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
