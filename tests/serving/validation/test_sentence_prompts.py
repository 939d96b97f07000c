"""Prompts by name, as sentence-transformers stores them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from cluster.serving.validation.embedding_validator import SentencePrompts
from pagedray import LLM
from pagedray.errors import CheckpointError, InvalidRequestError
from tests.system.server_process import TINY_LLAMA

if TYPE_CHECKING:
    from pathlib import Path

QUERY = "Instruct: Find it\nQuery:"


def write(folder: Path, **values: object) -> None:
    (folder / "config_sentence_transformers.json").write_text(json.dumps(values))


def test_a_checkpoint_without_prompts_has_none(tmp_path: Path) -> None:
    prompts = SentencePrompts.from_folder(tmp_path)
    assert prompts.prompt(None) == ""
    with pytest.raises(InvalidRequestError, match="which has none, not 'query'"):
        prompts.prompt("query")


def test_a_prompt_is_found_by_its_name(tmp_path: Path) -> None:
    write(tmp_path, prompts={"query": QUERY, "document": ""}, default_prompt_name=None)
    prompts = SentencePrompts.from_folder(tmp_path)
    assert [prompts.prompt(name) for name in ("query", "document", None)] == [QUERY, "", ""]
    with pytest.raises(InvalidRequestError, match="which has query, document, not 'x'"):
        prompts.prompt("x")


def test_the_default_prompt_is_that_of_unnamed_ones(tmp_path: Path) -> None:
    write(tmp_path, prompts={"query": QUERY, "document": "d"}, default_prompt_name="query")
    prompts = SentencePrompts.from_folder(tmp_path)
    assert [prompts.prompt(name) for name in (None, "document")] == [QUERY, "d"]


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"prompts": {"query": 3}}, r"prompts.query must be a text"),
        ({"prompts": {}, "default_prompt_name": "query"}, "default_prompt_name must be the name"),
        ({"prompts": {"a": "b"}, "default_prompt_name": 3}, "default_prompt_name must be the name"),
    ],
)
def test_invalid_prompts_are_named(values: dict[str, object], part: str, tmp_path: Path) -> None:
    write(tmp_path, **values)
    with pytest.raises(CheckpointError, match=part):
        SentencePrompts.from_folder(tmp_path)


def test_prompts_are_written_before_texts(tmp_path: Path) -> None:
    shutil.copytree(TINY_LLAMA, tmp_path, dirs_exist_ok=True)
    write(tmp_path, prompts={"query": QUERY, "document": "Text: "}, default_prompt_name="document")
    with LLM(
        tmp_path, device="cpu", executor="local", task="embed", num_threads=1, show_progress=False
    ) as llm:
        named = llm.embed(["import"], prompt_name="query")
        default = llm.embed(["import"])
        with pytest.raises(InvalidRequestError, match="cannot be used with token ids"):
            llm.embed([[5, 6]], prompt_name="query")
        ids = llm.embed([[5, 6]])
    (tmp_path / "config_sentence_transformers.json").unlink()
    with LLM(
        tmp_path, device="cpu", executor="local", task="embed", num_threads=1, show_progress=False
    ) as llm:
        assert named == llm.embed([f"{QUERY}import"])
        assert default == llm.embed(["Text: import"])
        assert ids == llm.embed([[5, 6]])
