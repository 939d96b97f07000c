"""Structural tags, as the HTTP frontend passes them on."""

from __future__ import annotations

import json

from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.errors import InvalidRequestError
from pagedray.structure import Structure
from tests.hostile.fuzz.target import Target

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_JSON = {"type": "json_schema", "json_schema": _SCHEMA}
_ANY = {"type": "any_text"}
_TAGS = [
    {"begin": "<a>", "content": _JSON, "end": "</a>"},
    {"begin": "<ab>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": ";"},
]
_SEEDS = (
    {
        "type": "structural_tag",
        "structures": [{"begin": "<f=a>", "schema": _SCHEMA, "end": "</f>"}],
        "triggers": ["<f="],
    },
    {
        "format": {
            "type": "triggered_tags",
            "triggers": ["<a", "<"],
            "tags": _TAGS,
            "at_least_one": True,
            "stop_after_first": False,
        }
    },
    {"format": {"type": "tags_with_separator", "tags": _TAGS, "separator": ","}},
    {
        "format": {
            "type": "sequence",
            "elements": [
                _ANY,
                {"type": "const_string", "value": "aab"},
                {"type": "tag", "begin": "<", "content": _ANY, "end": ">"},
                {"type": "or", "elements": [_JSON, _ANY]},
            ],
        }
    },
)


def run(data: bytes) -> None:
    """Return a grammar or an InvalidRequestError."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        grammar_text(Structure(kind="structural_tag", text=text))
    except InvalidRequestError:
        return


TARGET = Target(
    run=run,
    seeds=tuple(json.dumps(one).encode() for one in _SEEDS),
    words=(b"\\ud800", b"\\u0000", b'""', b"null", b'"sequence"', b'"any_text"', b'"elements"'),
    max_bytes=2048,
)
