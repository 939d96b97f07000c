"""Model folders that bring code: none of it runs, and the folder is rejected by name."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.text.tokenizer import Tokenizer
from pagedray.errors import CheckpointError
from workers.models.families.registry import read_model_config
from workers.weights.tensor_entries import read_entries

if TYPE_CHECKING:
    from collections.abc import Callable

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"


class Touch:
    """What creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self._path}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy = shutil.copytree(TINY_LLAMA, tmp_path / "model")
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'canary')!r}).touch()\n"
    for name in ("configuration_evil.py", "modeling_evil.py", "tokenization_evil.py"):
        (copy / name).write_text(code)
    return copy


def change(path: Path, values: dict[str, Any]) -> None:  # Any: JSON
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_configuration_that_names_code_runs_none(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = read_model_config(folder)
    names = {
        "auto_map": {
            "AutoConfig": "configuration_evil.Evil",
            "AutoModelForCausalLM": "modeling_evil.Evil",
        }
    }
    change(folder / "config.json", names)
    assert read_model_config(folder) == expected
    assert "auto_map is not run; PagedRay computes LlamaForCausalLM itself" in caplog.text
    assert not (tmp_path / "canary").exists()


def test_tokenizer_that_names_code_runs_none(folder: Path, tmp_path: Path) -> None:
    names = {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["tokenization_evil.E", None]},
    }
    change(folder / "tokenizer_config.json", names)
    expected = Tokenizer.from_folder(TINY_LLAMA).encode("x")
    assert Tokenizer.from_folder(folder).encode("x") == expected
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt"])
def test_pickled_weights_are_not_read(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Touch(tmp_path / "canary")))
    with pytest.raises(CheckpointError):
        read_entries(folder)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/hostname", "a/../../b.bin"])
def test_weights_outside_the_folder_are_not_read(folder: Path, tmp_path: Path, name: str) -> None:
    shutil.move(folder / "model.safetensors", tmp_path / "secret.safetensors")
    index = {"weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside"):
        read_entries(folder)
