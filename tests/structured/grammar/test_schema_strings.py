"""Strings follow their formats, patterns and lengths."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import random
import re
import uuid
from itertools import product
from typing import TYPE_CHECKING, Any

import pydantic
import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from cluster.structured.grammar.call_arguments import ARG_KEYS, PARAMETERS, read_python_arguments
from cluster.structured.grammar.expressions import Concat, Text, write_ebnf
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.grammar.schema_strings import STRING_FORMATS
from pagedray.sampling_params import Structure
from tests.structured.conftest import EOS
from tests.structured.grammar.random_schemas import random_text

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.compiler import StructureCompiler
    from cluster.structured.grammar.call_arguments import ElementNotation
    from cluster.structured.xgrammar_library import XGrammarLibrary

# Any: types of all kinds.
PARSERS: dict[str, Any] = {
    "date": datetime.date,
    "time": datetime.time,
    "date-time": datetime.datetime,
    "duration": datetime.timedelta,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uri": pydantic.HttpUrl,
    "uuid": uuid.UUID,
}
TEXTS = ["".join(characters) for length in range(4) for characters in product("ab$", repeat=length)]

SPECIAL = 'q"\\/\b\f\n\r\t\N{SNOWMAN}\N{GRINNING FACE}<'
LIMITS = [
    *((0, 1), (0, 7), (3, 3), (0, 60), (5, 64), (1, 65), (0, 100), (20, 255), (40, 300), (0, 4000)),
    *((64, 64), (65, 65), (100, 130), (200, 1000), (1, None), (40, None), (300, None)),
    *((0, 100_000), (33, 2**31 - 1), (33, 200_000)),
]


@pytest.mark.parametrize("name", STRING_FORMATS)
def test_strings_of_a_format_are_valid(
    compiler: StructureCompiler, tokenizer: Tokenizer, name: str
) -> None:
    found = STRING_FORMATS[name]
    schema = {
        "type": "string",
        "format": name,
        "minLength": found.min_length,
        "maxLength": found.max_length,
    }
    text = json.dumps(schema)
    grammar = asyncio.run(compiler.compile(Structure(kind="json_schema", text=text)))
    generator = random.Random(1)
    texts = [random_text(grammar, tokenizer, generator, eos=EOS) for _ in range(40)]
    strings = [json.loads(text) for text in texts if text is not None]
    assert len(strings) > 20
    lengths = [len(one) for one in strings]
    assert found.min_length <= min(lengths)
    assert max(lengths) <= found.max_length
    parser = pydantic.TypeAdapter(PARSERS.get(name, str))
    for one in strings:
        parser.validate_json(json.dumps(one))


def test_the_types_of_pydantic_have_formats() -> None:
    class Event(pydantic.BaseModel):
        """What programs ask for."""

        page: pydantic.HttpUrl
        length: datetime.timedelta
        address: ipaddress.IPv6Address

    properties = Event.model_json_schema()["properties"]
    assert {one["format"] for one in properties.values()} <= STRING_FORMATS.keys()


def accepted(pattern: str) -> set[str]:
    """Return the strings that a pattern allows, of up to three characters."""
    schema = json.dumps({"type": "string", "pattern": pattern})
    grammar = xgrammar.Grammar.from_ebnf(grammar_text(Structure(kind="json_schema", text=schema)))
    return {one for one in TEXTS if _is_grammar_accept_string(grammar, json.dumps(one))}


def matched(pattern: str) -> set[str]:
    return {one for one in TEXTS if re.search(pattern, one)}


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "a", "^a", "a$", "^a$", "a|b", "^(a|b)", "(a|b)$", "^(a|b)$", "^(?:aa|b)", "(a|b)b"),
        *(r"a\$", r"^a\$", r"^a\$$", r"\$$", "^", "$"),
    ],
)
def test_strings_are_those_in_which_the_pattern_is_found(pattern: str) -> None:
    assert accepted(pattern) == matched(pattern)


@pytest.mark.parametrize(
    ("pattern", "usual"), [("^a|b", "^(a|b)"), ("a|b$", "(a|b)$"), ("^a|b$", "^(a|b)$")]
)
def test_an_anchor_of_one_alternative_applies_to_all(pattern: str, usual: str) -> None:
    assert accepted(pattern) == matched(usual)
    assert matched(usual) < matched(pattern)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"format": "email", "pattern": r"^(?!\.)[a-z.]+@b\.cd$"}, "a@b.cd", "ab"),
        ({"format": "uuid", "pattern": "^[a-f]{3}$"}, "abc", "abcd"),
        ({"format": "unknown", "pattern": "^a+$"}, "aa", "b"),
        ({"format": "email", "maxLength": 50}, "ann@example.com", "ann@" + "b" * 50 + ".com"),
        ({"pattern": "^a+$", "maxLength": 3}, "aaa", "aaaa"),
        ({"pattern": "^a*$", "minLength": 2}, "aa", "a"),
        ({"pattern": "^[a-z]+-[0-9]+$", "maxLength": 11}, "abc-123", "abcdefghi-12"),
        ({"pattern": "b", "minLength": 1, "maxLength": 5}, "abc", "aabaaa"),
        ({"pattern": "^(?:a|bcd)$", "maxLength": 2}, "a", "bcd"),
        ({"pattern": "^(?:ab)*$", "maxLength": 5}, "abab", "ababab"),
        ({"pattern": "^$|^(?:ab)+$"}, "", "a"),
        ({"pattern": "^.+$", "minLength": 2, "maxLength": 70}, 'a"b', "a"),
        ({"enum": ["aa", "b", "abc"], "pattern": "^a", "maxLength": 2}, "aa", "abc"),
        ({"const": "a", "format": "x", "minLength": 1}, "a", "b"),
    ],
)
def test_patterns_are_combined_with_formats_and_lengths(
    schema: dict[str, object], good: str, bad: str
) -> None:
    text = grammar_text(
        Structure(kind="json_schema", text=json.dumps({"type": "string", **schema}))
    )
    grammar = xgrammar.Grammar.from_ebnf(text)
    assert _is_grammar_accept_string(grammar, json.dumps(good))
    assert not _is_grammar_accept_string(grammar, json.dumps(bad))


def compiled(schema: object) -> xgrammar.Grammar:
    structure = Structure(kind="json_schema", text=json.dumps(schema))
    return xgrammar.Grammar.from_ebnf(grammar_text(structure))


def limited(minimum: int, maximum: int | None) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"}
    schema |= {"minLength": minimum} if minimum else {}
    return schema | ({} if maximum is None else {"maxLength": maximum})


def strings(minimum: int, maximum: int | None) -> list[tuple[str, bool]]:
    """Return strings, and whether they have an allowed length."""
    most = minimum + 500 if maximum is None else min(maximum, 5000)
    lengths = {0, 1, minimum - 1, minimum, minimum + 1, (minimum + most) // 2, most - 1, most}
    if maximum is not None and maximum < 5000:
        lengths |= {maximum + 1, maximum + 2, maximum + 16, maximum + 32}
    texts = [(SPECIAL * 600)[: max(0, length)] for length in lengths]
    return [(one, minimum <= len(one) <= most) for one in texts]


@pytest.mark.parametrize(("minimum", "maximum"), LIMITS)
def test_strings_of_a_length_have_any_characters(minimum: int, maximum: int | None) -> None:
    grammar = compiled(limited(minimum, maximum))
    for string, is_allowed in strings(minimum, maximum):
        for is_ascii in (False, True) if string.isascii() else (False,):
            text = json.dumps(string, ensure_ascii=is_ascii)
            assert _is_grammar_accept_string(grammar, text) == is_allowed, len(string)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "propertyNames": {"maxLength": 3}}, {'a"\n': 1}, {'a"\nb': 1}),
        ({"type": "array", "items": {"maxLength": 2}}, ['\\"', "\t"], ['\\"x']),
        ({"anyOf": [{"maxLength": 2}, {"type": "null"}]}, "\\\\", "\\\\\\"),
        (
            {"type": "object", "properties": {"a": {"minLength": 2}}, "required": ["a"]},
            {"a": '""'},
            {"a": '"'},
        ),
        ({"type": "string", "pattern": "^.{1,80}$"}, '"\\' * 40, '"\\' * 40 + "x"),
        ({"type": "string", "pattern": "^[\\s\\S]{3}$"}, '"\n\\', '"\n'),
        ({"type": "string", "pattern": "^[^a]{90,}$"}, '\n"' * 50, '\n"' * 40),
        ({"type": "string", "pattern": '^(?:ab|"){70}$'}, 'ab"' * 35, 'ab"' * 34),
    ],
)
def test_schemas_with_such_strings(schema: object, good: object, bad: object) -> None:
    grammar = compiled(schema)
    assert _is_grammar_accept_string(grammar, json.dumps(good))
    assert not _is_grammar_accept_string(grammar, json.dumps(bad))


@pytest.mark.parametrize(("minimum", "maximum"), LIMITS)
def test_strict_python_calls_have_any_characters(minimum: int, maximum: int | None) -> None:
    schema = {"type": "object", "properties": {"a": limited(minimum, maximum)}, "required": ["a"]}
    grammar = xgrammar.Grammar.from_ebnf(write_ebnf(*read_python_arguments(json.dumps(schema))))
    for string, is_allowed in strings(minimum, maximum):
        text = 'a="' + json.dumps(string, ensure_ascii=False)[1:-1] + '"'
        assert _is_grammar_accept_string(grammar, text) == is_allowed, len(string)


@pytest.mark.parametrize("notation", [PARAMETERS, ARG_KEYS])
@pytest.mark.parametrize(("minimum", "maximum"), LIMITS)
def test_strict_calls_of_elements_have_all_characters_but_angles(
    minimum: int, maximum: int | None, notation: ElementNotation
) -> None:
    schema = {"type": "object", "properties": {"a": limited(minimum, maximum)}, "required": ["a"]}
    rules, arguments = notation.read_arguments(json.dumps(schema))
    end = Text("END")
    text = write_ebnf(notation.rules() | rules, Concat((arguments, end)))
    grammar = xgrammar.Grammar.from_ebnf(text)
    between = ">\n" if notation is PARAMETERS else "</arg_key><arg_value>"
    for string, is_allowed in strings(minimum, maximum):
        value = string.replace("<", ">")
        written = f"{notation.key_begin}a{between}{value}{notation.line}{notation.value_end}END"
        assert _is_grammar_accept_string(grammar, written) == is_allowed, len(string)


@pytest.mark.parametrize(
    "schema",
    [
        *({"items": one} for one in (limited(0, 1000), limited(40, 2000), limited(300, None))),
        {"items": {"pattern": "^[^x]{1,500}$"}},
        {"properties": {"a": {"type": "string"}}, "required": ["a"]},
        {"items": {"type": "null"}, "maxItems": 300},
    ],
)
def test_masks_allow_only_tokens_that_the_matcher_accepts(
    library: XGrammarLibrary, schema: dict[str, object]
) -> None:
    text = grammar_text(Structure(kind="json_schema", text=json.dumps(schema)))
    compiled_grammar, _ = library.compile_grammar(text)
    matcher, generator = xgrammar.GrammarMatcher(compiled_grammar), random.Random(1)
    own = library.matcher(compiled_grammar)
    for _ in range(60):
        allowed = own.allowed_ids(library.vocab_size).tolist()
        for token_id in generator.sample(allowed, min(200, len(allowed))):
            assert matcher.fork().accept_token(token_id)
        token_id = generator.choice(allowed)
        assert own.accept_token(token_id)
        assert matcher.accept_token(token_id)
        if own.has_ended:
            break
