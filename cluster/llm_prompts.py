"""The prompts of the Python API: texts, token ids, dictionaries and conversations."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import msgspec

from cluster.serving.inputs import Prompt
from cluster.serving.openai.bodies.chat_body import check_open_end
from cluster.serving.openai.bodies.messages import Message, read_messages
from cluster.serving.openai.bodies.tool_fields import read_tools
from cluster.serving.schema.body_reader import read_part
from cluster.serving.text.templates.chat_prompt import ChatPrompt
from cluster.serving.text.templates.template_arguments import check_variable_names
from pagedray.errors import InvalidRequestError
from pagedray.field_checks import check_bool

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.serving.text.templates.chat_prompt import ChatMessage

__all__ = [
    "Conversation",
    "GivenPrompt",
    "SaltedPrompt",
    "read_conversations",
    "read_prompts",
    "read_stream_prompt",
    "read_texts",
]

GivenPrompt: TypeAlias = str | Sequence[int] | Mapping[str, object]
"""A text, its token ids, or a dictionary with `prompt` or `prompt_token_ids`."""
Conversation: TypeAlias = Sequence[Mapping[str, object]]
"""Messages with `role` and `content`."""

_NAMES = ("prompt", "prompt_token_ids", "cache_salt")
_CHAT_NAMES = frozenset(("add_generation_prompt", "continue_final_message", "messages", "tools"))
"""Variables of chat templates that other parameters set."""


@dataclass(frozen=True, slots=True)
class SaltedPrompt:
    """A prompt, whose prefixes are shared only with others of the same salt."""

    value: Prompt
    salt: str = ""


def read_prompts(
    given: GivenPrompt | Sequence[GivenPrompt], param: str = "prompts"
) -> list[SaltedPrompt]:
    """Return the prompts of a call, of which there may be one. Raises InvalidRequestError."""
    if isinstance(given, str | Mapping):
        return [_read_prompt(given, param)]
    items = _items_of(given, param)
    if items and _is_number(items[0]):
        return [_read_prompt(items, param)]
    return [_read_prompt(one, param) for one in items]


def read_conversations(
    given: Conversation | Sequence[Conversation],
    *,
    tools: Sequence[Mapping[str, object]] | None,
    adds_generation_prompt: bool | None,
    continues_final_message: bool,
    variables: Mapping[str, object] | None,
    template: str | None,
) -> list[SaltedPrompt]:
    """Return the conversations of a call, of which there may be one. Raises InvalidRequestError."""
    for name, value, kind, noun in (
        ("tools", tools, Iterable, "list"),
        ("chat_template_kwargs", variables, Mapping, "dictionary"),
        ("chat_template", template, str, "string"),
    ):
        if value is not None and not isinstance(value, kind):
            raise InvalidRequestError(f"{name} must be a {noun}.", param=name)
    check_bool("continue_final_message", continues_final_message)
    if adds_generation_prompt is not None:
        check_bool("add_generation_prompt", adds_generation_prompt)
    check_variable_names(variables or {}, "chat_template_kwargs", _CHAT_NAMES)
    check_open_end(bool(adds_generation_prompt), continues_final_message)
    if adds_generation_prompt is None:
        adds_generation_prompt = not continues_final_message
    items = _entries_of(given)
    conversations = [items] if not items or isinstance(items[0], Mapping) else items
    written = tuple(
        tool.for_template() for tool in read_tools(None if tools is None else _objects(tools))
    )
    return [
        SaltedPrompt(
            ChatPrompt(
                _messages(cast("Conversation", conversation)),
                written,
                adds_generation_prompt,
                continues_final_message,
                dict(variables or {}),
                template,
                is_template_trusted=True,
            )
        )
        for conversation in conversations
    ]


def read_stream_prompt(given: GivenPrompt | Conversation) -> SaltedPrompt:
    """Return a prompt, or a conversation. Raises InvalidRequestError."""
    if not isinstance(given, str | Mapping):
        items = _items_of(given, "prompt")
        if items and isinstance(items[0], Mapping):
            return SaltedPrompt(ChatPrompt(_messages(cast("Conversation", items))))
        return _read_prompt(items, "prompt")
    return _read_prompt(given, "prompt")


def read_texts(given: str | Iterable[str], param: str) -> list[str]:
    """Return the texts of a call, of which there may be one. Raises InvalidRequestError."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, Iterable) and not isinstance(given, Mapping):
        texts = list(given)
        if all(isinstance(text, str) for text in texts):
            return texts
    raise InvalidRequestError(f"{param} must be a string or a list of strings.", param=param)


def _is_number(given: object) -> bool:
    """Return whether a value may be a token id, also as an integer of another library."""
    return hasattr(given, "__index__") and not getattr(given, "ndim", 0)


def _read_prompt(given: GivenPrompt, param: str) -> SaltedPrompt:
    if isinstance(given, str):
        return SaltedPrompt(given)
    if isinstance(given, Mapping):
        return _read_dictionary(given)
    return SaltedPrompt(_token_ids(given, param))


def _read_dictionary(given: Mapping[str, object]) -> SaltedPrompt:
    present = {name: value for name, value in given.items() if value is not None}
    for name in present:
        if name not in _NAMES:
            raise InvalidRequestError(
                f"{name!r:.80} is not supported in a prompt, which may have {', '.join(_NAMES)}.",
                param=str(name)[:80],
            )
    salt, token_ids = present.get("cache_salt", ""), present.get("prompt_token_ids")
    if not isinstance(salt, str):
        raise InvalidRequestError("cache_salt must be a string.", param="cache_salt")
    if token_ids is not None:
        return SaltedPrompt(_token_ids(token_ids, "prompt_token_ids"), salt)
    text = present.get("prompt")
    if not isinstance(text, str):
        raise InvalidRequestError(
            "A prompt must have a string as prompt, or prompt_token_ids.", param="prompt"
        )
    return SaltedPrompt(text, salt)


def _token_ids(given: object, param: str) -> tuple[int, ...]:
    items = given if isinstance(given, list | tuple) else _items_of(given, param)
    # Several times as fast as the code below, which matters for long prompts. Its errors are
    # ValueErrors, such as that for a lone surrogate in a text.
    with contextlib.suppress(ValueError):
        return msgspec.convert(items, tuple[int, ...])
    if not any(isinstance(one, bool) for one in items):
        try:
            # Lists may hold integers of other libraries.
            return tuple(map(operator.index, items))
        except TypeError:
            pass
    raise _no_prompt(param)


def _items_of(given: object, param: str) -> list[Any]:  # Any: as the caller says
    """Return the entries of anything but bytes, which are no token ids, and sets without order."""
    others = bytes, bytearray, memoryview, set, frozenset
    if isinstance(given, Iterable) and not isinstance(given, others):
        # Any: what an array of another library returns.
        to_list: Callable[[], Any] | None = getattr(given, "tolist", None)
        items = list(given) if to_list is None else to_list()
        # An array without a dimension has none.
        if isinstance(items, list):
            return items
    raise _no_prompt(param)


def _no_prompt(param: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} must be texts or lists of token ids.", param=param)


def _messages(given: Conversation) -> tuple[ChatMessage, ...]:
    messages = [
        read_part(Message, one, f"messages.{index}")
        for index, one in enumerate(_objects(_entries_of(given)))
    ]
    return read_messages(messages)


def _objects(entries: Iterable[object]) -> list[object]:
    """Return entries with each mapping as the object of JSON that it would be."""
    return [
        {str(name): value for name, value in one.items()} if isinstance(one, Mapping) else one
        for one in entries
    ]


def _entries_of(given: object) -> list[Any]:  # Any: messages, or conversations
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return list(given)
    raise InvalidRequestError(
        "messages must be a list of dictionaries with role and content, or a list of such lists.",
        param="messages",
    )
