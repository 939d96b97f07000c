"""JSON objects with more escapes than are parsed at once."""

from __future__ import annotations

from tests.hostile.fuzz.target import Target
from tests.hostile.fuzz.targets.bodies import json_body

_MARK = b"~"
_ESCAPES = b"\\n" * 33_000


def run(data: bytes) -> None:
    """Read as `json_body` does; the first mark stands for many escapes."""
    if len(data) <= TARGET.max_bytes:
        json_body.run(data.replace(_MARK, _ESCAPES, 1))


TARGET = Target(
    run=run,
    seeds=(
        b'{"a":"~"}',
        b'{"~\\u00e9":"x","b":["\\\\","\\""]}',
        b'{"a":["\\ud83d\\ude00~"],"\\n":{"\\t":"]"}}',
        b'{"a":"\xe2\x82\xac~\xf0\x9f\x98\x80\\\\"}',
    ),
    words=(
        b'\\"',
        b"\\\\",
        b"\\u",
        b"\\ud83d",
        b"\\ude00",
        b"\\/",
        b"\x00",
        b"\xe2\x82\xac",
        b'":"',
    ),
    max_bytes=200,
)
