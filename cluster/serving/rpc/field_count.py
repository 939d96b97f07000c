"""Counts the fields of an encoded message before it is parsed.

Parsing makes an object of each field, and a field may take as little as two bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from pagedray.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

    from cluster.serving.intake.limits import RequestSize

__all__ = ["check_fields", "unknown_field"]

_MAX_FIELDS = 3 * 2**13
_FEW_BYTES = 2**12
"""A message of this size has few fields in any case."""
_VARINT, _FIXED64, _DELIMITED, _GROUP, _GROUP_END, _FIXED32 = range(6)
_CONTINUED = bytes(range(128, 256))


def check_fields(kind: type[Message], body: bytes, size: RequestSize) -> None:
    """Raise InvalidRequestError for too many fields, or too many token ids in a field.

    An invalid message is left to the parser.
    """
    if len(body) <= _FEW_BYTES:
        return
    walk = _Walk(body, size)
    walk.count(kind.DESCRIPTOR, 0, len(body))  # type: ignore[arg-type]  # upb's is alike


def unknown_field(kind: str, number: int) -> InvalidRequestError:
    """Return the error of a message of a kind that has no field with a number."""
    return InvalidRequestError(f"{kind} has no field with number {number}.")


class _Walk:
    """One pass over a message and the messages nested in it."""

    def __init__(self, body: bytes, size: RequestSize) -> None:
        self._body = body
        self._size = size
        self._num_fields = 0
        self._outer = ""
        """The name of the field of the outermost message."""

    def count(self, kind: Descriptor, at: int, end: int, *, is_outer: bool = True) -> None:
        """Count the fields of a message between two offsets."""
        for name, nested, start, stop in self._fields(kind, at, end):
            if is_outer:
                self._outer = name
            if nested is not None:
                self.count(nested, start, stop, is_outer=False)
            elif stop > start:
                self._check_list(name, start, stop)

    def _fields(
        self, kind: Descriptor, at: int, end: int
    ) -> Iterator[tuple[str, Descriptor | None, int, int]]:
        """Yield the name of each field, and where its nested message or its packed list is."""
        body = self._body
        fields = kind.fields_by_number
        while at < end:
            self._num_fields += 1
            if self._num_fields > _MAX_FIELDS:
                self._reject()
            tag = body[at]
            at += 1
            if tag > 127:
                tag, at = _varint(body, at - 1, end)
            wire = tag & 7
            if wire in (_GROUP, _GROUP_END):
                # No message has groups, so the parser would skip a group and parse the rest.
                raise unknown_field(kind.name, tag >> 3)
            field = fields.get(tag >> 3)
            name = "" if field is None else field.name
            if wire == _DELIMITED:
                num_bytes, at = _varint(body, at, end)
                stop = min(at + num_bytes, end)
                if field is not None and field.message_type is not None:
                    yield name, field.message_type, at, stop
                elif field is not None and field.is_packed:
                    yield name, None, at, stop
                else:
                    yield name, None, at, at
                at = stop
                continue
            yield name, None, at, at
            if wire == _VARINT:
                _, at = _varint(body, at, end)
            elif wire == _FIXED32:
                at += 4
            elif wire == _FIXED64:
                at += 8
            else:
                return

    def _reject(self) -> NoReturn:
        raise InvalidRequestError(
            f"{self._outer or 'The message'} has too many entries: a message may have at most "
            f"{_MAX_FIELDS} fields, those of nested messages included.",
            param=self._outer or "message",
        )

    def _check_list(self, name: str, at: int, end: int) -> None:
        """Raise ContextLengthError for a list that no context of the model holds."""
        if end - at <= self._size.num_list_values:
            return
        # The last byte of each number has its highest bit clear.
        num_values = len(self._body[at:end].translate(None, _CONTINUED))
        if num_values > self._size.num_list_values:
            field = self._outer or name
            raise ContextLengthError(
                f"{field} has {num_values} entries, but the context length of {self._size.context} "
                f"(--max-model-len) allows at most {self._size.num_list_values}.",
                param=field,
            )


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset after it; `end` for an invalid number."""
    if at < end and body[at] < 128:
        # The fast path of most tags and lengths.
        return body[at], at + 1
    number = shift = 0
    while at < end and shift < 70:
        byte = body[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    return 0, end
