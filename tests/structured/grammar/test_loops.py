"""Loops that are rewritten as rules match the same texts as in Python."""

from __future__ import annotations

import asyncio
import random
import re
from typing import TYPE_CHECKING

import pytest

from cluster.structured.grammar.expressions import write_ebnf
from cluster.structured.grammar.regex import read_regex
from cluster.structured.grammar.rewrites import with_loops_as_rules
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams
from pagedray.structure import Structure
from tests.structured.conftest import EOS
from tests.structured.made_masks import made_masks

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.compiler import StructureCompiler

REQUEST = Request(
    id="r", prompt_token_ids=(7,), sampling=SamplingParams(), seed=0, eos_token_ids=(EOS,)
)
PATTERNS = [
    *("(?:ab)*", "(?:ab)+", "(?:ab){2,}c", "(?:a|bc)*b", "(?:(?:ab)*c)*", "(?:(?:ab)+c)+a?"),
    *("(?:a{1,3}b)*", "a{2,4}b{0,2}c{3}", "(?:a|b){2,3}(?:c|a)*", "(?:ab?){1,3}", "(?:a*b*)*c"),
    *("(?:(?:a|b)c|ca)*(?:b|)", "(?:a(?:b(?:c)*)*)*", "((a+)+)+b", "(?:a{0,2}){0,2}", "a?b?c?"),
]


def texts() -> list[str]:
    generator = random.Random(0)
    found = dict.fromkeys(["", "a", "b", "c"])
    for _ in range(250):
        found["".join(generator.choices("abc", k=generator.randint(1, 8)))] = None
    return list(found)


def ends(mask: bytes | FinishReason) -> bool:
    """Whether a mask allows the end of the text."""
    return isinstance(mask, bytes) and bool(mask[EOS // 8] >> EOS % 8 & 1)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_texts_match(
    compiler: StructureCompiler, tokenizer: Tokenizer, pattern: str
) -> None:
    grammar = asyncio.run(compiler.compile(Structure(kind="regex", text=pattern)))
    given = texts()
    asked = [
        (grammar.matcher(REQUEST), [7, *tokenizer.encode(text, add_special_tokens=False)])
        for text in given
    ]
    matching = {text for text, mask in zip(given, made_masks(asked), strict=True) if ends(mask)}
    assert matching == {text for text in given if re.fullmatch(pattern, text)}


@pytest.mark.parametrize("mark", ["*", "+", "?", "{1,2}"])
def test_nested_loops_do_not_multiply(mark: str) -> None:
    expression = read_regex("(?:" * 12 + "a" + f"){mark}" * 12)
    assert len(write_ebnf(*with_loops_as_rules(expression))) < 20_000
