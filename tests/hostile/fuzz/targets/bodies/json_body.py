"""JSON objects, the form of all bodies of the HTTP frontend."""

from __future__ import annotations

import json
from typing import Any

from cluster.serving.json_body import read_json
from pagedray.errors import InvalidRequestError
from tests.hostile.fuzz.target import Target


def run(data: bytes) -> None:
    """Accept what Python's reader accepts, with the same values, and no name twice."""
    try:
        values = read_json(data)
    except InvalidRequestError:
        return
    expected = json.loads(data.decode(), object_pairs_hook=_object)
    # A text, since a number may be too large for a float.
    assert _is_same(values, expected), (values, expected)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON
    assert len(dict(pairs)) == len(pairs), f"accepted a duplicate name: {pairs!r:.200}"
    return dict(pairs)


def _is_same(value: object, other: object) -> bool:
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(
            _is_same(value[name], other[name]) for name in value
        )
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return type(value) is type(other) and value == other


TARGET = Target(
    run=run,
    seeds=(
        b'{"model":"m","a":[1,-2.5e3,true,null,{"b":"\\u00e9\\"x\\\\"}],"c":{}}',
        b' {"a" : [ ] , "":"\xc3\xa9","b":[[],[{"a":0.1}]]}\n',
    ),
    words=(
        b"1e999",
        b"-0",
        b"NaN",
        b"Infinity",
        b"\\ud800",
        b'\\"',
        b"\\\\",
        b'"a":',
        b"{}",
        b"[]",
    ),
    max_bytes=1024,
)
