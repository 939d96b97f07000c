"""What one tenant compiles delays no other, and is not shared with it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from cluster.structured.compiler import StructureCompiler
from pagedray.errors import (
    OverloadedError,
)
from pagedray.structure import Structure
from tests.structured.conftest import vocabulary
from tests.structured.costly_structures import LARGE, OTHER, SMALL

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.mask_client import CompiledGrammar


def test_no_tenant_gets_a_grammar_cached_for_another(own_compiler: StructureCompiler) -> None:
    async def compile_for_two() -> list[CompiledGrammar]:
        return [
            await own_compiler.compile(SMALL, tenant=tenant) for tenant in ("ann", "ann", "ben")
        ]

    first, again, others = asyncio.run(compile_for_two())
    assert again is first
    assert others is not first


@pytest.mark.slow
def test_one_tenants_slow_structures_keep_no_other_waiting(
    own_compiler: StructureCompiler,
) -> None:
    slow = [Structure(kind="grammar", text=LARGE.text + f' | "{number}"') for number in range(18)]

    async def compile_beside() -> list[bool]:
        await own_compiler.compile(OTHER)
        running = [asyncio.ensure_future(own_compiler.compile(one, tenant="ann")) for one in slow]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="18 structures of this tenant"):
            await own_compiler.compile(SMALL, tenant="ann")
        await own_compiler.compile(SMALL, tenant="ben")
        are_done = [one.done() for one in running]
        own_compiler.close()
        await asyncio.gather(*running, return_exceptions=True)
        return are_done

    # With a whole second of computing each, in which ben's was compiled.
    assert not all(asyncio.run(compile_beside())[:2])


def test_a_tenant_that_fills_the_cache_evicts_its_own_grammars(
    tokenizer: Tokenizer,
) -> None:
    compiler = StructureCompiler(lambda: vocabulary(tokenizer))

    async def compile_all_and_again() -> tuple[bool, list[bool]]:
        mine = await compiler.compile(SMALL, tenant="ben")
        compiler._cache_bytes = 4 * compiler.num_cached_bytes
        texts = ["a{3}" + "b" * number for number in range(9)]
        structures = [Structure(kind="regex", text=text) for text in texts]
        theirs = [await compiler.compile(one, tenant="ann") for one in structures]
        is_kept = await compiler.compile(SMALL, tenant="ben") is mine
        are_kept = [
            await compiler.compile(one, tenant="ann") is before
            for one, before in zip(reversed(structures), reversed(theirs), strict=True)
        ]
        return is_kept, are_kept

    is_kept, are_kept = asyncio.run(compile_all_and_again())
    compiler.close()
    assert is_kept
    assert are_kept[0]
    assert not all(are_kept)
