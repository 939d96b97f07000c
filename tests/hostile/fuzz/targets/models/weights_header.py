"""Headers of safetensors files in the folder of a model."""

from __future__ import annotations

import json
from pathlib import Path

from pagedray.errors import CheckpointError
from tests.hostile.fuzz.scratch import scratch_folder
from tests.hostile.fuzz.target import Target, check_message
from workers.weights.tensor_entries import read_entries

_FOLDER = scratch_folder()


def run(data: bytes) -> None:
    """Return tensors that the file has, or CheckpointError.

    Unless the first byte is 0, the length of the header is put before the rest, and tensors of
    that many bytes after it.
    """
    if not data:
        return
    content = data[1:]
    if data[0]:
        content = len(content).to_bytes(8, "little") + content + bytes(data[0])
    path = Path(_FOLDER, "model.safetensors")
    path.write_bytes(content)
    try:
        entries = read_entries(_FOLDER)
    except CheckpointError as error:
        check_message(error)
        return
    assert all(entry.path == path for entry in entries.values())


def _header(**tensors: object) -> bytes:
    return json.dumps(tensors).encode()


_ONE = {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}

TARGET = Target(
    run=run,
    seeds=(
        b"\x0c" + _header(a=_ONE),
        b"\x18"
        + _header(
            __metadata__={"format": "pt"},
            a=_ONE,
            b={"dtype": "F32", "shape": [], "data_offsets": [12, 16]},
            c={"dtype": "F64", "shape": [1], "data_offsets": [16, 24]},
        ),
        b"\x00\x02\x00\x00\x00\x00\x00\x00\x00{}",
        b"\x00\xff\xff\xff\xff\xff\xff\xff\xff",
    ),
    words=(
        *(b'"F16"', b'"I64"', b'"BOOL"', b'"F8_E4M3"', b'"data_offsets":', b'"shape":', b"[0,0]"),
        *(b"18446744073709551616", b"-1", b"1e3", b"true", b'"__metadata__":{"a":"b"},', b"NaN"),
    ),
    max_bytes=1024,
)
