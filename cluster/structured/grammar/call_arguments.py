"""A turn in which the model may write text, and calls of tools that follow their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from keyword import iskeyword
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

import msgspec

from cluster.structured.grammar.expressions import (
    BOOLEAN,
    CONTENT,
    ESCAPE,
    JSON_RULES,
    NULL,
    SPACE,
    STRING,
    VALUE,
    Alternation,
    Characters,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    Text,
    complement,
    invalid_structure,
    optional,
    replaced,
    separated,
)
from cluster.structured.grammar.json_schema import members_in_order, read_json_schema, read_members
from cluster.structured.grammar.rewrites import counted_letters
from cluster.structured.grammar.schema_keywords import (
    fail,
    finite_values,
    is_unrestricted,
    kinds_of,
    resolved,
    types_of_value,
)
from cluster.structured.grammar.schema_strings import SchemaStrings
from cluster.structured.grammar.turn import (
    Grammar,
    Texts,
    other_text,
    spaced,
    text_until,
    under_prefix,
)
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from cluster.structured.grammar.json_schema import Member

__all__ = [
    "ARG_KEYS",
    "PARAMETERS",
    "CallText",
    "CallsStructure",
    "ElementNotation",
    "LeadingCallsStructure",
    "Notation",
    "read_calls",
    "read_leading_calls",
    "read_python_arguments",
    "read_value",
]

_ANY_TEXT = Rule("anytext")
"""Any text up to the end mark, which is part of it."""
_MAX_KEY_LENGTH = 256
_NOT_IN_KEYS = "<>\n\0"
_KEY = Repeat(complement(tuple((ord(one), ord(one)) for one in sorted(_NOT_IN_KEYS))), 1, 64)
_ANGLE = (ord("<"), ord("<"))
_LETTER = complement((_ANGLE,))
_PYTHON_BOOLEAN = Alternation(tuple(map(Text, ("True", "False", "true", "false"))))
_PYTHON_NULL = Alternation((Text("None"), Text("null")))
"""The reader accepts the names of JSON, too."""
_AFTER_PYTHON_STRING = Lookahead(
    Concat((SPACE, Characters(tuple((ord(c), ord(c)) for c in "),:]}"))))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementNotation:
    """How a model writes elements. A value ends where its end mark first occurs."""

    key_begin: str
    key_end: Expression
    value_end: str
    line: str
    """The text before the end mark that is no part of the value."""

    def rules(self) -> dict[str, Expression]:
        """Return the rules that the arguments of all calls share."""
        text_rules, start = text_until({self.value_end: Concat(())}, "valuetext", may_end=False)
        json_rules = {name: replaced(one, _as_element) for name, one in JSON_RULES.items()}
        return json_rules | {STRING.name: _ELEMENT_STRING} | text_rules | {_ANY_TEXT.name: start}

    def read_arguments(self, schema: str) -> Grammar:
        """Return the grammar of the arguments that a JSON schema allows.

        Raises InvalidRequestError.
        """
        rules, members, root = read_members(schema)
        rules = {name: replaced(one, _as_element) for name, one in rules.items()}
        if members is None:
            any_member = self._member(_KEY, _ANY_TEXT)
            return rules, Repeat(any_member, 0, None)
        values = _ElementValues(self, root, rules)
        written = [self._member(Text(_checked_key(one)), values.value_of(one)) for one in members]
        required = [member.is_required for member in members]
        return rules, members_in_order(written, required, rules, separator=Concat(()))

    def _member(self, key: Expression, value: Expression) -> Expression:
        return Concat((Text(self.key_begin), key, self.key_end, value, SPACE))


class _ElementValues:
    """Makes the expressions of values with their end marks."""

    def __init__(
        self, notation: ElementNotation, root: object, rules: dict[str, Expression]
    ) -> None:
        self._notation = notation
        self._root = root
        self._strings = RawStrings(rules)

    def value_of(self, member: Member) -> Expression:
        """Return the possible values of a member, as they are read back."""
        schema, root = member.schema, self._root
        kinds = kinds_of(schema, root)
        if is_unrestricted(schema, root) and (not kinds or "string" in kinds):
            return _ANY_TEXT
        if (values := finite_values(schema, root)) is not None:
            return self._listed(values, kinds, member.path)
        if kinds == {"string"}:
            return self._string(schema, member.path)
        value = replaced(member.value, _as_element)
        return Concat((value, SPACE, Text(self._notation.value_end)))

    def _string(self, schema: object, path: str) -> Expression:
        """Return the strings of a schema that has no values of other types."""
        if is_unrestricted(schema, self._root):
            return _ANY_TEXT
        if (values := finite_values(schema, self._root)) is not None:
            return self._listed(values, {"string"}, path)
        schema = resolved(schema, self._root)
        assert isinstance(schema, Mapping)
        branches = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(branches, list):
            return Alternation(tuple(self._string(branch, path) for branch in branches))
        return Concat((self._strings.string_of(schema, path), self._end()))

    def _listed(self, values: list[object], kinds: Set[str], path: str) -> Expression:
        texts = dict.fromkeys(self._text_of(value, kinds, path) for value in values)
        return Concat((Alternation(tuple(map(Text, texts))), self._end()))

    def _text_of(self, value: object, kinds: Set[str], path: str) -> str:
        """Return a value as a text that is read as this value."""
        end = self._notation.value_end
        if isinstance(value, str) and read_value(value, kinds) == value:
            if end in value or "\0" in value:
                fail(path, f"has a value with {end} or NUL, which the format of calls excludes")
            return value
        return json.dumps(value, ensure_ascii=False).replace("<", _ESCAPED_ANGLE)

    def _end(self) -> Expression:
        return Text(self._notation.line + self._notation.value_end)


def _checked_key(member: Member) -> str:
    name = member.name
    if not 0 < len(name) <= _MAX_KEY_LENGTH or not set(name).isdisjoint(_NOT_IN_KEYS):
        fail(
            member.path,
            f"must have a name of 1 to {_MAX_KEY_LENGTH} characters without <, > and line feeds",
        )
    return name


def _as_element(expression: Expression) -> Expression | None:
    """Return a replacement for a part of JSON, in which no string can contain an end mark."""
    match expression:
        case Text(text) if "<" in text:
            return Text(text.replace("<", _ESCAPED_ANGLE))
        case Characters():
            return without_angle(expression)
        case Lookahead():
            return _AFTER_ELEMENT_STRING
    return None


def _one_of(characters: str) -> Characters:
    return Characters(tuple((ord(one), ord(one)) for one in sorted(characters)))


_ESCAPED_ANGLE = "\\u003c"

_AFTER_ELEMENT_STRING = Lookahead(Concat((SPACE, _one_of(",:<]}"))))

_ELEMENT_ESCAPE = Concat((Text("\\"), _one_of('"\\/bfnrt')))

_CONTROLS = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))

_ANGLES = Repeat(_one_of("<"), 1, None)

_AFTER_ANGLE = complement((*_CONTROLS, (ord("/"), ord("/")), (ord("<"), ord("<"))))

_ELEMENT_STRING = Concat(
    (
        Text('"'),
        Repeat(
            Alternation(
                (
                    complement((*_CONTROLS, (ord("<"), ord("<")))),
                    _ELEMENT_ESCAPE,
                    Concat((_ANGLES, Alternation((_AFTER_ANGLE, _ELEMENT_ESCAPE)))),
                )
            ),
            0,
            None,
        ),
        Repeat(_one_of("<"), 0, None),
        Text('"'),
        _AFTER_ELEMENT_STRING,
    )
)
"""A string of JSON without `</`."""
PARAMETERS = ElementNotation(
    key_begin="<parameter=", key_end=Text(">\n"), value_end="</parameter>", line="\n"
)

ARG_KEYS = ElementNotation(
    key_begin="<arg_key>",
    key_end=Concat((Text("</arg_key>"), SPACE, Text("<arg_value>"))),
    value_end="</arg_value>",
    line="",
)


class RawStrings(SchemaStrings):
    """Makes strings without `<`, so that no mark can be in them."""

    any_string = any_text = Repeat(_LETTER, 0, None)
    _rule_prefix = "raw"

    def limited_string(self, minimum: int, maximum: int | None) -> Expression:
        return counted_letters((_LETTER,), minimum, maximum, (), prefix="raw", rules=self._rules)

    def string_of_pattern(self, parts: tuple[Expression, ...]) -> Expression:
        return replaced(Concat(parts), _without_angle)


def without_angle(characters: Characters) -> Characters:
    """Return characters other than `<`."""
    return complement((*complement(characters.ranges).ranges, _ANGLE))


def _without_angle(expression: Expression) -> Expression | None:
    if isinstance(expression, Text) and "<" in expression.text:
        raise invalid_structure(
            "structure requires '<' in a string, which the format of tool calls does not allow."
        )
    return without_angle(expression) if isinstance(expression, Characters) else None


def read_value(text: str, kinds: Set[str]) -> object:
    """Return the value of a text; a text that is not JSON of an allowed type is a string.

    `kinds` are the types that the schema allows, empty if it does not specify them.
    """
    if kinds == {"string"}:
        return text
    written = text.strip()
    if "boolean" in kinds and written.lower() in ("true", "false"):
        written = written.lower()
    try:
        value = json.loads(written, parse_constant=_reject)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    is_string = "string" in kinds and types_of_value(value).isdisjoint(kinds)
    return text if is_string else value


def _reject(name: str) -> NoReturn:
    raise ValueError(name)


def _python_content(quote: str) -> Expression:
    """Return the content of a string; a slash is not escaped, unlike in JSON."""
    plain = Repeat(complement(((0x00, 0x1F), (ord(quote), ord(quote)), (0x5C, 0x5C))), 0, None)
    return Concat((plain, Repeat(Concat((*_python_escape(quote).parts, plain)), 0, None)))


def _python_escape(quote: str) -> Concat:
    characters = Characters(tuple((ord(c), ord(c)) for c in sorted(quote + "\\bfnrt")))
    return Concat((Text("\\"), characters))


_PYTHON_CONTENT = _python_content('"')

_PYTHON_NAME = Concat(
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
        return rules, separated(Concat((_PYTHON_NAME, Text("="), VALUE)), 0, None)
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
        return _PYTHON_BOOLEAN
    if expression is NULL:
        return _PYTHON_NULL
    if expression == CONTENT:
        return _PYTHON_CONTENT
    if expression == ESCAPE:
        return _python_escape('"')
    return _AFTER_PYTHON_STRING if isinstance(expression, Lookahead) else None


PYTHON_RULES: dict[str, Expression] = {
    **{name: replaced(one, _as_python) for name, one in JSON_RULES.items()},
    STRING.name: Alternation((Rule("doublequoted"), Rule("singlequoted"))),
    "doublequoted": Concat((Text('"'), _PYTHON_CONTENT, Text('"'), _AFTER_PYTHON_STRING)),
    "singlequoted": Concat((Text("'"), _python_content("'"), Text("'"), _AFTER_PYTHON_STRING)),
}
"""Rules that the arguments of all calls share."""

Notation = Literal["json", "python", "parameters", "arg_keys"]
"""How arguments are written."""
_READERS: Mapping[Notation, Callable[[str], Grammar]] = {
    "json": read_json_schema,
    "python": read_python_arguments,
    "parameters": PARAMETERS.read_arguments,
    "arg_keys": ARG_KEYS.read_arguments,
}
_RULES: Mapping[Notation, dict[str, Expression]] = {
    "json": JSON_RULES,
    "python": PYTHON_RULES,
    "parameters": PARAMETERS.rules(),
    "arg_keys": ARG_KEYS.rules(),
}
"""Rules that the arguments of all calls share."""


class CallText(msgspec.Struct, frozen=True, array_like=True):
    """A call of one tool."""

    tool: str
    begin: Texts
    schema: str
    """The JSON schema of its arguments."""
    end: Texts


class CallsStructure(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a structure of this kind, as JSON."""

    mark: str
    """How calls begin; it may be a special token."""
    opening: Texts
    """The text after the mark."""
    calls: tuple[CallText, ...]
    separator: Texts
    closing: Texts
    """The end of the turn, after its calls."""
    is_parallel: bool
    """Whether there may be several calls."""
    notation: Notation = "json"


class LeadingCallsStructure(CallsStructure, frozen=True, kw_only=True):
    """The text of a structure of this kind, as JSON; the mark is optional in it."""

    beginnings: tuple[Texts, ...]
    """Beginnings that only a turn of calls can have."""


_Given = TypeVar("_Given", bound=CallsStructure)


def read_calls(text: str) -> Grammar:
    """Return the grammar: any text, which calls may follow from the first mark on.

    Raises InvalidRequestError.
    """
    given = _decoded(text, CallsStructure)
    rules, calls = _read_calls(given)
    text_rules, start = text_until({given.mark: calls}, "text", may_end=True)
    return rules | text_rules, start


def read_leading_calls(text: str) -> Grammar:
    """Return the grammar: calls, or any text that does not begin as they do.

    Raises InvalidRequestError.
    """
    given = _decoded(text, LeadingCallsStructure)
    rules, calls = _read_calls(given)
    text_rules, other = other_text(given.beginnings)
    before = Concat((_WHITESPACE, optional(Text(given.mark)), _WHITESPACE))
    return rules | text_rules, Alternation((Concat((before, calls)), other))


_WHITESPACE = Repeat(Characters(((0x09, 0x0A), (0x20, 0x20))), 0, None)


def _read_calls(given: CallsStructure) -> tuple[dict[str, Expression], Rule]:
    """Return rules, and the rule of everything from the mark on."""
    shared = _RULES[given.notation]
    rules = dict(shared)
    choices: list[Expression] = []
    for number, call in enumerate(given.calls):
        arguments = _arguments(call, given.notation)
        own_rules, start = under_prefix(arguments, f"call{number}part", shared=shared)
        choice = Rule(f"call{number}")
        rules |= own_rules
        rules[choice.name] = Concat((spaced(call.begin), start, spaced(call.end)))
        choices.append(choice)
    one = Alternation(tuple(choices))
    more = Repeat(Concat((spaced(given.separator), one)), 0, None)
    calls = Rule("calls")
    rules[calls.name] = Concat(
        (spaced(given.opening), one, *((more,) if given.is_parallel else ()), spaced(given.closing))
    )
    return rules, calls


def _decoded(text: str, kind: type[_Given]) -> _Given:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise invalid_structure(f"structure is not a valid list of calls: {error}.") from error


def _arguments(call: CallText, notation: Notation) -> Grammar:
    try:
        return _READERS[notation](call.schema)
    except InvalidRequestError as error:
        # It begins with the name of the parameter.
        what = str(error).removeprefix("structure ")
        raise invalid_structure(
            f"structure has the strict tool {call.tool!r}, which {what}"
        ) from error
