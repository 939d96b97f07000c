"""Prompts that ask for the middle, against what the authors of the models publish."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import pytest
import transformers

from cluster.serving.text.tokenizer import Tokenizer
from tests.serving.checkpoint import write_tokenizer
from tests.serving.text.sentencepiece_folder import write_sentencepiece

if TYPE_CHECKING:
    from pathlib import Path

CODE_LLAMA = ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>")
MISTRAL = ("[PREFIX]", "[MIDDLE]", "[SUFFIX]")
PREFIXES = ("def f(x):\n    ", "import", "", "  x", "\n\u4f60")
SUFFIXES = ("\n    return x\n", " x + 1", "return", "\u263a", "(\U0001f600)", "    ")


@pytest.mark.parametrize("adds_special_tokens", [True, False])
def test_code_llama_reads_the_suffix_without_a_leading_space(
    tmp_path: Path, adds_special_tokens: bool
) -> None:
    library = write_sentencepiece(tmp_path, CODE_LLAMA)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.infilling is not None
    pre, suf, mid, eot = map(library.piece_to_id, CODE_LLAMA)
    start = [library.bos_id()] if adds_special_tokens else []
    for prefix, suffix in product(PREFIXES, SUFFIXES):
        # As in Meta's code: the first two tokens are the space and the character.
        after = library.encode(f"\u263a{suffix}")[2:]
        expected = [*start, pre, *library.encode(prefix), suf, *after, mid]
        found = tokenizer.infilling.encode(
            prefix, suffix, tokenizer, add_special_tokens=adds_special_tokens
        )
        assert found == expected
    assert eot in tokenizer.infilling.end_token_ids


def test_codestral_reads_the_suffix_first(tmp_path: Path) -> None:
    library = write_sentencepiece(tmp_path, MISTRAL)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.infilling is not None
    before, middle, after = map(library.piece_to_id, MISTRAL)
    for prefix, suffix in product(PREFIXES, SUFFIXES):
        # As in mistral-common.
        suffix_ids = library.encode(f"\u263a{suffix}")[2:]
        expected = [library.bos_id(), after, *suffix_ids, before, *library.encode(prefix)]
        found = tokenizer.infilling.encode(prefix, suffix, tokenizer, add_special_tokens=True)
        assert found == expected
    assert set(tokenizer.infilling.end_token_ids) == {before, middle, after}


@pytest.mark.parametrize(
    ("mark", "expected"),
    [
        ("<fim_{}>", "<fim_prefix>P<fim_suffix>S<fim_middle>"),
        ("<[fim-{}]>", "<[fim-suffix]>S<[fim-prefix]>P<[fim-middle]>"),
        (
            "<\uff5cfim\u2581{}\uff5c>",
            "<\uff5cfim\u2581begin\uff5c>P<\uff5cfim\u2581hole\uff5c>S<\uff5cfim\u2581end\uff5c>",
        ),
    ],
)
def test_other_families_have_the_text_of_their_cards(
    tmp_path: Path, mark: str, expected: str
) -> None:
    names = ("prefix", "suffix", "middle", "begin", "hole", "end")
    write_tokenizer(tmp_path, special_tokens=[mark.format(name) for name in names])
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.infilling is not None
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json")
    )
    found = tokenizer.infilling.encode("P", "S", tokenizer, add_special_tokens=True)
    assert found == reference(expected).input_ids


@pytest.mark.parametrize(
    "marks", [CODE_LLAMA[1:], ("[PREFIX]", "[MIDDLE]"), ()], ids=["llama", "mistral", "none"]
)
def test_tokenizers_with_some_of_the_tokens_have_no_format(
    tmp_path: Path, marks: tuple[str, ...]
) -> None:
    write_sentencepiece(tmp_path, marks)
    assert Tokenizer.from_folder(tmp_path).infilling is None
