"""The chat template of a checkpoint, which renders messages to the prompt's text.

Templates run in Jinja's sandbox. Templates of requests are rendered in another process.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.serving.text.template_arguments import ChatMessage, ChatPrompt, MessageToolCall
from pagedray.errors import CheckpointError, InvalidRequestError, StartupError
from pagedray.files import has_file
from pagedray.text import quote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2.parser import Parser

__all__ = ["ChatTemplate", "ChatTemplates", "InvalidTemplateError"]

_MAX_REASON_LENGTH = 200
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

_DEFAULT = "default"
_TOOL_USE = "tool_use"
_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"


class InvalidTemplateError(CheckpointError):
    """A source is not a valid template."""

    def __init__(self, origin: str, reason: str) -> None:
        """`reason` is a sentence without its full stop."""
        super().__init__(f"{origin} has an invalid chat template: {reason}.")


class _GenerationBlock(Extension):
    """The tag around the assistant's output, which is used in training only and has no effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and its special tokens."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, origin: str, owner: str = "model"
    ) -> None:
        """Errors of a rendering name the owner of the template.

        Raises InvalidTemplateError that names `origin` if the template is invalid.
        """
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            parsed = environment.parse(source)
            variables = meta.find_undeclared_variables(parsed)
            names = {node.attr for node in parsed.find_all(nodes.Getattr)}
            texts = (node.value for node in parsed.find_all(nodes.Const))
        # Jinja also raises the errors of Python's compiler for the generated code.
        except (
            jinja2.TemplateError,
            SyntaxError,
            ValueError,
            RecursionError,
            MemoryError,
        ) as error:
            raise InvalidTemplateError(origin, _reason_of(error)) from error
        self._special_tokens = dict(special_tokens)
        self._name = f"The {owner}'s chat template"
        self.source = source
        """The template's source."""
        self._has_channels = "<|channel|>" in source
        own = {*special_tokens, "messages", "add_generation_prompt", "tools"}
        self.variables = frozenset(variables - own - environment.globals.keys())
        """The variables that it reads and that a request may set."""
        self.names = frozenset(names.union(one for one in texts if isinstance(one, str)))
        """The names of fields that it may read, and all other strings in it."""

    def render(self, prompt: ChatPrompt) -> str:
        """Return the prompt for the next turn, or for the rest of the last turn.

        Raises InvalidRequestError if the template rejects the messages.
        """
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
            if self._writes_text(role, frozenset()) is False:
                dropped.append(role)
        return tuple(dropped)

    @cached_property
    def _roles_of_parts(self) -> frozenset[str]:
        """The roles with content that the template only reads as a list of parts."""
        if _TEXT not in self.names:
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
        written = [_for_template(message, self.names, roles_of_parts) for message in messages]
        try:
            return self._template.render(
                {
                    "documents": None,
                    **prompt.variables,
                    "messages": written,
                    "add_generation_prompt": prompt.adds_generation_prompt,
                    "tools": [_read_fields(tool, self.names) for tool in prompt.tools] or None,
                    **self._special_tokens,
                }
            )
        except (RecursionError, MemoryError) as error:
            raise InvalidRequestError(
                f"{self._name} exceeds a limit with these messages: {_reason_of(error)}.",
                param="messages",
            ) from error
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"{self._name} rejected the messages: {_reason_of(error)}.", param="messages"
            ) from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"{self._name} cannot render these messages.", param="messages"
            ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    """Return a sandbox with the functions of Transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # The parameters of Transformers, in the same order.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _reason_of(error: Exception) -> str:
    """Return the message of an error in one line, without a full stop."""
    text = str(error)[:_MAX_REASON_LENGTH] or "out of memory"
    return " ".join(text.split()).rstrip(".")


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


class ChatTemplates:
    """A checkpoint's templates for conversations without and with tools."""

    def __init__(self, *, default: ChatTemplate | None, tool_use: ChatTemplate | None) -> None:
        """Without `tool_use`, `default` is used for both."""
        self._default = default
        self._tool_use = tool_use or default

    @classmethod
    def from_folder(
        cls, folder: Path, settings: Mapping[str, object], special_tokens: Mapping[str, str]
    ) -> ChatTemplates | None:
        """Return the templates of a folder, or None; settings belong to the tokenizer.

        Files override the settings, as in Transformers. Raises CheckpointError.
        """
        sources = _files(folder) or _configured(settings, folder / "tokenizer_config.json")
        default, tool_use = (
            ChatTemplate(sources[name][1], special_tokens, origin=str(sources[name][0]))
            if name in sources
            else None
            for name in (_DEFAULT, _TOOL_USE)
        )
        if default is None and tool_use is None:
            return None
        return cls(default=default, tool_use=tool_use)

    @classmethod
    def from_option(cls, given: str, special_tokens: Mapping[str, str]) -> ChatTemplates:
        """Return the templates of the option chat_template: a file, or a template in one line.

        As in vLLM, a value that is not a file is a template if it contains a brace or a line feed,
        and its backslash escapes are decoded. Raises StartupError.
        """
        origin, source = given, _option_source(given)
        if source is None:
            origin, source = "The option chat_template", _unescaped(given)
        return cls(default=ChatTemplate(source, special_tokens, origin=origin), tool_use=None)

    def template_for(self, tools: Sequence[Mapping[str, object]]) -> ChatTemplate:
        """Return the template of a conversation with these tools. Raises InvalidRequestError."""
        template = self._tool_use if tools else self._default
        if template is None:
            raise InvalidRequestError(
                "The model has no chat template for conversations without tools.", param="messages"
            )
        return template

    def variables(self, *, has_tools: bool) -> frozenset[str]:
        """Return the variables that a request may set in the template with or without tools."""
        template = self._tool_use if has_tools else self._default
        return frozenset() if template is None else template.variables

    def keeps_system_messages(self, *, has_tools: bool) -> bool:
        """Return whether later system messages are written at their places."""
        template = self._tool_use if has_tools else self._default
        return template is None or template.keeps_system_messages

    @property
    def dropped_roles(self) -> tuple[str, ...]:
        """The roles with messages that a template writes without their text."""
        templates = [one for one in (self._default, self._tool_use) if one is not None]
        return tuple(dict.fromkeys(role for one in templates for role in one.dropped_roles))

    @property
    def tool_source(self) -> str:
        """The source of the template for conversations with tools."""
        assert self._tool_use is not None
        return self._tool_use.source


def _files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return the path and source of each template that is a file of its own."""
    paths = {path.stem: path for path in sorted((folder / _FOLDER).glob("*.jinja"))}
    if has_file(folder / _FILE):
        paths[_DEFAULT] = folder / _FILE
    return {name: (path, _text(path)) for name, path in paths.items()}


def _configured(settings: Mapping[str, object], path: Path) -> dict[str, tuple[Path, str]]:
    """Return the path and source of each template in the settings."""
    given = settings.get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        return {_DEFAULT: (path, given)}
    if isinstance(given, list):
        entries = [entry if isinstance(entry, Mapping) else {} for entry in given]
        pairs = [(entry.get("name"), entry.get("template")) for entry in entries]
    else:
        pairs = list(given.items()) if isinstance(given, Mapping) else [(None, None)]
    sources: dict[str, tuple[Path, str]] = {}
    for name, source in pairs:
        if not isinstance(name, str) or not isinstance(source, str):
            raise CheckpointError(
                f"{path}: chat_template must be a string, or a list of objects with the strings "
                "name and template."
            )
        sources[name] = (path, source)
    return sources


def _option_source(given: str) -> str | None:
    """Return the text of the file that an option names; None if it is a template itself."""
    try:
        return Path(given).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise StartupError(f"chat_template {given} is not valid UTF-8.") from error
    except (OSError, ValueError) as error:
        if any(character in given for character in "{}\n"):
            return None
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartupError(
            f"chat_template {quote(given)} is neither a template nor a readable file: {reason}."
        ) from error


def _unescaped(text: str) -> str:
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise StartupError(
            f"chat_template {quote(text)} has an invalid escape: {error.reason}."
        ) from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not valid UTF-8.") from error
