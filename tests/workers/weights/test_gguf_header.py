"""Headers of GGUF files: valid headers are read, all others are refused with one line."""

import struct
from pathlib import Path

import numpy as np
import pytest

from pagedray.errors import CheckpointError
from tests.workers.hub.damaged_gguf import (
    ARRAY,
    F32,
    LARGE,
    Q4_0,
    STRING,
    UINT32,
    field,
    file_bytes,
    tensor,
    text,
)
from workers.weights.gguf_file import GgufFile

VALID = file_bytes(
    fields=(
        field(b"general.architecture", STRING, text(b"llama")),
        field(b"llama.block_count", UINT32, struct.pack("<I", 2)),
        field(b"words", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"one") + text(b"two")),
        field(b"numbers", ARRAY, struct.pack("<IQ", UINT32, 3) + struct.pack("<3I", 1, 2, 3)),
    ),
    tensors=(
        tensor(b"first", (32, 2), Q4_0, 0),
        tensor(b"second", (4,), F32, 64),
    ),
    data=bytes(range(80)),
)
BAD = {
    "has no GGUF header": b"GGML" + bytes(60),
    "has GGUF version 1": file_bytes(version=1),
    "has GGUF version 50331648": file_bytes(version=3 << 24),
    "metadata fields, which are more": file_bytes(num_fields=LARGE),
    f"{LARGE} tensors, which are more": file_bytes(num_tensors=LARGE),
    "is truncated: its header": file_bytes(
        fields=(text(b"name") + struct.pack("<I", STRING) + struct.pack("<Q", LARGE),)
    ),
    "strings in 'words'": file_bytes(
        fields=(field(b"words", ARRAY, struct.pack("<IQ", STRING, LARGE)),)
    ),
    "elements in 'words'": file_bytes(
        fields=(field(b"words", ARRAY, struct.pack("<IQ", UINT32, LARGE)),)
    ),
    "of an unsupported type 9": file_bytes(
        fields=(field(b"words", ARRAY, struct.pack("<IQ", ARRAY, 1)),)
    ),
    "of an unknown type 77": file_bytes(fields=(field(b"words", 77, bytes(4)),)),
    "metadata field 'same' twice": file_bytes(
        fields=(field(b"same", UINT32, bytes(4)), field(b"same", UINT32, bytes(4)))
    ),
    "two tensors of the same name": file_bytes(
        tensors=(tensor(b"x", (4,), F32, 0), tensor(b"x", (4,), F32, 32)), data=bytes(64)
    ),
    "a tensor of 5 dimensions": file_bytes(tensors=(tensor(b"x", (1,) * 5, F32, 0),)),
    "of an unknown type 99": file_bytes(tensors=(tensor(b"x", (4,), 99, 0),)),
    "invalid shape or offset": file_bytes(tensors=(tensor(b"x", (31,), Q4_0, 0),)),
    "is truncated: tensor 'x'": file_bytes(tensors=(tensor(b"x", (LARGE, LARGE), F32, 0),)),
    "within another tensor": file_bytes(
        tensors=(tensor(b"x", (16,), F32, 0), tensor(b"y", (4,), F32, 32)), data=bytes(64)
    ),
    "invalid general.alignment": file_bytes(
        fields=(field(b"general.alignment", UINT32, struct.pack("<I", 0)),)
    ),
    "a name of 70000 bytes": file_bytes(fields=(text(bytes(70000)),)),
}


def test_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(VALID)
    file = GgufFile.read(path)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.block_count"] == 2
    assert file.metadata["words"] == ["one", "two"]
    numbers = file.metadata["numbers"]
    assert isinstance(numbers, np.ndarray)
    assert numbers.tolist() == [1, 2, 3]
    assert file.tensors["first"].shape == (2, 32)
    assert file.tensors["first"].num_bytes == 36
    assert VALID[file.tensors["second"].first_byte :][:16] == bytes(range(64, 80))


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_header_is_refused(tmp_path: Path, problem: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(BAD[problem])
    with pytest.raises(CheckpointError) as error:
        GgufFile.read(path)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_ends_early_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for length in range(len(VALID)):
        path.write_bytes(VALID[:length])
        with pytest.raises(CheckpointError):
            GgufFile.read(path)
