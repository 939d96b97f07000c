"""Indices of checkpoints in several files."""

from __future__ import annotations

from pathlib import Path

from pagedray.errors import CheckpointError
from tests.hostile.fuzz.scratch import scratch_folder
from tests.hostile.fuzz.target import Target, check_message
from workers.weights.tensor_entries import read_entries

_FOLDER = scratch_folder()
_HEADER = b'{"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'
Path(_FOLDER, "x.safetensors").write_bytes(len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(4))


def run(data: bytes) -> None:
    """Return the tensors of the files beside it, or CheckpointError."""
    Path(_FOLDER, "model.safetensors.index.json").write_bytes(data)
    try:
        entries = read_entries(_FOLDER)
    except CheckpointError as error:
        check_message(error)
        return
    assert {entry.path.parent for entry in entries.values()} <= {_FOLDER}


TARGET = Target(
    run=run,
    seeds=(
        b'{"metadata":{"total_size":4},"weight_map":{"a":"x.safetensors"}}',
        b'{"weight_map":{"a":"../x.safetensors","b":"/etc/passwd"}}',
    ),
    words=(b"../", b"/dev/zero", b"\\u0000", b"\\ud800", b".safetensors", b"x" * 300, b"null"),
    max_bytes=1024,
)
