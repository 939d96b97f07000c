"""Texts of a schema's grammar are valid; schemas that cannot be enforced are rejected."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING

import jsonschema
import pytest

from cluster.serving.tools.bare_schema import bare_schema
from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.errors import InvalidRequestError
from pagedray.structure import Structure
from tests.structured.conftest import EOS
from tests.structured.grammar.schemas.random_schemas import random_schema, random_text

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.processes.compiler import StructureCompiler


# For the other formats it checks another standard, or nothing.
FORMATS = jsonschema.FormatChecker(["date", "ipv4", "uuid"])


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
        ({"type": "number", "multipleOf": 0.5}, "#/multipleOf"),
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
        ({"type": "object", "propertyNames": {"not": {}}}, "#/propertyNames/not"),
        ({"type": "object", "minProperties": 2}, "#/minProperties"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "#/properties/a/not is not a"),
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
        ({"type": "integer", "anyOf": [{}]}, "combines anyOf with type"),
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
        bare = bare_schema(parameters)
        assert grammar_text(structure(bare)) == grammar_text(structure(parameters)), keyword


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
