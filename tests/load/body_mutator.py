"""Mutates request bodies: bytes, fields of protobuf's wire format, and values of JSON.

Mutations start from valid bodies, so that they pass more checks than random bytes.
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
# JSON texts, since some have no Python object.
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


def mutated_protobuf(bodies: Sequence[bytes], generator: random.Random) -> bytes:
    """Return a mutation of one of these messages."""
    body = generator.choice(bodies)
    for _ in range(generator.randint(1, 3)):
        body = (
            _mutate_bytes(body, bodies, generator)
            if generator.random() < 0.5
            else _mutate_fields(body, bodies, generator)
        )
    return body


def mutated_json(bodies: Sequence[dict[str, Any]], generator: random.Random) -> bytes:  # Any: JSON
    """Return a mutation of one of these bodies."""
    if generator.random() < 0.35:
        written = [json.dumps(body, ensure_ascii=False).encode() for body in bodies]
        body = generator.choice(written)
        for _ in range(generator.randint(1, 3)):
            body = _mutate_bytes(body, written, generator)
        return body
    parsed = copy.deepcopy(generator.choice(bodies))
    hostile: list[str] = []
    for _ in range(generator.randint(1, 3)):
        _mutate_value(parsed, bodies, hostile, generator)
    text = json.dumps(parsed, ensure_ascii=False)
    for value in hostile:
        text = text.replace(f'"{_MARK}"', value, 1)
    if generator.random() < 0.05:
        # Two members of the same name.
        text = '{"model":"tiny-llama",' + text[1:]
    return text.encode("utf-8", "surrogatepass")


def _mutate_bytes(body: bytes, others: Sequence[bytes], generator: random.Random) -> bytes:
    content = bytearray(body)
    place = generator.randrange(len(content) + 1)
    match generator.randrange(9):
        case 0 if place < len(content):
            content[place] ^= 1 << generator.randrange(8)
        case 1 if place < len(content):
            content[place] = generator.choice((0, 1, 0x7F, 0x80, 0xFF))
        case 2:
            del content[place : place + generator.randint(1, 8)]
        case 3:
            del content[place:]
        case 4:
            content[place:place] = content[place : place + generator.randint(1, 64)]
        case 5:
            content[place:place] = generator.randbytes(generator.randint(1, 16))
        case 6:
            other = generator.choice(others)
            content[place:] = other[generator.randrange(len(other) + 1) :]
        case 7:
            content[place:place] = generator.choice(_BAD_TEXTS)
        case _:
            start = generator.randrange(len(content) + 1)
            content[place:place] = content[min(start, place) : max(start, place)]
    return bytes(content)


def _mutate_fields(body: bytes, others: Sequence[bytes], generator: random.Random) -> bytes:
    fields = list(_fields(body))
    if not fields:
        return generator.choice(others)
    index = generator.randrange(len(fields))
    tag, content = fields[index]
    match generator.randrange(9):
        case 0:
            fields[index:index] = [fields[index]] * generator.choice((1, 2, 50))
        case 1:
            del fields[index]
        case 2:
            fields += list(_fields(generator.choice(others)))
        case 3:
            generator.shuffle(fields)
        case 4:
            # Another wire type.
            fields[index] = (tag & ~7 | generator.randrange(8), content)
        case 5:
            # Another field.
            fields[index] = (
                generator.choice((1, 2, 3, 4, 7, 15, 99, 2**28)) << 3 | tag & 7,
                content,
            )
        case 6 if tag & 7 == 0:
            fields[index] = (tag, generator.choice(_HUGE_VARINTS))
        case 7 if tag & 7 == 2:
            fields[index] = (tag, _nested(tag, content, generator))
        case _ if tag & 7 == 2:
            # Its content may be a message, a text or a list of numbers.
            inner = content[len(content) - _length(content) :]
            mutate = _mutate_fields if generator.random() < 0.7 else _mutate_bytes
            inner = mutate(inner, [inner], generator)
            fields[index] = (tag, _varint(len(inner)) + inner)
        case _:
            fields[index] = (tag, generator.choice(_HUGE_VARINTS))
    return b"".join(_varint(tag) + content for tag, content in fields)


def _nested(tag: int, content: bytes, generator: random.Random) -> bytes:
    inner = content
    for _ in range(generator.choice((2, 20, 99, 101, 300))):
        inner = _varint(tag) + inner
        inner = _varint(len(inner)) + inner
        if len(inner) > _MAX_NESTED_BYTES:
            break
    return inner


def _fields(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and the content of each field, as far as they can be parsed."""
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
    """Return how many bytes follow the length prefix of a field's content."""
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
def _mutate_value(
    parsed: dict[str, Any],
    others: Sequence[dict[str, Any]],
    hostile: list[str],
    generator: random.Random,
) -> None:
    places = list(_places(parsed))
    if not places:
        parsed.update(copy.deepcopy(generator.choice(others)))
        return
    holder, key = generator.choice(places)
    match generator.randrange(6):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[generator.choice(("x", "", "n", "tools", "stream", "\u00e9", "a" * 200))] = (
                holder[key]
            )
        case 2:
            # A value from another place in a valid body of the endpoint.
            there, name = generator.choice(list(_places(generator.choice(others))))
            holder[key] = copy.deepcopy(there[name])
        case 3 if isinstance(holder, list):
            holder[key:key] = [holder[key]] * generator.choice((1, 17, 200))
        case _:
            hostile.append(generator.choice(_HOSTILE_VALUES))
            holder[key] = _MARK


# Any: lists and objects are written to by index and by name.
def _places(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield every list and object inside a value with each of its indices or names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield value, name
            yield from _places(inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield value, index
            yield from _places(inner)
