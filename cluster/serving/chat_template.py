"""The chat template of a checkpoint: messages to prompt text.

A template is the checkpoint's, never a request's. It runs in a sandbox.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedray.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.parser import Parser

__all__ = ["ChatMessage", "ChatTemplate"]

_MAX_REASON_LENGTH = 200


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


class _GenerationBlock(Extension):
    """The tag that marks what an assistant says, which matters in training only."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and the names of the special tokens that it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str) -> None:
        """Raises CheckpointError, naming `origin`, if the source is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{origin} has a broken chat template: {error}.") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the prompt that asks the assistant for the next turn.

        Raises InvalidRequestError if the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=[asdict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            reason = " ".join(str(error).split())[:_MAX_REASON_LENGTH]
            raise InvalidRequestError(
                f"The model's chat template refuses the messages: {reason}", param="messages"
            ) from error
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                "The model's chat template cannot write these messages.", param="messages"
            ) from error


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
