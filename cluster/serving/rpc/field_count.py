"""Counts the fields of an encoded message before it is parsed.

Parsing makes an object of each field, and a field may take as little as two bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.errors import ContextLengthError, InvalidRequestError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

    from cluster.serving.intake.limits import RequestSize
    from cluster.serving.intake.steps import Steps

__all__ = ["check_fields"]

_MAX_FIELDS = 3 * 2**13
_STEP_FIELDS = 2**11
_FEW_BYTES = 2**12
"""A message of this size has few fields whatever they are."""
_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_CONTINUED = bytes(range(128, 256))


def check_fields(kind: type[Message], body: bytes, size: RequestSize) -> Steps[None]:
    """Raise InvalidRequestError for too many fields, or too many token ids in one of them.

    What is not a valid message is left to the parser.
    """
    if len(body) <= _FEW_BYTES:
        return
    walk = _Walk(body, size)
    yield from walk.count(kind.DESCRIPTOR, 0, len(body))  # type: ignore[arg-type]  # upb's is alike


class _Walk:
    """One pass over a message and the messages nested in it."""

    def __init__(self, body: bytes, size: RequestSize) -> None:
        self._body = body
        self._size = size
        self._num_fields = 0
        self._outer = ""
        """The name of the field of the outermost message."""

    def count(self, kind: Descriptor, at: int, end: int, *, is_outer: bool = True) -> Steps[None]:
        """Count the fields of a message between two offsets."""
        body = self._body
        fields = kind.fields_by_number
        while at < end:
            tag, at = _varint(body, at, end)
            field = fields.get(tag >> 3)
            if is_outer and field is not None:
                self._outer = field.name
            self._num_fields += 1
            if self._num_fields % _STEP_FIELDS == 0:
                self._check()
                yield
            wire = tag & 7
            if wire == _VARINT:
                _, at = _varint(body, at, end)
            elif wire == _DELIMITED:
                num_bytes, at = _varint(body, at, end)
                if field is not None and field.message_type is not None:
                    nested = min(at + num_bytes, end)
                    yield from self.count(field.message_type, at, nested, is_outer=False)
                elif field is not None and field.is_packed:
                    self._check_list(field.name, at, at + num_bytes)
                at += num_bytes
            elif wire == _FIXED32:
                at += 4
            elif wire == _FIXED64:
                at += 8
            else:
                return

    def _check(self) -> None:
        if self._num_fields > _MAX_FIELDS:
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
            raise ContextLengthError(
                f"{name} has {num_values} entries, but the context length of {self._size.context} "
                f"(--max-model-len) allows at most {self._size.num_list_values}.",
                param=self._outer,
            )


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number at an offset, and the offset after it; `end` for an invalid one."""
    number = shift = 0
    while at < end and shift < 70:
        byte = body[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    return 0, end
