"""Digests of the files of a checkpoint, which tell versions of its weights apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from workers.weights.checkpoint import Checkpoint

WEIGHTS = "model.safetensors"
NUM_ROWS, NUM_COLUMNS = 9000, 1024


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {"norm.weight": torch.ones(7), "embed.weight": torch.zeros(NUM_ROWS, NUM_COLUMNS)}


def digests_of(folder: Path) -> dict[str, str]:
    with Checkpoint(folder) as checkpoint:
        return checkpoint.file_digests()


def test_a_copy_has_the_same_digests(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / WEIGHTS)
    before = digests_of(tmp_path)
    assert list(before) == [WEIGHTS]
    os.utime(tmp_path / WEIGHTS, (1, 1))
    assert digests_of(tmp_path) == before
    # The values are at other places of the file.
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    assert digests_of(tmp_path) == before


@pytest.mark.parametrize("row", [0, NUM_ROWS // 2, NUM_ROWS - 1], ids=["first", "middle", "last"])
def test_a_changed_part_of_a_tensor_changes_the_digest(
    row: int, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / WEIGHTS)
    before = digests_of(tmp_path)
    # As much as one part of several of a large tensor.
    width = 1 if row in (0, NUM_ROWS - 1) else NUM_ROWS // 2
    tensors["embed.weight"][max(0, row - width // 2) :][:width] = 1.0
    save_file(tensors, tmp_path / WEIGHTS)
    assert digests_of(tmp_path) != before


@pytest.mark.parametrize(
    "change",
    [
        {"norm.weight": torch.ones(7, dtype=torch.float64)},
        {"norm.weight": torch.ones(7, 1)},
        {"norm.bias": torch.ones(7)},
    ],
    ids=["dtype", "shape", "tensor"],
)
def test_other_tensors_change_the_digest(
    change: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / WEIGHTS)
    before = digests_of(tmp_path)
    save_file(tensors | change, tmp_path / WEIGHTS)
    assert digests_of(tmp_path) != before
