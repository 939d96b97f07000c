"""Structures of clients, and frames of the processes that compute them."""

from __future__ import annotations

import json
import re
import socket
import warnings

import msgspec

from cluster.structured.child_process import read_message
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.messages import (
    Compiled,
    CompilerStart,
    Died,
    GrammarLoaded,
    GrammarText,
    LoadFailed,
    LoadGrammar,
    MadeMask,
    MaskQuery,
    MaskReply,
    Rejected,
    StepQuery,
)
from pagedray.errors import InvalidRequestError
from pagedray.request import FinishReason
from pagedray.sampling_params import Structure
from tests.hostile.fuzz.target import Target


def run_json_schema(data: bytes) -> None:
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

JSON_SCHEMA = Target(
    run=run_json_schema,
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


def run_choices(data: bytes) -> None:
    """Return a grammar or an InvalidRequestError."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        grammar_text(Structure(kind="choice", text=text))
    except InvalidRequestError:
        return


CHOICES = Target(
    run=run_choices,
    seeds=(b'["yes","no"]', b'["\\u00e9", "\\ud83d\\ude00\\n", "yes"]'),
    words=(b"\\ud800", b"\\u0000", b'""', b"null", b"[["),
    max_bytes=512,
)


def run_regex(data: bytes) -> None:
    """Accept only what Python's `re` accepts too."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        grammar_text(Structure(kind="regex", text=text))
    except InvalidRequestError:
        return
    with warnings.catch_warnings():
        # Of sets that may get another meaning in Python.
        warnings.simplefilter("ignore", FutureWarning)
        re.compile(text, re.ASCII)


REGEX = Target(
    run=run_regex,
    seeds=(
        b"^[a-z0-9_]{1,16}(?:\\.[^\\s\\x00-\\u00ff]+)*$",
        b"(a|bc?)+?\\d{2,}|\\(x\\)|[\\]\\-b-]*",
        b"\\w+@\\w+\\.(com|org)\xc3\xa9",
    ),
    words=(
        b"(?:",
        b"[^",
        b"{1,}",
        b"{0,1000}",
        b"\\u",
        b"\\x",
        b"\\W",
        b"\\S",
        b"*?",
        b"|",
        b"\\b",
    ),
    max_bytes=512,
)


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


def run_structural_tag(data: bytes) -> None:
    """Return a grammar or an InvalidRequestError."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        grammar_text(Structure(kind="structural_tag", text=text))
    except InvalidRequestError:
        return


STRUCTURAL_TAG = Target(
    run=run_structural_tag,
    seeds=tuple(json.dumps(one).encode() for one in _SEEDS),
    words=(b"\\ud800", b"\\u0000", b'""', b"null", b'"sequence"', b'"any_text"', b'"elements"'),
    max_bytes=2048,
)


_KINDS: tuple[object, ...] = (
    MaskReply,
    GrammarLoaded | LoadFailed,
    Compiled | Rejected | Died,
    StepQuery,
    LoadGrammar,
    CompilerStart,
    Structure,
)


def run_structure_frames(data: bytes) -> None:
    """Return a message or EOFError, of the kind that the first byte selects.

    If the byte is above 127, a length is put before the rest.
    """
    if not data:
        return
    sent = data[1:]
    if data[0] > 127:
        sent = len(sent).to_bytes(4, "big") + sent
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        try:
            read_message(ours, _KINDS[data[0] % len(_KINDS)])
        except EOFError:
            return


def _seed(message: object, kind: object) -> bytes:
    place = _KINDS.index(kind)
    first = next(one for one in range(128, 256) if one % len(_KINDS) == place)
    return bytes([first]) + msgspec.msgpack.encode(message)


_REPLY = MaskReply(
    [MadeMask(1, 0.5, 0.5, b"\x01\0\0\0"), MadeMask(2, 0.5, 0.5, b"", FinishReason.STOP, "e")]
)

STRUCTURE_FRAMES = Target(
    run=run_structure_frames,
    seeds=(
        _seed(_REPLY, MaskReply),
        _seed(GrammarLoaded(5), GrammarLoaded | LoadFailed),
        _seed(Compiled(GrammarText(b"{}")), Compiled | Rejected | Died),
        _seed(StepQuery([MaskQuery(1, [2])], [3], [4], 0.5), StepQuery),
        _seed(Structure(kind="regex", text="a"), Structure),
        b"\x00\x00\x00\x00\x01\xc0",
        b"\x00\xff\xff\xff\xff",
    ),
)
