"""Modules of sentence-transformers that run here, and those that are rejected by name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cluster.serving.validation.sentence_modules import check_modules, longest_text
from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path


def write_modules(folder: Path, *kinds: str) -> None:
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": "",
            "type": f"sentence_transformers.models.{one}",
        }
        for index, one in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def test_modules_that_run_here_are_accepted(tmp_path: Path) -> None:
    check_modules(tmp_path)
    write_modules(tmp_path, "Transformer", "Pooling", "Normalize")
    check_modules(tmp_path)


@pytest.mark.parametrize("kind", ["Dense", "LayerNorm", "WeightedLayerPooling", "CNN"])
def test_a_module_that_would_change_vectors_is_rejected(kind: str, tmp_path: Path) -> None:
    write_modules(tmp_path, "Transformer", "Pooling", kind)
    with pytest.raises(CheckpointError, match=rf"2\.type names the module '{kind}'; supported"):
        check_modules(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[1]", "[", '[{"type": 3}]', "[{}]"])
def test_a_broken_list_of_modules_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        check_modules(tmp_path)


@pytest.mark.parametrize(
    ("settings", "longest"),
    [({}, 512), ({"max_seq_length": 256}, 256), ({"max_seq_length": 4096}, 512)],
)
def test_the_longest_text_is_that_of_the_checkpoint(
    settings: dict[str, object], longest: int, tmp_path: Path
) -> None:
    assert longest_text(tmp_path, 512) == 512
    path = tmp_path / "sentence_bert_config.json"
    path.write_text(json.dumps(settings | {"do_lower_case": False}))
    assert longest_text(tmp_path, 512) == longest


def test_text_that_would_become_lower_case_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    with pytest.raises(CheckpointError, match="do_lower_case must be false, not true"):
        longest_text(tmp_path, 512)
