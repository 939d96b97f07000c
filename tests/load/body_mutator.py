"""Mutates request bodies: changed bytes, repeated fields, values of other types.

There are three kinds of mutations: of any bytes, of fields in protobuf's wire format, and of JSON
values. Each starts from a valid body, to reach further than random bytes would.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

__all__ = ["mutated_json", "mutated_protobuf"]

_HUGE_VARINTS = (
    b"\xff" * 9 + b"\x01",
    b"\xff" * 10,
    b"\x80" * 9 + b"\x01",
    b"\xff\xff\xff\xff\x0f",
)
_BAD_TEXTS = (b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x00", b"\xe2\x82")
# JSON text, since some of it has no Python object.
_HOSTILE_VALUES = (
    *("null", "true", "0", "-1", "1e999", "-0.0", "1e-400", "NaN", "-Infinity", "0.1"),
    *("9" * 400, "-" + "9" * 30, "2147483648", "-2147483649", "9223372036854775808"),
    *('""', '"x"', '"\\ud800"', '"\\u0000"', '"' + "x" * 5000 + '"', '"\u200b"'),
    *("[]", "{}", "[null]", "[[]]", '[""]', "[1e999]", '{"":1}', '{"a":{"a":{}}}'),
    "[" * 200 + "]" * 200,
    "[" * 5000,
    '{"a":' * 300 + "1" + "}" * 300,
    "[" + "0," * 3000 + "0]",
    '["a",' * 100 + "1" + "]" * 100,
)
_MARK = "\ue000"
_MAX_NESTED_BYTES = 60_000


def mutated_protobuf(bodies: Sequence[bytes], chance: random.Random) -> bytes:
    """Return one of some messages of a kind, harmed."""
    body = chance.choice(bodies)
    for _ in range(chance.randint(1, 3)):
        body = (
            _harm_bytes(body, bodies, chance)
            if chance.random() < 0.5
            else _harm_fields(body, bodies, chance)
        )
    return body


def mutated_json(bodies: Sequence[dict[str, Any]], chance: random.Random) -> bytes:  # Any: JSON
    """Return one of some bodies of an endpoint, harmed."""
    if chance.random() < 0.35:
        written = [json.dumps(body, ensure_ascii=False).encode() for body in bodies]
        body = chance.choice(written)
        for _ in range(chance.randint(1, 3)):
            body = _harm_bytes(body, written, chance)
        return body
    parsed = copy.deepcopy(chance.choice(bodies))
    hostile: list[str] = []
    for _ in range(chance.randint(1, 3)):
        _harm_value(parsed, bodies, hostile, chance)
    text = json.dumps(parsed, ensure_ascii=False)
    for value in hostile:
        text = text.replace(f'"{_MARK}"', value, 1)
    if chance.random() < 0.05:
        # Two members of the same name.
        text = '{"model":"tiny-llama",' + text[1:]
    return text.encode("utf-8", "surrogatepass")


def _harm_bytes(body: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    content = bytearray(body)
    place = chance.randrange(len(content) + 1)
    match chance.randrange(9):
        case 0 if place < len(content):
            content[place] ^= 1 << chance.randrange(8)
        case 1 if place < len(content):
            content[place] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
        case 2:
            del content[place : place + chance.randint(1, 8)]
        case 3:
            del content[place:]
        case 4:
            content[place:place] = content[place : place + chance.randint(1, 64)]
        case 5:
            content[place:place] = chance.randbytes(chance.randint(1, 16))
        case 6:
            other = chance.choice(others)
            content[place:] = other[chance.randrange(len(other) + 1) :]
        case 7:
            content[place:place] = chance.choice(_BAD_TEXTS)
        case _:
            start = chance.randrange(len(content) + 1)
            content[place:place] = content[min(start, place) : max(start, place)]
    return bytes(content)


def _harm_fields(body: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    fields = list(_fields(body))
    if not fields:
        return chance.choice(others)
    index = chance.randrange(len(fields))
    tag, content = fields[index]
    match chance.randrange(9):
        case 0:
            fields[index:index] = [fields[index]] * chance.choice((1, 2, 50))
        case 1:
            del fields[index]
        case 2:
            fields += list(_fields(chance.choice(others)))
        case 3:
            chance.shuffle(fields)
        case 4:
            # Another wire type.
            fields[index] = (tag & ~7 | chance.randrange(8), content)
        case 5:
            # Another field.
            fields[index] = (chance.choice((1, 2, 3, 4, 7, 15, 99, 2**28)) << 3 | tag & 7, content)
        case 6 if tag & 7 == 0:
            fields[index] = (tag, chance.choice(_HUGE_VARINTS))
        case 7 if tag & 7 == 2:
            fields[index] = (tag, _nested(tag, content, chance))
        case _ if tag & 7 == 2:
            # Inside, it may be a message, a text or a list of numbers.
            inner = content[len(content) - _length(content) :]
            harm = _harm_fields if chance.random() < 0.7 else _harm_bytes
            inner = harm(inner, [inner], chance)
            fields[index] = (tag, _varint(len(inner)) + inner)
        case _:
            fields[index] = (tag, chance.choice(_HUGE_VARINTS))
    return b"".join(_varint(tag) + content for tag, content in fields)


def _nested(tag: int, content: bytes, chance: random.Random) -> bytes:
    inner = content
    for _ in range(chance.choice((2, 20, 99, 101, 300))):
        inner = _varint(tag) + inner
        inner = _varint(len(inner)) + inner
        if len(inner) > _MAX_NESTED_BYTES:
            break
    return inner


def _fields(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag of each field and what follows it, as far as they can be told apart."""
    place = 0
    while place < len(body):
        tag, start = _read_varint(body, place)
        kind, end = tag & 7, start
        if kind == 0:
            _, end = _read_varint(body, start)
        elif kind == 1:
            end = start + 8
        elif kind == 2:
            size, end = _read_varint(body, start)
            end += size
        elif kind == 5:
            end = start + 4
        end = min(end, len(body))
        yield tag, body[start:end]
        place = end


def _length(content: bytes) -> int:
    """Return how many bytes follow the length at the frontend of a field's content."""
    _, start = _read_varint(content, 0)
    return len(content) - start


def _read_varint(body: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(body):
        byte = body[place]
        place += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return value, place


def _varint(value: int) -> bytes:
    content = bytearray()
    while value >= 0x80:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    content.append(value)
    return bytes(content)


# Any: JSON.
def _harm_value(
    parsed: dict[str, Any],
    others: Sequence[dict[str, Any]],
    hostile: list[str],
    chance: random.Random,
) -> None:
    places = list(_places(parsed))
    if not places:
        parsed.update(copy.deepcopy(chance.choice(others)))
        return
    holder, key = chance.choice(places)
    match chance.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice(("x", "", "n", "tools", "stream", "\u00e9", "a" * 200))] = holder[
                key
            ]
        case 2:
            # The value of another place, in a good body of the endpoint.
            there, name = chance.choice(list(_places(chance.choice(others))))
            holder[key] = copy.deepcopy(there[name])
        case 3 if isinstance(holder, list):
            holder[key:key] = [holder[key]] * chance.choice((1, 17, 200))
        case _:
            hostile.append(chance.choice(_HOSTILE_VALUES))
            holder[key] = _MARK


# Any: lists and objects are written to by index and by name.
def _places(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield every list or object within a value, with each of its indices or names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield value, name
            yield from _places(inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield value, index
            yield from _places(inner)
