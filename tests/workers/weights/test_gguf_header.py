"""Headers of GGUF files that lie or end early are refused, without memory for what they claim."""

import random
import resource
import struct
from pathlib import Path

import numpy as np
import pytest

from pagedray.errors import CheckpointError
from workers.weights.gguf_file import GgufFile

STRING, ARRAY, UINT32 = 8, 9, 4
TYPE_F32, TYPE_Q4_0 = 0, 2


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    shape = b"".join(struct.pack("<Q", size) for size in sizes)
    return text(name) + struct.pack("<I", len(sizes)) + shape + struct.pack("<IQ", kind, offset)


def file_bytes(
    *,
    version: int = 3,
    fields: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    num_fields: int | None = None,
    num_tensors: int | None = None,
    data: bytes = b"",
) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(fields) if num_fields is None else num_fields,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*fields, *tensors))
    return header + bytes(-len(header) % 32) + data


VALID = file_bytes(
    fields=(
        field(b"general.architecture", STRING, text(b"llama")),
        field(b"llama.block_count", UINT32, struct.pack("<I", 2)),
        field(b"words", ARRAY, struct.pack("<IQ", STRING, 2) + text(b"one") + text(b"two")),
        field(b"numbers", ARRAY, struct.pack("<IQ", UINT32, 3) + struct.pack("<3I", 1, 2, 3)),
    ),
    tensors=(
        tensor(b"first", (32, 2), TYPE_Q4_0, 0),
        tensor(b"second", (4,), TYPE_F32, 64),
    ),
    data=bytes(range(80)),
)
LARGE = 2**60
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
        tensors=(tensor(b"x", (4,), TYPE_F32, 0), tensor(b"x", (4,), TYPE_F32, 32)), data=bytes(64)
    ),
    "a tensor of 5 dimensions": file_bytes(tensors=(tensor(b"x", (1,) * 5, TYPE_F32, 0),)),
    "of an unknown type 99": file_bytes(tensors=(tensor(b"x", (4,), 99, 0),)),
    "invalid shape or offset": file_bytes(tensors=(tensor(b"x", (31,), TYPE_Q4_0, 0),)),
    "is truncated: tensor 'x'": file_bytes(tensors=(tensor(b"x", (LARGE, LARGE), TYPE_F32, 0),)),
    "within another tensor": file_bytes(
        tensors=(tensor(b"x", (16,), TYPE_F32, 0), tensor(b"y", (4,), TYPE_F32, 32)), data=bytes(64)
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


@pytest.mark.parametrize("num_files", [500, pytest.param(200_000, marks=pytest.mark.slow)])
def test_damaged_headers_take_no_memory(tmp_path: Path, num_files: int) -> None:
    chance = random.Random(num_files)
    path = tmp_path / "model.gguf"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_refused = 0
    for _ in range(num_files):
        damaged = bytearray(VALID)
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(damaged) - 8)
            value = chance.choice((chance.randrange(256), 2 ** chance.randrange(64) - 1, LARGE))
            size = chance.choice((1, 4, 8))
            damaged[place : place + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
        path.write_bytes(damaged)
        try:
            GgufFile.read(path)
        except CheckpointError:
            num_refused += 1
    assert num_refused > num_files / 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
