"""Arguments of calls as Python writes them: `key=value, ...`, with literals as values."""

from __future__ import annotations

from keyword import iskeyword
from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import (
    Alternation,
    Characters,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    Text,
    complement,
    replaced,
)
from cluster.structured.grammar.json_text import (
    BOOLEAN,
    CONTENT,
    ESCAPE,
    JSON_RULES,
    NULL,
    SPACE,
    STRING,
    VALUE,
    separated,
)
from cluster.structured.grammar.schemas.json_schema import read_members
from cluster.structured.grammar.schemas.members import members_in_order
from cluster.structured.grammar.schemas.schema_keywords import fail

if TYPE_CHECKING:
    from cluster.structured.grammar.turn import Grammar

__all__ = ["PYTHON_RULES", "read_python_arguments"]

_BOOLEAN = Alternation(tuple(map(Text, ("True", "False", "true", "false"))))
_NULL = Alternation((Text("None"), Text("null")))
"""The reader accepts the names of JSON, too."""
_AFTER_STRING = Lookahead(
    Concat(
        (
            SPACE,
            Characters(tuple((ord(c), ord(c)) for c in "),:]}")),
        )
    )
)


def _content(quote: str) -> Expression:
    """Return the content of a string; a slash is not escaped, unlike in JSON."""
    plain = Repeat(complement(((0x00, 0x1F), (ord(quote), ord(quote)), (0x5C, 0x5C))), 0, None)
    return Concat((plain, Repeat(Concat((*_escape(quote).parts, plain)), 0, None)))


def _escape(quote: str) -> Concat:
    characters = Characters(tuple((ord(c), ord(c)) for c in sorted(quote + "\\bfnrt")))
    return Concat((Text("\\"), characters))


_CONTENT = _content('"')
_NAME = Concat(
    (
        Characters(((0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))),
        Repeat(Characters(((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))), 0, None),
    )
)


def read_python_arguments(schema: str) -> Grammar:
    """Return the grammar of the arguments that a JSON schema allows.

    Raises InvalidRequestError.
    """
    rules, members, _ = read_members(schema)
    rules = {name: replaced(one, _as_python) for name, one in rules.items()}
    rules |= PYTHON_RULES
    if members is None:
        return rules, separated(Concat((_NAME, Text("="), VALUE)), 0, None)
    written: list[Expression] = []
    for member in members:
        name = member.name
        if not (name.isascii() and name.isidentifier()) or iskeyword(name):
            fail(member.path, "has a name that Python does not allow for an argument")
        written.append(Concat((Text(f"{name}="), replaced(member.value, _as_python))))
    required = [member.is_required for member in members]
    return rules, members_in_order(written, required, rules)


def _as_python(expression: Expression) -> Expression | None:
    # A pattern may equal one of these expressions within a string.
    if expression is BOOLEAN:
        return _BOOLEAN
    if expression is NULL:
        return _NULL
    if expression == CONTENT:
        return _CONTENT
    if expression == ESCAPE:
        return _escape('"')
    return _AFTER_STRING if isinstance(expression, Lookahead) else None


PYTHON_RULES: dict[str, Expression] = {
    **{name: replaced(one, _as_python) for name, one in JSON_RULES.items()},
    STRING.name: Alternation((Rule("doublequoted"), Rule("singlequoted"))),
    "doublequoted": Concat((Text('"'), _CONTENT, Text('"'), _AFTER_STRING)),
    "singlequoted": Concat((Text("'"), _content("'"), Text("'"), _AFTER_STRING)),
}
"""What the arguments of all calls share."""
