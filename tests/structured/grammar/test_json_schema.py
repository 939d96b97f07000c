"""Texts of a schema's grammar are valid; schemas that cannot be enforced are rejected."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from itertools import permutations, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string

from cluster.serving.tools.forced_calls import schema_without_text
from cluster.structured.grammar.expressions import Alternation, Concat, Expression, Repeat, Rule
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.grammar.json_schema import read_json_schema
from cluster.structured.grammar.schema_keywords import are_disjoint
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import Structure
from tests.structured.conftest import EOS
from tests.structured.grammar.as_regex import as_regex
from tests.structured.grammar.random_schemas import random_schema, random_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.compiler import StructureCompiler
    from cluster.structured.xgrammar_library import XGrammarLibrary

# For the other formats it checks another standard, or nothing.
FORMATS = jsonschema.FormatChecker(["date", "ipv4", "uuid"])
VALIDATOR = jsonschema.Draft202012Validator
NAMES = ("a", "b", "c", "d")
Schema = dict[str, Any]  # Any: JSON
TARGETS: dict[object, object] = {"a": {"const": "a"}, "true": True}

LINES = Path(__file__).with_name("generated_schemas.jsonl").read_text().splitlines()
"""A schema in each line, with a valid and an invalid value."""
LEAST_SHARE = 0.97


def structure(schema: object) -> Structure:
    return Structure(kind="json_schema", text=json.dumps(schema))


def check(schema: object, text: str) -> None:
    """Fail unless a text is JSON and valid under a schema."""
    jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))  # type: ignore[arg-type]  # the stubs are narrower than the library


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 40), marks=pytest.mark.slow)])
def test_texts_of_random_schemas_are_valid(
    seeds: range, compiler: StructureCompiler, tokenizer: Tokenizer
) -> None:
    num_texts = 0
    for seed in seeds:
        generator = random.Random(seed)
        schema = random_schema(generator)
        grammar = asyncio.run(compiler.compile(structure(schema)))
        text = random_text(grammar, tokenizer, generator, eos=EOS)
        if text is not None:
            check(schema, text)
            num_texts += 1
    assert num_texts > len(seeds) // 2


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems is supported only for items whose"),
        (
            {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
            "#/uniqueItems is supported only for items whose",
        ),
        (
            {"type": "array", "uniqueItems": True, "prefixItems": [{"const": 1}]},
            "#/uniqueItems cannot be combined with prefixItems",
        ),
        ({"type": "array", "uniqueItems": 1}, "#/uniqueItems must be true or false"),
        (
            {"type": "array", "uniqueItems": True, "items": {"enum": list(range(8))}},
            "#/uniqueItems needs more than 128 rules",
        ),
        (
            {"type": "array", "uniqueItems": True, "items": {"enum": [1, 1.0]}, "minItems": 2},
            "# requires more different items than it allows",
        ),
        ({"type": "array", "contains": {"const": 9}}, "#/contains"),
        ({"type": "number", "multipleOf": 0.5, "minimum": 0}, "#/multipleOf"),
        ({"not": {"type": "integer"}}, "#/not"),
        ({"if": {}, "then": {}}, "#/if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
        ({"type": "object", "unevaluatedProperties": False}, "#/unevaluatedProperties"),
        ({"type": "array", "unevaluatedItems": {"type": "null"}}, "#/unevaluatedItems"),
        ({"type": "object", "propertyDependencies": {}}, "#/propertyDependencies"),
        ({"type": "number", "divisibleBy": 2}, "#/divisibleBy"),
        ({"disallow": "string"}, "#/disallow"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "#/patternProperties"),
        ({"type": "object", "patternProperties": []}, "#/patternProperties"),
        ({"type": "object", "patternProperties": {"(?=a)": {}}}, "#/patternProperties"),
        ({"type": "object", "patternProperties": {"a": False}}, "#/patternProperties/a must be"),
        (
            {"type": "object", "properties": {"a": {}}, "patternProperties": {"a|b": {}}},
            "#/patternProperties has 'a.b', which a property matches",
        ),
        (
            {"type": "object", "properties": {"a": {}}, "propertyNames": {"maxLength": 1}},
            "#/propertyNames cannot be combined with properties",
        ),
        (
            {"propertyNames": {"maxLength": 1}, "patternProperties": {"b": {}}},
            "#/propertyNames cannot be combined with patternProperties",
        ),
        ({"type": "object", "propertyNames": 1}, "#/propertyNames must be an object or true"),
        ({"type": "object", "propertyNames": False}, "#/propertyNames must be an object or true"),
        ({"type": "object", "propertyNames": {"$ref": "#"}}, "#/propertyNames must be a schema"),
        ({"type": "object", "propertyNames": {"type": "integer"}}, "#/propertyNames/type"),
        ({"type": "object", "propertyNames": {"enum": [1]}}, "#/propertyNames allows no value"),
        ({"type": "object", "propertyNames": {"not": {}}}, "#/propertyNames must be an object"),
        ({"type": "object", "minProperties": 2}, "#/minProperties"),
        ({"properties": {"a": {"not": {"type": "null"}}}}, "#/properties/a/not is not a"),
        *(
            ({"type": "string", misspelled: 3}, f"#/{misspelled} .*; did you mean {meant}\\?$")
            for misspelled, meant in (
                *(("minLenght", "minLength"), ("maxlength", "maxLength"), ("types", "type")),
                *(("additional_properties", "additionalProperties"), ("require", "required")),
                *(("patern", "pattern"), ("itmes", "items"), ("enums", "enum")),
            )
        ),
        ({"type": "object", "required": ["z"]}, "#/required"),
        ({"type": "string", "format": ["date"]}, "#/format"),
        ({"type": "string", "format": "uuid", "minLength": 37}, "#/format has shorter"),
        (
            {"type": "string", "format": "uri", "maxLength": 4},
            "#/format has no strings of at most 4",
        ),
        ({"type": "string", "pattern": "^a{4}$", "maxLength": 3}, "#/pattern has no strings of at"),
        ({"type": "string", "pattern": "^(?:a|bb)$", "minLength": 2}, "#/pattern has shorter"),
        ({"type": "string", "maxLength": -1}, "#/maxLength"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "below"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "bounds that allow no number"),
        ({"type": "integer", "minimum": "5"}, "#/minimum"),
        ({"type": "integer", "minimum": 10**309}, "#/minimum must be in the range of a double"),
        ({"type": "nope"}, "#/type"),
        ({"type": None}, "#/type must be one or several of"),
        ({"type": []}, "#/type must be one or several of"),
        ({"type": [[]]}, "#/type must be one or several of"),
        *(
            ({"type": "string", "minLength": number}, "#/minLength must be an integer from 0")
            for number in (1.5, "1", True, None)
        ),
        ({"$ref": "http://example.com/schema"}, "#/\\$ref"),
        ({"$ref": "#/$defs/missing"}, "refers to a missing definition"),
        *(
            (
                {"type": "array", "prefixItems": [{}, {"$ref": f"#/prefixItems/{index}"}]},
                "#/prefixItems/1/\\$ref refers to a missing definition",
            )
            for index in ("2", "-1", "00", "1" * 6, "x", "\N{SUPERSCRIPT TWO}", "")
        ),
        ({"$ref": "#x"}, "must refer to a part of the schema"),
        ({"$ref": 1}, "must refer to a part of the schema"),
        ({"$ref": "#"}, "refers to itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "refers to itself"),
        (
            {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}},
            r"combines \$ref with other keywords",
        ),
        ({"type": "integer", "anyOf": [{"type": "null"}]}, "combines anyOf with type"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
        ({"allOf": [{"type": "integer"}, {"type": "number"}]}, "must have exactly one schema"),
        ({"enum": []}, "allows no value"),
        ({"type": "null", "const": 3}, "allows no value"),
        (
            {"type": "object", "properties": {"a": False}, "required": ["a"]},
            "#/properties/a must be an object or true",
        ),
        (False, "must be an object or true"),
        ([1], "must be an object or true"),
    ],
)
def test_unenforceable_keywords_are_rejected_by_name(schema: object, place: str) -> None:
    with pytest.raises(InvalidRequestError, match=place) as caught:
        grammar_text(structure(schema))
    assert caught.value.param == "structure"


ANNOTATIONS: dict[str, object] = {
    **{"$id": "https://a.b/c", "id": "#c", "$anchor": "a", "$comment": "c", "~standard": {"v": 1}},
    **{"title": "t", "description": "d", "markdownDescription": "m", "examples": [1], "example": 1},
    **{"enumNames": ["a"], "enumDescriptions": ["a"], "x-enum-varnames": ["A"], "x-order": 1},
    **{"contentMediaType": "image/png", "contentEncoding": "base64", "contentSchema": {}},
    **{"nullable": False, "deprecated": True, "readOnly": True, "writeOnly": False},
    **{"discriminator": {"propertyName": "a"}, "xml": {"name": "a"}, "externalDocs": {"url": "u"}},
    **{"default": 1, "tsType": "T", "javaType": "T", "propertyOrder": 1, "options": {}, "order": 3},
    **{"propertyOrdering": ["a"], "errorMessage": "e", "deprecationMessage": "d", "label": "l"},
    **{"kind": "k", "group": "g", "widget": "w", "placeholder": "p", "x": 1, "version": 2},
    "allowEmptyValue": True,
}


BARE: tuple[dict[str, object], ...] = (
    {"type": "string", "maxLength": 9},
    {"type": ["integer", "null"], "minimum": 1},
    {"enum": ["a", 1]},
    {"const": {"a": 1}},
    {"type": "object", "properties": {"example": {"type": "string"}}, "required": ["example"]},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"$ref": "#/$defs/id", "$defs": {"id": {"type": "array", "items": {"type": "number"}}}},
)


@pytest.mark.parametrize("schema", BARE)
def test_annotations_restrict_nothing(schema: dict[str, object]) -> None:
    expected = grammar_text(structure(schema))
    for keyword, value in ANNOTATIONS.items():
        assert grammar_text(structure(schema | {keyword: value})) == expected, keyword
        parameters: dict[str, object] = {
            "type": "object",
            "properties": {"p": schema | {keyword: value}},
            "$defs": schema.get("$defs", {}),
            keyword: value,
        }
        bare = schema_without_text(parameters)
        assert grammar_text(structure(bare)) == grammar_text(structure(parameters)), keyword


def test_a_nullable_type_of_openapi_may_be_null() -> None:
    nullable = structure({"type": "integer", "minimum": 1, "nullable": True})
    both = structure({"type": ["integer", "null"], "minimum": 1})
    assert grammar_text(nullable) == grammar_text(both)


@pytest.mark.parametrize(
    "name",
    ["password", "binary", "byte", "uri-template", "int64", "phone", "regex", "json-pointer", "x"],
)
def test_other_formats_restrict_nothing(name: str) -> None:
    for limits in ({}, {"minLength": 2}, {"maxLength": 9}, {"pattern": "^a+$"}):
        schema = {"type": "string", **limits}
        assert grammar_text(structure(schema | {"format": name})) == grammar_text(structure(schema))


@pytest.mark.parametrize("number", ["1e999999999", "-1e-999999999", "12345e305", "1E401"])
@pytest.mark.parametrize("keyword", ["minimum", "const"])
def test_numbers_beyond_floats_are_rejected_at_once(keyword: str, number: str) -> None:
    text = f'{{"type": "number", "{keyword}": {number}}}'
    with pytest.raises(InvalidRequestError, match=f"{number} is beyond the range"):
        grammar_text(Structure(kind="json_schema", text=text))


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"type": "integer"}, {"type": "string"}]},
        {
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": {
                "a": {
                    "type": "object",
                    "properties": {"kind": {"const": "a"}},
                    "required": ["kind"],
                },
                "b": {
                    "type": "object",
                    "properties": {"kind": {"const": "b"}},
                    "required": ["kind"],
                },
            },
        },
        {"type": "array", "prefixItems": [{"type": "null"}, {"type": "integer"}], "minItems": 1},
        {
            "type": "array",
            "prefixItems": [{"type": "null"}, {"$ref": "#/prefixItems/0"}],
            "minItems": 1,
        },
        # As generators for TypeScript write the names of generic types.
        {
            "oneOf": [{"$ref": "#/$defs/Page%3CUser%3E"}, {"$ref": "#/$defs/100%25~1%C3%A9"}],
            "$defs": {
                "Page<User>": {"type": "null"},
                "100%/\N{LATIN SMALL LETTER E WITH ACUTE}": {"type": "boolean"},
            },
        },
        {
            "type": "array",
            "items": {"$ref": "#/$defs/Kind%3CA%3E"},
            "uniqueItems": True,
            "minItems": 2,
            "$defs": {"Kind<A>": {"enum": [1, 2]}},
        },
        {"type": "array", "items": False},
        {"type": "object", "properties": {}, "additionalProperties": False},
        {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1},
        # As pydantic and zod write maps.
        {
            "type": "object",
            "patternProperties": {"^[a-z]{2}/~$": {"type": "integer"}},
            "minProperties": 1,
        },
        {
            "patternProperties": {'^"x?$': {"type": "null"}},
            "additionalProperties": False,
            "minProperties": 1,
        },
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "boolean"},
        },
        {
            "type": "object",
            "propertyNames": {"enum": ["x/y", 'z"', 3]},
            "additionalProperties": {"type": "boolean"},
            "minProperties": 1,
        },
        {"type": "object", "propertyNames": {"maxLength": 2}, "minProperties": 1},
        {"type": "object", "propertyNames": {}, "properties": {"a": {}}, "required": ["a"]},
        {"allOf": [{"type": "boolean"}]},
        {"x-kind": 1, "anyOf": [{"type": "boolean", "x-kind": 2}]},
        {},
        True,
    ],
)
def test_texts_of_rarer_schemas_are_valid(
    compiler: StructureCompiler, tokenizer: Tokenizer, schema: object
) -> None:
    grammar = asyncio.run(compiler.compile(structure(schema)))
    generator = random.Random(1)
    texts = [random_text(grammar, tokenizer, generator, eos=EOS) for _ in range(10)]
    assert any(text is not None for text in texts)
    for text in texts:
        if text is not None:
            check(schema, text)


A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


B = {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}


CLOSED = A | {"additionalProperties": False}


COLORS = {"type": "string", "enum": ["red", "green"]}


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        # Inheritance of OpenAPI, intersections of TypeBox, and allOf beside other keywords.
        ({"allOf": [A, B]}, {"a": 1, "b": "x"}),
        ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, {"a": 1, "b": "x"}),
        ({"allOf": [{"$ref": "#/$defs/A"}, {}], "$defs": {"A": A}}, {"a": 1}),
        ({**B, "allOf": [A]}, {"b": "x", "a": 1}),
        ({"type": "object", "allOf": [A, B], "unevaluatedProperties": False}, {"a": 1, "b": "x"}),
        ({"allOf": [CLOSED, {"required": ["a"]}]}, {"a": 1}),
        ({"allOf": [A, {"properties": {"a": {"minimum": 5}}}]}, {"a": 5}),
        ({"allOf": [A, {"properties": {"a": {"type": "integer"}, "c": True}}]}, {"a": 1, "c": []}),
        ({"allOf": [{"type": "string"}, {"minLength": 2}, {"maxLength": 3}]}, "ab"),
        # What stands beside anyOf and oneOf.
        ({**A, "anyOf": [B, {"properties": {"c": {"const": 1}}}]}, {"a": 1, "b": "x"}),
        ({"type": "string", "anyOf": [{"minLength": 9}, {"pattern": "^a$"}]}, "a"),
        ({"type": "object", "anyOf": [A, B]}, {"b": "x"}),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "n": {}},
                "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            {"b": "x", "n": 0},
        ),
        (
            {**A, "oneOf": [{"type": "object", "properties": {"k": {"const": k}}, "required": ["k"]}
                            for k in "xy"]},
            {"a": 1, "k": "y"},
        ),
        # Tuples of draft 7.
        ({"type": "array", "items": [{"type": "integer"}, {"type": "null"}]}, [1, None]),
        (
            {"type": "array", "items": [{"type": "integer"}], "additionalItems": {"type": "null"}},
            [1, None, None],
        ),
        ({"type": "array", "items": [{}], "additionalItems": False, "minItems": 1}, [0]),
        # Never.
        ({"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "null"}}}, {"b": None}),
        ({"anyOf": [{"not": {}}, {"type": "null"}]}, None),
        # Names of an enumeration.
        (
            {
                "type": "object",
                "propertyNames": COLORS,
                "additionalProperties": {"type": "integer"},
                "required": ["red", "green"],
            },
            {"red": 1, "green": 2},
        ),
        (
            {
                "type": "object",
                "propertyNames": {"$ref": "#/$defs/C"},
                "additionalProperties": {"type": "integer"},
                "$defs": {"C": COLORS},
            },
            {"red": 1},
        ),
    ],
)  # fmt: skip
def test_combined_schemas_are_enforced(schema: dict[str, object], valid: object) -> None:
    grammar = Grammar.from_ebnf(grammar_text(structure(schema)))
    draft = jsonschema.Draft7Validator if isinstance(schema.get("items"), list) else VALIDATOR
    validator = draft(schema)
    assert validator.is_valid(valid)
    assert _is_grammar_accept_string(grammar, json.dumps(valid))
    # No value that is invalid is accepted: values of the schemas above, of up to three members.
    for value in (*VALUES, *without_one(valid)):
        if not validator.is_valid(value):
            assert not _is_grammar_accept_string(grammar, json.dumps(value)), value


VALUE_OF: dict[str, tuple[object, ...]] = {
    "a": (1, 4, "x"), "b": ("x", 1, None), "c": (1, 2), "k": ("x", "z"), "n": (0,), "red": (1, "x"),
}  # fmt: skip


VALUES: list[object] = [
    None, 1, "a", "ab", "abcd", [], [1], [1, 2], [1, None], [1, None, 3], ["x"], [0, 0], {},
    *(
        dict(zip(names, values, strict=True))
        for size in (1, 2, 3)
        for names in itertools.combinations(VALUE_OF, size)
        for values in itertools.product(*(VALUE_OF[name] for name in names))
    ),
]  # fmt: skip


def without_one(value: object) -> list[dict[str, object]]:
    if not isinstance(value, dict):
        return []
    return [{key: one for key, one in value.items() if key != name} for name in value]


@pytest.mark.parametrize(
    "schema",
    [
        # Each allows nothing, or less than what two branches say apart.
        {"allOf": [CLOSED, CLOSED | {"properties": {"b": {}}, "required": ["b"]}]},
        {"allOf": [A, {"additionalProperties": {"type": "string"}}]},
        {"allOf": [{"prefixItems": [{}]}, {"items": {"type": "null"}}]},
        {"allOf": [{"type": "integer"}, {"type": "number"}]},
        {"type": "object", "oneOf": [A, B]},
        {"allOf": [{"pattern": "^a"}, {"pattern": "a$"}], "type": "string"},
    ],
)
def test_combinations_that_are_not_merged_are_rejected(schema: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=r"allOf|oneOf"):
        grammar_text(structure(schema))


def test_branches_within_branches_are_merged_up_to_a_limit() -> None:
    schema: dict[str, object] = {"type": "object"}
    for level in range(40):
        inner: dict[str, object] = {"properties": {"a": {"properties": {"a": {}}}}}
        other: dict[str, object] = {"properties": {f"b{level}": {}}}
        schema = {"properties": {"a": schema}, "anyOf": [inner, other]}
    # Would otherwise take hours.
    with pytest.raises(InvalidRequestError, match="unsupported JSON Schema"):
        grammar_text(structure(schema))


def schema_of(names: Sequence[str], required: Sequence[str]) -> str:
    properties = {name: {"type": "null"} for name in names}
    return json.dumps({"type": "object", "properties": properties, "required": required})


def without_rules(expression: Expression, rules: Mapping[str, Expression]) -> Expression:
    """Return an expression with the rules that it refers to in their places."""
    match expression:
        case Rule(name):
            return without_rules(rules[name], rules)
        case Concat(parts):
            return Concat(tuple(without_rules(part, rules) for part in parts))
        case Alternation(parts):
            return Alternation(tuple(without_rules(part, rules) for part in parts))
        case Repeat(part, fewest, most):
            return Repeat(without_rules(part, rules), fewest, most)
    return expression


@pytest.mark.parametrize("are_required", list(product((False, True), repeat=len(NAMES))))
def test_exactly_the_objects_with_all_required_members_in_order_match(
    are_required: tuple[bool, ...],
) -> None:
    required = [name for name, one in zip(NAMES, are_required, strict=True) if one]
    rules, start = read_json_schema(schema_of(NAMES, required))
    pattern = re.compile(as_regex(without_rules(start, rules)))
    for number in range(len(NAMES) + 1):
        for names in permutations(NAMES, number):
            text = json.dumps(dict.fromkeys(names))
            is_valid = list(names) == sorted(names) and set(required) <= set(names)
            assert (pattern.fullmatch(text) is not None) == is_valid, text


@pytest.mark.parametrize("text", ['{, "a": null}', '{"a": null,}', '{"a": null "b": null}', "{,}"])
def test_commas_are_only_between_members(text: str) -> None:
    rules, start = read_json_schema(schema_of(NAMES, ()))
    assert re.fullmatch(as_regex(without_rules(start, rules)), text) is None


def test_an_object_without_allowed_members_is_empty(compiler: StructureCompiler) -> None:
    text = json.dumps({"type": "object", "properties": {"a": False}})
    rules, start = read_json_schema(text)
    assert re.fullmatch(as_regex(without_rules(start, rules)), "{}")
    asyncio.run(compiler.compile(Structure(kind="json_schema", text=text)))


def test_the_most_optional_properties_compile_to_a_small_grammar(
    library: XGrammarLibrary,
) -> None:
    text = schema_of([f"parameter_{number}" for number in range(128)], ())
    compiled, _ = library.compile_grammar(grammar_text(Structure(kind="json_schema", text=text)))
    assert len(library.json_of(compiled)) < 20 * 2**20


def of_kind(kind: object, *, name: str = "kind", **more: object) -> Schema:
    return {"type": "object", "properties": {name: kind}, "required": [name], **more}


A, B = of_kind({"const": "a"}), of_kind({"const": "b"})


def without(keyword: str) -> Schema:
    return {key: value for key, value in A.items() if key != keyword}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"const": "a"}, {"const": "b"}),
        ({"enum": ["a", "b"]}, {"enum": ["c"]}),
        ({"enum": ["a"]}, {"const": "b"}),
        ({"type": "string"}, {"type": "integer"}),
        ({"type": ["string", "null"]}, {"type": ["integer", "boolean"]}),
        ({"const": "a", "type": "string"}, {"type": "null"}),
        ({"$ref": "a"}, {"const": "b"}),
        (A, B),
        (A, of_kind({"enum": ["b", "c"]})),
        (of_kind({"const": "a"}, required=["x", "kind"]), B),
        (A, {"type": "array"}),
    ],
)
def test_schemas_that_share_no_value_are_disjoint(one: Schema, other: Schema) -> None:
    assert are_disjoint([one, other], TARGETS.__getitem__)
    assert are_disjoint([other, one], TARGETS.__getitem__)
    assert not are_disjoint([one, other, one], TARGETS.__getitem__)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"const": "a"}, {"const": "a"}),
        ({"enum": ["a", "b"]}, {"enum": ["b", "c"]}),
        # They are the same number.
        ({"const": 1}, {"const": 1.0}),
        ({"enum": ["a", 1]}, {"enum": ["b", 1.0]}),
        ({"type": "number"}, {"type": "integer"}),
        ({"type": ["string", "null"]}, {"type": ["integer", "null"]}),
        ({"type": "string"}, {}),
        ({}, {}),
        (True, {"type": "string"}),
        ({"type": "string"}, {"const": "a"}),
        ({"type": ["string", 1]}, {"type": "null"}),
        ({"$ref": "true"}, {"const": "a"}),
        ({"$ref": "a"}, {"const": "a"}),
        (A, A),
        (without("type"), B),
        (without("properties"), B),
        (without("required"), B),
        ({**A, "type": ["object", "null"]}, {**B, "type": ["object", "null"]}),
        (A, of_kind({"const": "b"}, name="other")),
        (A, of_kind({"const": "b"}, name="other", required=["kind", "other"])),
        (A, of_kind({"const": "b"}, required=[])),
        (A, of_kind({"type": "string"})),
        (A, of_kind(True)),
        (of_kind({"const": 1}), of_kind({"const": 1.0})),
    ],
)
def test_schemas_that_may_share_a_value_are_not_disjoint(one: Schema | bool, other: Schema) -> None:
    assert not are_disjoint([one, other], TARGETS.__getitem__)
    assert not are_disjoint([other, one], TARGETS.__getitem__)


# Any: JSON
def problem_of(entry: dict[str, Any]) -> str:
    """Return what is wrong about the grammar of a schema, or an empty text."""
    schema = entry["schema"]
    try:
        text = grammar_text(Structure(kind="json_schema", text=json.dumps(schema)))
    except InvalidRequestError as error:
        return str(error)
    grammar = Grammar.from_ebnf(text)
    if not _is_grammar_accept_string(grammar, json.dumps(entry["good"])):
        return "the valid value is rejected"
    if _is_grammar_accept_string(grammar, json.dumps(entry["bad"])):
        return "the invalid value is accepted"
    return ""


def test_the_values_are_what_they_are_said_to_be() -> None:
    assert len({json.dumps(json.loads(line)["schema"], sort_keys=True) for line in LINES}) == 250
    for line in LINES:
        entry = json.loads(line)
        validator = jsonschema.Draft202012Validator(entry["schema"])
        assert validator.is_valid(entry["good"]), line
        assert not validator.is_valid(entry["bad"]), line


def test_almost_all_schemas_of_generators_are_enforced() -> None:
    entries = [json.loads(line) for line in LINES]
    problems = {json.dumps(one["schema"]): problem_of(one) for one in entries}
    wrong = {schema: problem for schema, problem in problems.items() if problem}
    assert len(wrong) <= (1 - LEAST_SHARE) * len(entries), wrong
    # What is accepted is enforced.
    assert "the invalid value is accepted" not in wrong.values(), wrong
