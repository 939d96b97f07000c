"""Errors name a file of a checkpoint that cannot be read, or is not a regular file."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cluster.engine.engine_options import sampling_defaults
from cluster.serving.embedding_validator import SentencePrompts
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.errors import CheckpointError
from tests.system.server_process import TINY_LLAMA
from workers.models.config_json.sentence_modules import dense_modules
from workers.models.families.registry import read_model_config
from workers.weights.tensor_entries import read_entries

ROOT_UID, OTHER_UID = 0, 65534
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A checkpoint that every user may read."""
    with TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        target = Path(name) / "model"
        shutil.copytree(TINY_LLAMA, target)
        yield target
        target.chmod(0o755)


@pytest.fixture
def forbid() -> Iterator[Callable[[Path], None]]:
    """Take the permissions of a path from this process, which root would have all the same."""

    def forbid(path: Path) -> None:
        path.chmod(0)
        if os.geteuid() == ROOT_UID:
            os.seteuid(OTHER_UID)

    yield forbid
    if os.getuid() == ROOT_UID:
        os.seteuid(ROOT_UID)


def test_a_folder_without_permission_is_named(folder: Path, forbid: Callable[[Path], None]) -> None:
    forbid(folder)
    with pytest.raises(CheckpointError, match=r"model/config\.json cannot be read: Permission"):
        read_model_config(folder)


@pytest.mark.parametrize("read", [SentencePrompts.from_folder, partial(dense_modules, size=8)])
def test_optional_settings_without_permission_are_not_ignored(
    read: Callable[[Path], object], folder: Path, forbid: Callable[[Path], None]
) -> None:
    forbid(folder)
    with pytest.raises(CheckpointError, match=r"\.json cannot be read: Permission"):
        read(folder)


@pytest.mark.parametrize("name", [WEIGHTS, INDEX])
def test_weights_without_permission_are_named(
    name: str, folder: Path, forbid: Callable[[Path], None]
) -> None:
    (folder / WEIGHTS).rename(folder / name)
    forbid(folder / name)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} cannot be read: Permission"):
        read_entries(folder)


def test_settings_of_the_tokenizer_without_permission_are_named(
    folder: Path, forbid: Callable[[Path], None]
) -> None:
    forbid(folder / "tokenizer_config.json")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Permission"):
        Tokenizer.from_folder(folder)


def test_a_chat_template_without_permission_is_named(
    folder: Path, forbid: Callable[[Path], None]
) -> None:
    template = folder / "chat_template.jinja"
    template.write_text("x")
    forbid(template)
    with pytest.raises(CheckpointError, match="jinja cannot be read: Permission"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", [WEIGHTS, INDEX])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_weights_that_are_not_a_file_are_named(
    name: str, make: Callable[[Path], object], folder: Path
) -> None:
    (folder / WEIGHTS).unlink()
    make(folder / name)
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} is not a file"):
        read_entries(folder)


def _read_sampling_defaults(folder: Path) -> object:
    return sampling_defaults("auto", folder)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_model_config),
        ("generation_config.json", read_model_config),
        ("generation_config.json", _read_sampling_defaults),
        ("tokenizer.json", Tokenizer.from_folder),
        ("tokenizer_config.json", Tokenizer.from_folder),
        ("chat_template.jinja", Tokenizer.from_folder),
        (WEIGHTS, read_entries),
    ],
)
def test_a_link_whose_file_was_not_copied_is_named(
    name: str, read: Callable[[Path], object], folder: Path
) -> None:
    path = folder / name
    path.unlink(missing_ok=True)
    path.symlink_to("../../blobs/0f3e")
    with pytest.raises(CheckpointError, match=f"{re.escape(name)} is a link to ../../blobs/0f3e"):
        read(folder)


def test_a_shard_that_links_to_itself_is_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    shard = folder / "one.safetensors"
    shard.symlink_to(shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard.name}}))
    with pytest.raises(CheckpointError, match=r"one\.safetensors is a link to "):
        read_entries(folder)
