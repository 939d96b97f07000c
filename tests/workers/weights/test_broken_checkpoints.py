"""Checkpoints that cannot be loaded, each rejected with an error that names the cause."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagedray.errors import CheckpointError
from tests.workers.reference import loaded_model, save_checkpoint
from tests.workers.weights.small_checkpoint import CASE, QUERY, rewrite
from workers.parallel.group import SoloGroup
from workers.weights.checkpoint import Checkpoint


def _message(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        loaded_model(folder, SoloGroup())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {"model.layers.9.mlp.secret": torch.zeros(2)})
    message = _message(tmp_path)
    assert "model.safetensors: unexpected tensor model.layers.9.mlp.secret, which" in message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    rewrite(tmp_path, lambda tensors: {k: v for k, v in tensors.items() if k != QUERY})
    assert f"tensor {QUERY} is missing" in _message(tmp_path)


def test_an_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert "tensor lm_head.weight is missing" in _message(tmp_path)


def test_an_unexpected_shape_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {QUERY: torch.zeros(48, 47)})
    message = _message(tmp_path)
    assert f"model.safetensors: tensor {QUERY} has shape [48, 47], but config" in message
    assert "requires [48, 48]" in message


def test_an_unexpected_type_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors | {QUERY: torch.zeros(48, 48, dtype=torch.int8)})
    message = _message(tmp_path)
    assert f"tensor {QUERY} has dtype I8; supported dtypes are F64, F32" in message


@pytest.mark.parametrize("part", [0.0, 0.0001, 0.01, 0.05, 0.3, 0.7, 0.99, 0.99999])
def test_a_truncated_file_is_named(part: float, tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    message = _message(tmp_path)
    assert str(path) in message
    if part >= 0.3:
        assert "is truncated: tensor model." in message


def _with_length(header: dict[str, Any], data: bytes, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (_with_length({}, b"", 2**63), f"and a header of {2**63}"),
        (_with_length({}, b"", 2**20), f"and a header of {2**20}"),
        (struct.pack("<Q", 4) + b"{]{]", "is not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "must contain a JSON object"),
        (_with_length({"a": 3}, bytes(8)), "entry of tensor a is invalid"),
        (_with_length({"a": _ENTRY | {"shape": [-2]}}, bytes(8)), "entry of tensor a is invalid"),
        (_with_length({"a": _ENTRY | {"shape": [True]}}, bytes(8)), "entry of tensor a is invalid"),
        (_with_length({"a": _ENTRY | {"shape": [3]}}, bytes(8)), "must have 12 bytes, not 8"),
        (_with_length({"a": _ENTRY | {"shape": [2**40] * 4}}, bytes(8)), "must have"),
        (_with_length({"a": _ENTRY}, bytes(4)), "truncated: tensor a ends at byte 8 of 4"),
        (_with_length({"a": _ENTRY, "b": _ENTRY}, bytes(8)), "cannot be read"),
        (_with_length({"a": _ENTRY}, bytes(12)), "cannot be read"),
    ],
)
def test_an_inconsistent_header_is_named(content: bytes, part: str, tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    message = _message(tmp_path)
    assert str(tmp_path / "model.safetensors") in message
    assert part in message


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "No model.safetensors or model.safetensors.index.json found" in _message(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"the file {shard.name!r} is missing" in _message(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "part"),
    [
        (None, "weight_map must be an object"),
        ({}, "weight_map must be an object"),
        ({"a": 3}, "tensor a must be in a .safetensors file, not 3"),
        ({"a": "model.bin"}, "tensor a must be in a .safetensors file"),
        ({"a": "../outside.safetensors"}, "to a file outside of"),
        ({"a": "/etc/outside.safetensors"}, "to a file outside of"),
        ({"a": "link.safetensors"}, "to a file outside of"),
        ({"a": "x\0.safetensors"}, r"has no file 'x\x00.safetensors'"),
        ({"a": "\ud800.safetensors"}, r"has no file '\ud800.safetensors'"),
        ({"a": "x" * 300 + ".safetensors"}, "has no file 'xxx"),
        ({"a\nb": 3}, r"tensor 'a\nb' must be in"),
        ({"a": "here.safetensors"}, "tensor a is missing"),
    ],
)
def test_a_broken_index_is_named(weight_map: Any, part: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_checkpoint(CASE, folder)
    (folder / "model.safetensors").rename(folder / "here.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    message = _message(folder)
    assert str(folder) in message
    assert part in message


def test_an_index_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, 64 * 2**20 + 1)
    with pytest.raises(CheckpointError, match=r"index.json has more than 67108864 bytes"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="tensor a is also in one"):
        Checkpoint(tmp_path)
