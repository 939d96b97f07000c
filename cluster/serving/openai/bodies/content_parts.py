"""The content of a message of chat completions: a text, or a list of parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from cluster.serving.schema.body import OpenPart
from cluster.serving.schema.body_reader import read_part
from cluster.serving.schema.field_errors import missing_field
from pagedray.errors import InvalidRequestError
from pagedray.text import quote

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = [
    "CONTENT_PARTS",
    "MessageContent",
    "RefusalPart",
    "TextPart",
    "read_content",
]

_MEDIA = frozenset(
    (
        "audio_url",
        "file",
        "image_url",
        "input_audio",
        "input_file",
        "input_image",
        "video_url",
    )
)


class TextPart(OpenPart):
    """A part of a message's text."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(OpenPart):
    """A refusal of the assistant, which is part of the message's text."""

    type: Literal["refusal"]
    refusal: str


class ThinkingPart(OpenPart):
    """The reasoning of the assistant; the chat template decides whether it is read."""

    type: Literal["thinking"]
    thinking: str
    closed: Literal[True] = True


_Part = TextPart | RefusalPart | ThinkingPart

CONTENT_PARTS: Mapping[str, type[_Part]] = {
    "text": TextPart,
    "input_text": TextPart,
    "output_text": TextPart,
    "refusal": RefusalPart,
    "thinking": ThinkingPart,
}


class MessageContent(NamedTuple):
    """The text of a message, and the reasoning in its parts, if there is any."""

    text: str
    reasoning: str | None = None


def read_content(given: object, where: str, *, role: str, is_needed: bool) -> MessageContent:
    """Return the content of a message. Raises InvalidRequestError."""
    if isinstance(given, str):
        return MessageContent(given)
    if given is None:
        if is_needed:
            raise InvalidRequestError(f"{where} is required.", param=where)
        return MessageContent("")
    if not isinstance(given, list):
        raise _not_parts(where)
    texts: list[str] = []
    thoughts: list[str] = []
    for index, one in enumerate(given):
        text = _plain_text(one)
        if text is not None:
            texts.append(text)
            continue
        if not isinstance(one, dict):
            raise _not_parts(where)
        part = _read_part(one, f"{where}.{index}", role)
        if isinstance(part, TextPart):
            texts.append(part.text)
        elif isinstance(part, RefusalPart):
            texts.append(part.refusal)
        else:
            thoughts.append(part.thinking)
    return MessageContent("".join(texts), "".join(thoughts) if thoughts else None)


def _plain_text(part: object) -> str | None:
    """Return the text of a string or a text part; None if it is another part."""
    if type(part) is str:
        return part
    # As TextPart, whose validation would take ten times as long for each of thousands.
    if type(part) is dict and part.get("type") == "text" and type(text := part.get("text")) is str:
        return text
    return None


def _read_part(given: dict[str, object], where: str, role: str) -> _Part:
    kind = given.get("type")
    if kind is None:
        raise missing_field(("type",), given, where, CONTENT_PARTS.values())
    if isinstance(kind, str) and kind in _MEDIA:
        raise InvalidRequestError(
            f"{where} is not supported: the model only reads text, not {kind} parts.",
            param=where,
        )
    found = CONTENT_PARTS.get(kind) if isinstance(kind, str) else None
    if found is None:
        *names, last = (f"'{name}'" for name in CONTENT_PARTS)
        raise InvalidRequestError(
            f"{where}.type must be one of {', '.join(names)} or {last}, not {quote(kind)}.",
            param=f"{where}.type",
        )
    if found is not TextPart and role != "assistant":
        raise InvalidRequestError(f"{where} of type {kind} requires role = assistant.", param=where)
    return read_part(found, given, where)


def _not_parts(where: str) -> InvalidRequestError:
    return InvalidRequestError(f"{where} must be a string or a list of text parts.", param=where)
