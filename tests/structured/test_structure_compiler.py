"""The process that compiles is harmed by no structure, and what it made outlives it."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest

from cluster.structured.compiler import StructureCompiler
from cluster.structured.grammar_text import MAX_TEXT_LENGTH
from pagedray.errors import EngineError, InvalidRequestError, ShuttingDownError
from pagedray.request import Structure

SMALL = Structure(kind="regex", text="a{3}")
# To compile all of it takes minutes.
LARGE = Structure(
    kind="json_schema",
    text=json.dumps(
        {
            "type": "object",
            "properties": {
                f"name{length}": {"type": "string", "maxLength": length}
                for length in range(200, 300)
            },
        }
    ),
)


def test_limits_and_the_death_of_the_process_harm_one_structure_only(
    compiler: StructureCompiler,
) -> None:
    async def compile_all(*structures: Structure) -> list[object]:
        return await asyncio.gather(*map(compiler.compile, structures), return_exceptions=True)

    refused, grammar, same = asyncio.run(compile_all(LARGE, SMALL, SMALL))
    assert isinstance(refused, InvalidRequestError)
    assert refused.param == "structure"
    assert "takes more than 4 s of CPU time or 512 MiB to compile" in str(refused)
    assert grammar is same
    assert compiler.num_cached_bytes > 0

    # The last test of the session's compiler, since another process takes long to start.
    assert compiler.process_id is not None
    os.kill(compiler.process_id, signal.SIGKILL)
    failed, kept = asyncio.run(compile_all(Structure(kind="regex", text="b"), SMALL))
    # What its death interrupts is told as that, or as a structure that took too much.
    assert isinstance(failed, EngineError | InvalidRequestError)
    assert kept is grammar
    compiler.close()
    with pytest.raises(ShuttingDownError):
        asyncio.run(compiler.compile(SMALL))


def test_a_text_that_is_too_long_starts_nothing() -> None:
    compiler = StructureCompiler(lambda: pytest.fail("A vocabulary was made."))
    with pytest.raises(InvalidRequestError, match="at most 65536 are allowed"):
        asyncio.run(compiler.compile(Structure(kind="grammar", text="a" * (MAX_TEXT_LENGTH + 1))))
    compiler.close()
