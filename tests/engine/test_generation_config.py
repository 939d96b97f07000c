"""Sampling parameters of generation_config.json, for requests that do not set them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cluster.engine.engine_options import sampling_defaults
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

GIVEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True, "eos_token_id": 1}


def write(folder: Path, values: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def test_auto_is_the_models_file(tmp_path: Path) -> None:
    assert sampling_defaults("auto", tmp_path) == ()
    write(tmp_path, GIVEN)
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert dict(sampling_defaults("auto", tmp_path)) == expected
    assert sampling_defaults("none", tmp_path) == sampling_defaults("vllm", tmp_path) == ()


def test_a_folder_takes_its_place(tmp_path: Path) -> None:
    other = write(tmp_path / "other", {"temperature": 0, "min_p": 0.1, "top_k": None})
    assert dict(sampling_defaults(other, write(tmp_path, GIVEN))) == {
        "temperature": 0,
        "min_p": 0.1,
    }


@pytest.mark.parametrize(
    ("values", "text"),
    [({"temperature": "hot"}, "temperature must be a number"), ({"top_p": 2}, "top_p must be")],
)
def test_invalid_values_name_the_file(tmp_path: Path, values: object, text: str) -> None:
    with pytest.raises(StartupError, match=rf"generation_config.json: {text}"):
        sampling_defaults("auto", write(tmp_path, values))


def test_a_folder_without_the_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="must be auto, none or a folder"):
        sampling_defaults(tmp_path, tmp_path)
