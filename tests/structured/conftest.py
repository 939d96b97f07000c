"""A tokenizer of a small model, and a compiler shared by all tests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.serving.text.tokenizer import Tokenizer
from cluster.structured.compiler import StructureCompiler
from cluster.structured.messages import CompileLimits
from cluster.structured.token_matchers import vocabulary_of
from cluster.structured.xgrammar_library import XGrammarLibrary
from pagedray.request import AskedMasks
from pagedray.sampling_params import Structure

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cluster.structured.mask_client import MatcherHandle
    from cluster.structured.token_matchers import Vocabulary
    from pagedray.request import FinishReason

__all__ = ["made_masks"]

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"
VOCAB_SIZE = 3072
EOS = 0

SMALL = Structure(kind="regex", text="a{3}")
OTHER = Structure(kind="regex", text="b")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(TINY_LLAMA)


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return vocabulary_of(tokenizer.token_bytes, size=VOCAB_SIZE, eos_token_ids=(EOS,))


@pytest.fixture(scope="session")
def library(tokenizer: Tokenizer) -> XGrammarLibrary:
    """The library in the process of the tests."""
    return XGrammarLibrary(vocabulary(tokenizer))


@pytest.fixture(scope="session")
def compiler(tokenizer: Tokenizer) -> Iterator[StructureCompiler]:
    """A compiler with limits for a busy machine."""
    compiler = StructureCompiler(
        lambda: vocabulary(tokenizer), limits=CompileLimits(compile_s=4.0, wait_s=120.0, mask_s=4.0)
    )
    yield compiler
    compiler.close()


@pytest.fixture
def own_compiler(tokenizer: Tokenizer) -> Iterator[StructureCompiler]:
    """A compiler for a test that harms it."""
    compiler = StructureCompiler(
        lambda: vocabulary(tokenizer), limits=CompileLimits(compile_s=1.0, wait_s=120.0, mask_s=4.0)
    )
    yield compiler
    compiler.close()


def made_masks(
    asked: Sequence[tuple[MatcherHandle, Sequence[int]]],
) -> list[bytes | FinishReason]:
    """Return the mask, or how the sequence ends, for each matcher and its tokens."""
    grammar = asked[0][0].grammar
    asked_masks = [AskedMasks(matcher, token_ids) for matcher, token_ids in asked]
    found = grammar.masks(asked_masks, num_awaited=len(asked), wait_s=math.inf)
    assert None not in found
    return [one for one in found if one is not None]


def large(num_alternatives: int) -> Structure:
    """Return a grammar of a client, whose cost shows only in the compiler."""
    rules = (f'"{i}" [{chr(0x100 + i)}a-z]{{120}}' for i in range(num_alternatives))
    return Structure(kind="grammar", text="root ::= " + " | ".join(rules))


# It takes many seconds.
LARGE = large(400)
