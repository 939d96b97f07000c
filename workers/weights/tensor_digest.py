"""Digests that differ for two versions of a tensor, but not by the place or time of their files."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

from workers.weights.tensor_entries import ITEM_BYTES

if TYPE_CHECKING:
    from workers.weights.tensor_entries import TensorEntry
    from workers.weights.tensor_reader import TensorReader

__all__ = ["tensor_digest"]

_SAMPLE_BYTES = 4096
_DISTANCE_BYTES = 2**24
"""Distance from the beginning of one sample to that of the next."""


def tensor_digest(name: str, entry: TensorEntry, reader: TensorReader) -> bytes:
    """Return 32 bytes for a tensor's name, dtype, shape, and samples of its values.

    All values would take long to read. The samples are at its beginning and its end, where
    training may change a few rows only, and at equal distances between them. Raises OSError, and
    CheckpointError if the file has become shorter.
    """
    num_bytes = math.prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 0)
    digest = hashlib.sha256(repr((name, entry.dtype, entry.shape)).encode())
    for first in (*range(0, num_bytes, _DISTANCE_BYTES), max(0, num_bytes - _SAMPLE_BYTES)):
        digest.update(reader.read(entry, first, min(_SAMPLE_BYTES, num_bytes - first)))
    return digest.digest()
