"""MODEL is a folder or a Hub id."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedray.errors import CheckpointError
from workers.hub.model_name import HubName, parse_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B", "main")),
        ("a/b_c.d@v1.0", HubName("a/b_c.d", "v1.0")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        (f"a/b@{COMMIT}", HubName("a/b", COMMIT)),
    ],
)
def test_name_with_one_slash_is_a_hub_id(model: str, expected: HubName) -> None:
    assert parse_model(model) == expected


def test_folder_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse_model("org/name") == Path("org/name")
    assert parse_model(Path("org/other")) == Path("org/other")


@pytest.mark.parametrize(
    "model", ["/x", "./x", "../x", "~/x", "x", "", "a/b/c", "/a/b", "org/../x", "a/" + "b/" * 5000]
)
def test_name_that_is_no_id_is_not_a_folder(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing beside or below the working folder has such a name.
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(CheckpointError, match="is not a folder; a model is a folder with"):
        parse_model(model)


@pytest.mark.parametrize(
    "model",
    [
        *("a/..", "a/b..c", "a/b--c", "a/b c", 'a/"b"', "a/b'", "a/b\n", "a/\x00", "a/.b", "a/é"),
        "a/" + "b" * 97,
        "a/b;rm",
    ],
)
def test_invalid_id_is_named_in_one_line(model: str) -> None:
    with pytest.raises(CheckpointError, match="is neither a folder nor a valid Hub id") as caught:
        parse_model(model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "revision", ["", "..", "a..b", "a b", "-x", "x/", "x.lock", "a//b", "x" * 300]
)
def test_invalid_revision_is_rejected(revision: str) -> None:
    with pytest.raises(CheckpointError, match="names an invalid revision"):
        parse_model(f"a/b@{revision}")


def test_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"model.gguf is a file; a model is a folder"):
        parse_model(str(tmp_path / "model.gguf"))
