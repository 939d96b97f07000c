"""The variables that a request sets in the chat template of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from cluster.serving.json_body import json_text
from pagedray.errors import InvalidRequestError, invalid_field
from pagedray.text import quote_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Set as AbstractSet

__all__ = [
    "EFFORTS",
    "MAX_DOCUMENTS",
    "MAX_EFFORT",
    "ChatMessage",
    "ChatPrompt",
    "Effort",
    "MessageToolCall",
    "TemplateArguments",
    "check_effort",
    "check_variable_names",
]

MAX_DOCUMENTS = 1024
_MAX_NAMES = 64
_MAX_NAME_LENGTH = 64
_MAX_BYTES = 2**16
"""Bytes of the variables as JSON."""
_OWN_NAMES = frozenset(
    ("add_generation_prompt", "continue_final_message", "documents", "messages", "tools")
)
"""Variables that other parameters set."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
EFFORTS: tuple[str, ...] = get_args(Effort)
MAX_EFFORT = 0.99
"""The highest effort as a number, which the templates of a few models read."""


@dataclass(frozen=True, slots=True)
class TemplateArguments:
    """The parameters of a request that set variables."""

    given: object
    """`chat_template_kwargs`."""
    effort: str | float | None = None
    """An `Effort`, or a number."""
    documents: object = None
    effort_param: str = "reasoning_effort"
    """The client's name of the effort."""

    def variables(
        self, known: frozenset[str] | None, note_ignored: Callable[[str], None]
    ) -> dict[str, object]:
        """Return the `known` variables, which the template reads.

        All are returned if `known` is None: the template is the request's own. `note_ignored` is
        called with the name of a parameter that sets other variables. Raises InvalidRequestError.
        """
        variables = _checked(self.given)
        if known is not None and any(name not in known for name in variables):
            note_ignored("chat_template_kwargs")
        if self.effort is not None:
            effects: dict[str, object] = {
                "reasoning_effort": self.effort,
                # Some models reason by default, and others only if this variable is true.
                "enable_thinking": self.effort != "none",
            }
            if known is not None and known.isdisjoint(effects):
                note_ignored(self.effort_param)
            variables = {**effects, **variables}
        if self.documents is not None:
            variables["documents"] = _checked_documents(self.documents, known)
        return {name: value for name, value in variables.items() if known is None or name in known}


def check_effort(given: object, param: str) -> str | float | None:
    """Return an effort, which may be a number. Raises InvalidRequestError."""
    if given is None or (isinstance(given, str) and given in EFFORTS):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given <= MAX_EFFORT:
        return float(given)
    names = ", ".join(f"'{name}'" for name in EFFORTS)
    raise invalid_field(
        param,
        f"must be one of {names}, or a number from 0 to {MAX_EFFORT}, not {quote_json(given)}.",
    )


def check_variable_names(names: Iterable[object], param: str, taken: AbstractSet[str]) -> None:
    """Raise InvalidRequestError if a name is not one of a variable, or if a parameter has it."""
    for name in names:
        if not isinstance(name, str) or not name.isidentifier() or len(name) > _MAX_NAME_LENGTH:
            raise invalid_field(
                param, f"must have names of variables of at most {_MAX_NAME_LENGTH} characters."
            )
        if name in taken:
            raise invalid_field(
                f"{param}.{name}", f"is not supported: {name} is a parameter of its own."
            )


def _checked(given: object) -> dict[str, object]:
    param = "chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, dict) or len(given) > _MAX_NAMES:
        raise invalid_field(param, f"must be an object of at most {_MAX_NAMES} entries.")
    check_variable_names(given, param, _OWN_NAMES)
    json_text(given, param, most_bytes=_MAX_BYTES)
    return given


def _checked_documents(given: object, known: frozenset[str] | None) -> list[object]:
    param = "documents"
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise InvalidRequestError("documents must be a list of objects.", param=param)
    if given and known is not None and "documents" not in known:
        raise InvalidRequestError(
            "documents is not supported: the model's chat template does not read it.", param=param
        )
    return given


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
    """The id of the call that a message of a tool answers."""
    name: str | None = None
    """The name of the author; in a tool's turn, of the tool."""
    reasoning: str | None = None
    """The model's reasoning before an assistant's turn."""
    extra: Mapping[str, object] | None = None
    """Further fields that the chat template may read."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model to continue."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """Tools in the format of chat templates: `{"type": "function", "function": ...}`."""
    adds_generation_prompt: bool = True
    """Whether the rendered text ends with the start of an assistant turn."""
    continues_final_message: bool = False
    """Whether the model continues the text of the last message, in that message's role."""
    variables: Mapping[str, object] = field(default_factory=dict)
    """Values of further variables that the chat template reads."""
    template: str | None = None
    """The source of a chat template that replaces the model's."""
    is_template_trusted: bool = False
    """Whether `template` comes from the operator's program, and not from a client."""
