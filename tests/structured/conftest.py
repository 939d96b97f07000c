"""A tokenizer of a small model, and a compiler shared by all tests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster.serving.text.tokenizer import Tokenizer
from cluster.structured.compiler import StructureCompiler
from cluster.structured.messages import CompileLimits
from cluster.structured.token_matchers import vocabulary_of
from cluster.structured.xgrammar_library import XGrammarLibrary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.structured.token_matchers import Vocabulary

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"
VOCAB_SIZE = 3072
EOS = 0


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
