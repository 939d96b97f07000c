"""Reads structural tags: free text in which marks begin parts with a structure of their own.

Both forms that vLLM takes are read: `structures` and `triggers`, and a `format` of nested parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, NoReturn

import msgspec

from cluster.structured.grammar.expressions import (
    Alternation,
    Concat,
    Expression,
    Rule,
    Text,
    invalid_structure,
)
from cluster.structured.grammar.turn import MAX_STATES, Grammar, text_until, under_prefix
from pagedray.errors import InvalidRequestError
from pagedray.text import nearest_name, quote

__all__ = ["read_structural_tag"]

_MAX_DEPTH = 16
_MAX_PARTS = 256
_EMPTY = Concat(())
ReadOne = Callable[[str, str], Grammar]

_MOST_SHOWN = 64
"""Characters of an unknown name that an error shows."""
Part = Mapping[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class _Following:
    """The continuation of a part: a literal text and an expression, both perhaps empty."""

    end: str = ""
    rest: Expression = _EMPTY

    @property
    def expression(self) -> Expression:
        return Concat((Text(self.end), self.rest)) if self.end else self.rest


def read_structural_tag(text: str, read_one: ReadOne) -> Grammar:
    """Return the grammar; `read_one` returns that of another kind of structure and a text.

    Raises InvalidRequestError.
    """
    try:
        given = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise invalid_structure(f"structure is not a valid structural tag: {error}.") from error
    reader = _Reader(read_one)
    if not isinstance(given, dict):
        fail_at("", "must be an object")
    check_type(given, "", "structural_tag")
    if "format" in given:
        check_names(given, "", ("type", "format"))
        start = reader.read(given["format"], "format", _Following(), depth=0)
    else:
        start = reader.read_triggers(given)
    return reader.rules, start


class _Reader:
    """Reads parts from their continuations, which the rules of free text include."""

    def __init__(self, read_one: ReadOne) -> None:
        self.rules: dict[str, Expression] = {}
        self._read_one = read_one
        self._num_parts = 0
        self._num_states = 0

    def read_triggers(self, given: Part) -> Expression:
        """Return the expression of structures with a schema each, in free text."""
        check_names(given, "", ("type", "structures", "triggers"))
        tags = []
        for index, one in enumerate(list_of(given, "structures", "")):
            path = f"structures.{index}"
            check_names(one, path, ("begin", "schema", "end"))
            tag = Tag(
                path=path,
                begin=text_of(one, "begin", path),
                content={"type": "json_schema", "json_schema": schema_of(one, "schema", path)},
                content_path=f"{path}.schema",
                end=string_of(one, "end", path),
            )
            tags.append(tag)
        return self._triggered(given, tags, "", _Following(), 0)

    def read(self, part: object, path: str, following: _Following, depth: int) -> Expression:
        """Return the expression of a part and of its continuation."""
        self._num_parts += 1
        if depth > _MAX_DEPTH or self._num_parts > _MAX_PARTS:
            fail_at(path, f"has more than {_MAX_DEPTH} levels or {_MAX_PARTS} parts")
        if not isinstance(part, dict):
            fail_at(path, "must be an object")
        kind = part.get("type")
        readers = {
            "any_text": self._any_text,
            "const_string": self._const_string,
            "grammar": self._grammar,
            "json_schema": self._json_schema,
            "or": self._or,
            "regex": self._regex,
            "sequence": self._sequence,
            "tag": self._tag,
            "tags_with_separator": self._tags_with_separator,
            "triggered_tags": self._triggered_tags,
        }
        if not isinstance(kind, str) or kind not in readers:
            fail_at(f"{path}.type", f"must be one of {', '.join(readers)}")
        return readers[kind](part, path, following, depth)

    def _const_string(self, part: Part, path: str, following: _Following, _: int) -> Expression:
        return self._const(part, path, following).expression

    def _const(self, part: Part, path: str, following: _Following) -> _Following:
        check_names(part, path, ("type", "value"))
        return _Following(text_of(part, "value", path) + following.end, following.rest)

    def _json_schema(self, part: Part, path: str, following: _Following, _: int) -> Expression:
        check_names(part, path, ("type", "json_schema"))
        text = msgspec.json.encode(schema_of(part, "json_schema", path)).decode()
        return self._structured("json_schema", text, path, following)

    def _regex(self, part: Part, path: str, following: _Following, _: int) -> Expression:
        check_names(part, path, ("type", "pattern"))
        return self._structured("regex", text_of(part, "pattern", path), path, following)

    def _grammar(self, part: Part, path: str, following: _Following, _: int) -> Expression:
        fail_at(path, "is not supported: a grammar cannot be a part of another structure")

    def _structured(self, kind: str, text: str, path: str, following: _Following) -> Expression:
        try:
            grammar = self._read_one(kind, text)
        except InvalidRequestError as error:
            # It begins with the name of the parameter.
            fail_at(path, str(error).removeprefix("structure ").removesuffix("."))
        rules, start = under_prefix(grammar, f"part{self._num_parts}")
        self.rules |= rules
        return Concat((start, following.expression))

    def _any_text(self, part: Part, path: str, following: _Following, _: int) -> Expression:
        check_names(part, path, ("type",))
        return self._free_text(path, following)

    def _sequence(self, part: Part, path: str, following: _Following, depth: int) -> Expression:
        check_names(part, path, ("type", "elements"))
        elements = list_of(part, "elements", path)
        for index in range(len(elements) - 1, -1, -1):
            where = f"{path}.elements.{index}"
            following = self._followed(elements[index], where, following, depth + 1)
        return following.expression

    def _followed(self, part: Part, path: str, following: _Following, depth: int) -> _Following:
        """Return a part and its continuation; free text before it ends where its text begins."""
        match part.get("type"):
            case "const_string":
                return self._const(part, path, following)
            case "tag":
                return self._begun(part, path, following, depth)
        return _Following("", self.read(part, path, following, depth))

    def _or(self, part: Part, path: str, following: _Following, depth: int) -> Expression:
        check_names(part, path, ("type", "elements"))
        following = _Following(following.end, self._named(following.rest))
        return Alternation(
            tuple(
                self.read(one, f"{path}.elements.{index}", following, depth + 1)
                for index, one in enumerate(list_of(part, "elements", path))
            )
        )

    def _tag(self, part: Part, path: str, following: _Following, depth: int) -> Expression:
        return self._begun(part, path, following, depth).expression

    def _begun(self, part: Part, path: str, following: _Following, depth: int) -> _Following:
        tag = tag_of(part, path)
        return _Following(tag.begin, self._inside(tag, following.expression, depth))

    def _tags_with_separator(
        self, part: Part, path: str, following: _Following, depth: int
    ) -> Expression:
        names = ("type", "tags", "separator", "at_least_one", "stop_after_first")
        check_names(part, path, names)
        separator = string_of(part, "separator", path)
        rest = self._named(following.expression)
        tags = self._new_rule()
        after: Expression = rest
        if not flag_of(part, "stop_after_first", path):
            after = self._named(Alternation((rest, Concat((Text(separator), tags)))))
        self.rules[tags.name] = Alternation(
            tuple(
                Concat((Text(one.begin), self._inside(one, after, depth + 1)))
                for one in tags_of(part, path)
            )
        )
        return tags if flag_of(part, "at_least_one", path) else Alternation((tags, rest))

    def _triggered_tags(
        self, part: Part, path: str, following: _Following, depth: int
    ) -> Expression:
        names = ("type", "triggers", "tags", "at_least_one", "stop_after_first")
        check_names(part, path, names)
        return self._triggered(part, tags_of(part, path), path, following, depth)

    def _triggered(
        self, part: Part, tags: Sequence[Tag], path: str, following: _Following, depth: int
    ) -> Expression:
        """Return the expression of free text with tags, and of its continuation."""
        triggers = triggers_of(part, path)
        text = self._new_rule()
        following = _Following(following.end, self._named(following.rest))
        is_once = flag_of(part, "stop_after_first", path)
        after: Expression = following.expression if is_once else text
        begun: list[_Following] = []
        for tag in tags:
            if not tag.begin.startswith(tuple(triggers)):
                fail_at(f"{tag.path}.begin", "must begin with one of the triggers")
            begun.append(_Following(tag.begin, self._named(self._inside(tag, after, depth))))
        for index, trigger in enumerate(triggers):
            if not any(tag.begin.startswith(trigger) for tag in tags):
                fail_at(f"{joined_path(path, 'triggers')}.{index}", "does not begin any tag")
        self.rules[text.name] = self._free_text(path, following, begun, triggers)
        if flag_of(part, "at_least_one", path):
            return Alternation(tuple(one.expression for one in begun))
        return text

    def _free_text(
        self,
        path: str,
        following: _Following,
        begun: Sequence[_Following] = (),
        triggers: Sequence[str] = (),
    ) -> Expression:
        """Return any text up to one of the `triggers` or to the continuation.

        All that may come at the triggers is `begun`, each with one of these.
        """
        if following.end:
            begun, triggers = (*begun, following), (*triggers, following.end)
        elif following.rest != _EMPTY:
            fail_at(path, "is free text without an end mark: a text must follow it, or nothing")
        stops: dict[str, list[Expression]] = {}
        for one in begun:
            # The shortest mark ends the text.
            mark = min(filter(one.end.startswith, triggers), key=len)
            rest = Concat((Text(one.end.removeprefix(mark)), one.rest))
            stops.setdefault(mark, []).append(rest)
        self._num_states += 1 + sum(map(len, stops))
        if self._num_states > MAX_STATES:
            fail_at(path, f"and other free texts end at more than {MAX_STATES} characters of marks")
        for mark, other in permutations(stops, 2):
            if other in mark[:-1]:
                which = f"{quote(mark)}, which is never reached, since it contains"
                fail_at(path, f"has the mark {which} {quote(other)}")
        name = f"text{self._num_states}state"
        choices = {mark: Alternation(tuple(rests)) for mark, rests in stops.items()}
        rules, start = text_until(choices, name, may_end=not following.end)
        self.rules |= rules
        return start

    def _inside(self, tag: Tag, after: Expression, depth: int) -> Expression:
        """Return the content of a tag, followed by the end mark of the tag and by `after`."""
        following = _Following(tag.end, after)
        return self.read(tag.content, tag.content_path, following, depth + 1)

    def _new_rule(self) -> Rule:
        rule = Rule(f"rule{len(self.rules)}")
        self.rules[rule.name] = _EMPTY
        return rule

    def _named(self, expression: Expression) -> Expression:
        """Return the expression, or a rule that stands for it in several places."""
        if isinstance(expression, Rule) or expression == _EMPTY:
            return expression
        rule = self._new_rule()
        self.rules[rule.name] = expression
        return rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag:
    """A part between two marks, which is read later."""

    path: str
    begin: str
    content: object
    content_path: str
    end: str


def fail_at(path: str, what: str) -> NoReturn:
    """Raise InvalidRequestError, as all functions below do, for the value at a path."""
    raise invalid_structure(f"{joined_path('structure', path) if path else 'structure'} {what}.")


def joined_path(path: str, name: str) -> str:
    """Return the path of a name at a path, which is empty for the whole tag."""
    return f"{path}.{name}" if path else name


def check_names(part: Part, path: str, names: Sequence[str]) -> None:
    """Check that a part has no other names than these."""
    for name in part:
        if name not in names:
            nearest = nearest_name(name[:_MOST_SHOWN], names)
            hint = f"did you mean {nearest}?" if nearest else f"allowed are {', '.join(names)}."
            shown = joined_path("structure", joined_path(path, name[:_MOST_SHOWN]))
            raise invalid_structure(f"{shown} is not supported: {hint}")


def check_type(part: Part, path: str, name: str) -> None:
    """Check the type of a part that may leave it out."""
    if part.get("type", name) != name:
        fail_at(joined_path(path, "type"), f"must be {name}")


def tags_of(part: Part, path: str) -> list[Tag]:
    """Return the list `tags` of a part."""
    tags = list_of(part, "tags", path)
    return [tag_of(one, f"{path}.tags.{index}") for index, one in enumerate(tags)]


def tag_of(part: Part, path: str) -> Tag:
    """Return a part as a tag."""
    check_names(part, path, ("type", "begin", "content", "end"))
    check_type(part, path, "tag")
    return Tag(
        path=path,
        begin=text_of(part, "begin", path),
        content=part.get("content"),
        content_path=f"{path}.content",
        end=string_of(part, "end", path),
    )


def triggers_of(part: Part, path: str) -> list[str]:
    """Return the list `triggers` of a part, of non-empty strings."""
    triggers = part.get("triggers")
    if not isinstance(triggers, list) or not triggers:
        fail_at(joined_path(path, "triggers"), "must be a non-empty list")
    for index, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not trigger:
            fail_at(f"{joined_path(path, 'triggers')}.{index}", "must be a non-empty string")
    return triggers


def schema_of(part: Part, name: str, path: str) -> object:
    """Return a JSON Schema, which is an object or a boolean."""
    schema = part.get(name)
    if not isinstance(schema, dict | bool):
        fail_at(joined_path(path, name), "must be a JSON Schema")
    return schema


def list_of(part: Part, name: str, path: str) -> list[Part]:
    """Return a non-empty list of objects."""
    given = part.get(name)
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        fail_at(joined_path(path, name), "must be a non-empty list of objects")
    return given


def text_of(part: Part, name: str, path: str) -> str:
    """Return a non-empty string."""
    if not part.get(name):
        fail_at(joined_path(path, name), "must be a non-empty string")
    return string_of(part, name, path)


def string_of(part: Part, name: str, path: str) -> str:
    """Return a string, which a grammar can contain."""
    given = part.get(name)
    if not isinstance(given, str):
        fail_at(joined_path(path, name), "must be a string")
    if any("\ud800" <= character <= "\udfff" or not ord(character) for character in given):
        fail_at(joined_path(path, name), "has NUL or a lone surrogate")
    return given


def flag_of(part: Part, name: str, path: str) -> bool:
    """Return a boolean; False if it is absent."""
    given = part.get(name, False)
    if not isinstance(given, bool):
        fail_at(joined_path(path, name), "must be true or false")
    return given
