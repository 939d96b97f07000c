"""The chat template of a checkpoint, which renders messages to the prompt's text.

Templates run in a sandbox. They come from checkpoints, and from requests if the operator allows it.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import jinja2

from cluster.serving.text.templates.chat_prompt import ChatMessage, ChatPrompt, MessageToolCall
from cluster.serving.text.templates.rendering_budget import MAX_CPU_S, TemplateLimitError
from cluster.serving.text.templates.template_code import (
    InvalidTemplateError,
    TemplateCode,
    compile_template,
    reason_of,
    template_environment,
)
from pagedray.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


__all__ = ["ChatTemplate"]

_FUNCTION_FIELDS = frozenset(("name", "description", "parameters", "return"))
"""The fields of a function as transformers describes it."""
_TEXT = "text"
_PROBE = "pagedray"
"""A text to look for in a rendered conversation."""
_USER = ChatMessage("user", "x")
_CALL = MessageToolCall(id="call00000", name="x", arguments={})
_PROBES = {
    "user": (ChatMessage("user", _PROBE),),
    "assistant": (_USER, ChatMessage("assistant", _PROBE), _USER),
    "system": (ChatMessage("system", _PROBE), _USER),
    "tool": (
        *(_USER, ChatMessage("assistant", "", tool_calls=(_CALL,))),
        ChatMessage("tool", _PROBE, tool_call_id=_CALL.id, name=_CALL.name),
    ),
}
"""A conversation for each role, with the text in a message of that role."""
_ROLES = frozenset(_PROBES)


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
        code: TemplateCode | None = None,
    ) -> None:
        """A rendering may take `cpu_s` of CPU time. Its errors name the owner of the template.

        The source is compiled unless its `code` is given. Raises CheckpointError that names
        `origin` if it is invalid.
        """
        if code is None:
            try:
                code = compile_template(source)
            except InvalidTemplateError as error:
                raise CheckpointError(f"{origin} has an invalid chat template: {error}.") from error
        environment = self._environment = template_environment(cpu_s)
        self._template = jinja2.Template.from_code(
            environment, code.code, environment.make_globals(None)
        )
        self._special_tokens = dict(special_tokens)
        self._name = f"The {owner}'s chat template"
        self.source = source
        """The template's source."""
        self._has_channels = "<|channel|>" in source
        own = {*special_tokens, "messages", "add_generation_prompt", "tools"}
        self.variables = code.variables - own
        """The variables that it reads and that a request may set."""
        self._names = code.names

    def render(self, prompt: ChatPrompt) -> str:
        """Return the prompt for the next turn, or for the rest of the last turn.

        Raises InvalidRequestError if the template rejects the messages.
        """
        self._environment.start_rendering()
        messages = _in_channels(prompt.messages) if self._has_channels else prompt.messages
        mark = secrets.token_hex(16) if prompt.continues_final_message and messages else None
        if mark is None:
            return self._render(prompt, messages, self._roles_of_parts)
        content = messages[-1].content
        # The space shows whether the template keeps spaces around messages.
        marked = replace(messages[-1], content=f"{content}{mark} ")
        text = self._render(prompt, (*messages[:-1], marked), self._roles_of_parts)
        begin = text.rfind(mark)
        if begin < 0 or content.strip() not in text:
            raise InvalidRequestError(
                f"{self._name} omits the final message or a part of it, so it cannot be continued.",
                param="messages",
            )
        is_kept = text.startswith(" ", begin + len(mark))
        return text[:begin] if is_kept else text[:begin].rstrip()

    @cached_property
    def keeps_system_messages(self) -> bool:
        """Whether a system message that is not the first is written, and at its place."""
        roles = ("system", "user", "assistant", "user", "system")
        messages = tuple(ChatMessage(role, f"text{place}") for place, role in enumerate(roles))
        try:
            text = self.render(ChatPrompt(messages))
        except InvalidRequestError:
            return False
        return 0 <= text.find("text3") < text.find("text4")

    @cached_property
    def dropped_roles(self) -> tuple[str, ...]:
        """The roles with messages that the template writes without their text."""
        dropped = []
        for role in _PROBES:
            if role in self._roles_of_parts:
                continue
            self._environment.start_rendering()
            if self._writes_text(role, frozenset()) is False:
                dropped.append(role)
        return tuple(dropped)

    @cached_property
    def _roles_of_parts(self) -> frozenset[str]:
        """The roles with content that the template only reads as a list of parts."""
        if _TEXT not in self._names:
            # The name of a part's text.
            return frozenset()
        return frozenset(
            role
            for role in _PROBES
            if not self._writes_text(role, frozenset()) and self._writes_text(role, _ROLES)
        )

    def _writes_text(self, role: str, roles_of_parts: frozenset[str]) -> bool | None:
        """Return whether a role's text is in the prompt; None if the template rejects it."""
        try:
            return _PROBE in self._render(ChatPrompt(()), _PROBES[role], roles_of_parts)
        except InvalidRequestError:
            return None

    def _render(
        self, prompt: ChatPrompt, messages: Sequence[ChatMessage], roles_of_parts: frozenset[str]
    ) -> str:
        written = [_for_template(message, self._names, roles_of_parts) for message in messages]
        try:
            return self._template.render(
                {
                    "documents": None,
                    **prompt.variables,
                    "messages": written,
                    "add_generation_prompt": prompt.adds_generation_prompt,
                    "tools": [_read_fields(tool, self._names) for tool in prompt.tools] or None,
                    **self._special_tokens,
                }
            )
        except (TemplateLimitError, RecursionError, MemoryError) as error:
            raise InvalidRequestError(
                f"{self._name} exceeds a limit with these messages: {reason_of(error)}.",
                param="messages",
            ) from error
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"{self._name} rejected the messages: {reason_of(error)}.", param="messages"
            ) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"{self._name} cannot render these messages.", param="messages"
            ) from error


def _in_channels(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return messages as templates of gpt-oss read them: one call each, followed by its result.

    The templates read only the first call of a message, take a result for that of the last call,
    and reject a call with both reasoning and content: these are joined as its reasoning.
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


def _read_fields(tool: Mapping[str, object], names: frozenset[str]) -> Mapping[str, object]:
    """Return a tool without the fields of clients that a template does not name."""
    function = tool.get("function")
    if not isinstance(function, dict) or function.keys() <= _FUNCTION_FIELDS:
        return tool
    kept = {
        name: one for name, one in function.items() if name in _FUNCTION_FIELDS or name in names
    }
    return {**tool, "function": kept}


def _for_template(
    message: ChatMessage, names: frozenset[str], roles_of_parts: frozenset[str]
) -> dict[str, object]:
    """Return a message, with the fields of the client that a template names."""
    written: dict[str, object] = {
        name: one for name, one in (message.extra or {}).items() if name in names
    }
    content: object = message.content
    if message.role in roles_of_parts:
        content = [{"type": _TEXT, _TEXT: message.content}]
    written |= {"role": message.role, "content": content}
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
