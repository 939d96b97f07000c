"""A compiler that a test may harm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.structured.processes.compiler import StructureCompiler
from cluster.structured.processes.messages import CompileLimits
from tests.structured.conftest import vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.text.tokenizer import Tokenizer


@pytest.fixture
def own_compiler(tokenizer: Tokenizer) -> Iterator[StructureCompiler]:
    """A compiler for a test that harms it."""
    compiler = StructureCompiler(
        lambda: vocabulary(tokenizer), limits=CompileLimits(compile_s=1.0, wait_s=120.0, mask_s=4.0)
    )
    yield compiler
    compiler.close()
