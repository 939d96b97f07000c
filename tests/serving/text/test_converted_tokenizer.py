"""Tokenizers that transformers converts, against sentencepiece and the merges of tekken."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from cluster.cli.commands import main
from cluster.serving.text.tokenizer import Tokenizer
from pagedray.errors import CheckpointError
from tests.serving.text.sentencepiece_folder import train_sentencepiece
from tests.system.server_process import TINY_LLAMA

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from pathlib import Path

TEXTS = ["import numpy as np", "  def  f(x):", "na\u00efve \u4f60\u597d \U0001f600", ""]
SENTENCES = ("import numpy as np", "def f(x): return x", "class A: pass")
TEKKEN_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+"
MERGED = [b"im", b"port", b"po", b"rt", b"import", b" n", b"um"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY_LLAMA / name, tmp_path / name)
    return tmp_path


def save_sentencepiece(folder: Path) -> sentencepiece.SentencePieceProcessor:
    model = train_sentencepiece()
    (folder / "tokenizer.model").write_bytes(model)
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"unk_token": "<unk>"}))
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def save_tekken(folder: Path) -> dict[bytes, int]:
    """Save a tokenizer of bytes and a few merges; return the ranks of its tokens."""
    tokens = [*(bytes([index]) for index in range(256)), *sorted(MERGED, key=len)]
    special = ["<unk>", "<s>", "</s>"]
    content = {
        "config": {
            "pattern": TEKKEN_PATTERN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + len(special),
            "default_num_special_tokens": len(special),
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate(special)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(content))
    return {token: rank + len(special) for rank, token in enumerate(tokens)}


def merged(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Return the ids of a word: its bytes, of which the pair of the least rank is merged first."""
    parts = [bytes([value]) for value in word]
    while True:
        pairs = [(ranks.get(a + b, 10**9), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, place = min(pairs, default=(10**9, 0))
        if rank == 10**9:
            return [ranks[part] for part in parts]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


def test_sentencepiece_model_is_read_as_the_library_reads_it(folder: Path) -> None:
    processor = save_sentencepiece(folder)
    tokenizer = Tokenizer.from_folder(folder)
    # Any: the library's types are inconsistent here.
    reference: Any = AutoTokenizer.from_pretrained(folder)
    for text in (*TEXTS, *SENTENCES):
        assert tokenizer.encode(text) == reference.encode(text)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == reference.decode(ids)
    # Where spaces follow one another, transformers merges them in another order.
    for text in SENTENCES:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == processor.encode(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_ids == (processor.eos_id(),)


def test_tekken_merges_by_its_ranks(folder: Path) -> None:
    ranks = save_tekken(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    tokenizer = Tokenizer.from_folder(folder)
    words = (b"import", b" numpy", b" as", b" np")
    expected = [token for word in words for token in merged(word, ranks)]
    ids = tokenizer.encode("import numpy as np", add_special_tokens=False)
    assert ids == expected
    assert ranks[b"import"] in ids
    text = "na\u00efve \u4f60\u597d \U0001f600"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json"])
def test_file_that_cannot_be_converted_is_named(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=rf"{name} cannot be converted by transformers: "):
        Tokenizer.from_folder(folder)
    assert main(("generate", str(folder), "x", "--device=cpu", "--executor=local")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pagedray: error: ")


def test_missing_library_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_sentencepiece(folder)
    find = importlib.util.find_spec

    def find_others(name: str) -> ModuleSpec | None:
        return None if name == "sentencepiece" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    with pytest.raises(CheckpointError, match="without sentencepiece; run: pip install transf"):
        Tokenizer.from_folder(folder)
