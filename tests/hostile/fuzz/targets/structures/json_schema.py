"""JSON schemas of clients."""

from __future__ import annotations

from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.errors import InvalidRequestError
from pagedray.structure import Structure
from tests.hostile.fuzz.target import Target


def run(data: bytes) -> None:
    """Return a grammar or an InvalidRequestError."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        grammar_text(Structure(kind="json_schema", text=text))
    except InvalidRequestError:
        return


_WORDS = (
    *("type", "properties", "required", "additionalProperties", "items", "prefixItems", "enum"),
    *("const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "pattern", "format", "minLength"),
    *("maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("minItems", "maxItems", "minProperties", "maxProperties", "description", "default", "title"),
    *("string", "number", "integer", "object", "array", "boolean", "null", "date-time", "uuid"),
    *("email", "time", "date", "ipv4", "uri"),
)

TARGET = Target(
    run=run,
    seeds=(
        b'{"type":"object","properties":{"a":{"type":"integer","minimum":-3,"maximum":12.5},'
        b'"b":{"type":"array","items":{"type":"string","pattern":"^a+$","maxLength":9},'
        b'"maxItems":3}},"required":["a"],"additionalProperties":false}',
        b'{"anyOf":[{"$ref":"#/$defs/n"},{"enum":[1,"a",null,1.5,[true]]},{"const":{"k":2e3}}],'
        b'"$defs":{"n":{"type":["number","null"],"exclusiveMinimum":0,"multipleOf":0.25}}}',
        b'{"oneOf":[{"type":"string","format":"date-time"},{"type":"object",'
        b'"additionalProperties":{"type":"boolean"},"minProperties":1}]}',
        b'{"type":"array","prefixItems":[{"const":1},true],"items":false,"minItems":2}',
    ),
    words=(
        *(b'"%b"' % word.encode() for word in _WORDS),
        *(b"1e308", b"1e-9", b"0.1", b"-1", b"9007199254740993", b'"#/$defs/', b"\\ud800", b"{}"),
    ),
)
