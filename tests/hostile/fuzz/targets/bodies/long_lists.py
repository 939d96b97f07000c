"""JSON objects with lists that are too long to be parsed at once."""

from __future__ import annotations

from tests.hostile.fuzz.target import Target
from tests.hostile.fuzz.targets.bodies import json_body

_MARK = b"~"
_LONG = b"12," * 70_000


def run(data: bytes) -> None:
    """Read as `json_body` does; the first mark stands for many numbers, each with a comma."""
    if len(data) <= TARGET.max_bytes:
        json_body.run(data.replace(_MARK, _LONG, 1))


TARGET = Target(
    run=run,
    seeds=(
        b'{"prompt":[~7]}',
        b'{"a":"x]","prompt":[[1,2],[~3],[4]],"b":[5, 6]}',
        b'{"prompt":[~"a"],"s":"\\"[1,2]"}',
        b'{"a":[~{"b":[1]}]}',
    ),
    words=(b'\\"', b"\\\\", b"[[", b"]]", b"-1", b"1e3", b"007", b"\x00", b"1 2", b"NaN", b"true"),
    max_bytes=200,
)
