"""Compiles chat templates to Python code, in the sandbox that runs them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from types import CodeType
from typing import TYPE_CHECKING, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension

from cluster.serving.text.templates.rendering_budget import MAX_CPU_S
from cluster.serving.text.templates.template_limits import LimitedEnvironment
from cluster.serving.text.templates.value_sizes import check_text

if TYPE_CHECKING:
    from jinja2.parser import Parser

__all__ = [
    "InvalidTemplateError",
    "TemplateCode",
    "compile_template",
    "reason_of",
    "template_environment",
]

_MAX_REASON_LENGTH = 200
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]*")
"""The address of an object in memory; the text may end within an address."""


class InvalidTemplateError(ValueError):
    """A source is not a valid template; the message is the reason, without a full stop."""


@dataclass(frozen=True, slots=True)
class TemplateCode:
    """A compiled template, which any environment of `template_environment` can run."""

    code: CodeType
    variables: frozenset[str]
    """The variables that it reads, except variables of the environment."""
    names: frozenset[str]
    """The names of fields that it may read, and all other strings in it."""


def compile_template(source: str) -> TemplateCode:
    """Return the code of a template. Raises InvalidTemplateError.

    Python's compiler holds the GIL, for up to half a second for a malicious source of 32 KiB.
    """
    environment = template_environment()
    environment.start_compiling()
    try:
        code = environment.compile(source)
        parsed = environment.parse(source)
        variables = meta.find_undeclared_variables(parsed)
        names = {node.attr for node in parsed.find_all(nodes.Getattr)}
        names.update(n.value for n in parsed.find_all(nodes.Const) if isinstance(n.value, str))
    # Jinja also raises the errors of Python's compiler for the code that Jinja generates.
    except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidTemplateError(reason_of(error)) from error
    known = environment.globals
    return TemplateCode(code, frozenset(variables.difference(known)), frozenset(names))


def template_environment(cpu_s: float = MAX_CPU_S) -> LimitedEnvironment:
    """Return the sandbox of a template, in which a rendering may take `cpu_s`."""
    environment = LimitedEnvironment(
        cpu_s=cpu_s,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.add_filter("tojson", _to_json)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def reason_of(error: Exception) -> str:
    """Return the message of an error in one line, without addresses and a full stop."""
    text = _ADDRESS.sub("", str(error)[:_MAX_REASON_LENGTH]) or "out of memory"
    return " ".join(text.split()).rstrip(".")


class _GenerationBlock(Extension):
    """The tag around the assistant's output, which is used in training only and has no effect."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # The parameters of Transformers, in the same order.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> NoReturn:
    check_text(message)
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
