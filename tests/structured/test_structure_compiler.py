"""No structure harms the compiler process, and compiled grammars outlive it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
from msgspec.structs import replace

from cluster.structured.compiler import StructureCompiler, StructureCompilerClient
from cluster.structured.grammar.call_arguments import CallsStructure, CallText
from cluster.structured.grammar.grammar_text import MAX_TEXT_LENGTH, grammar_text
from cluster.structured.mask_client import CompiledGrammar
from cluster.structured.messages import CompileLimits
from pagedray.errors import EngineError, InvalidRequestError, OverloadedError, ShuttingDownError
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams, Structure
from tests.fakes import wait_for
from tests.structured.conftest import EOS, LARGE, OTHER, SMALL, large, made_masks, vocabulary

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer

REQUEST = Request(
    id="r", prompt_token_ids=(7,), sampling=SamplingParams(), seed=0, eos_token_ids=(EOS,)
)


async def compile_all(compiler: StructureCompiler, *structures: Structure) -> list[object]:
    return await asyncio.gather(*map(compiler.compile, structures), return_exceptions=True)


def next_bytes(grammar: CompiledGrammar, tokenizer: Tokenizer, text: str) -> set[bytes]:
    """Return the tokens that may follow the beginning of a text."""
    token_ids = [7, *tokenizer.encode(text, add_special_tokens=False)]
    (mask,) = made_masks([(grammar.matcher(REQUEST), token_ids)])
    assert isinstance(mask, bytes)
    bits = int.from_bytes(mask, "little")
    return {tokenizer.token_bytes.bytes_of(i) for i in range(len(mask) * 8) if bits >> i & 1}


def children(compiler: StructureCompiler) -> list[psutil.Process]:
    assert compiler.process_id is not None
    return psutil.Process(compiler.process_id).children(recursive=True)


def test_warm_up_starts_the_process_without_torch(
    own_compiler: StructureCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tests may have imported it; here that would fail.
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.delitem(sys.modules, "cluster.structured.xgrammar_library", raising=False)
    own_compiler.warm_up()
    wait_for(lambda: own_compiler.process_id is not None)
    asyncio.run(own_compiler.compile(SMALL))
    started = psutil.Process(own_compiler.process_id)
    libraries = " ".join(one.path for one in started.memory_maps())
    assert "xgrammar" in libraries
    assert "libtorch" not in libraries


def test_special_token_marks_calls_behind_a_text(
    compiler: StructureCompiler, tokenizer: Tokenizer
) -> None:
    mark, mark_id = "<|user|>", 3
    given = CallsStructure(
        mark=mark,
        opening=("[",),
        calls=(CallText("f", ("f(",), "{}", (")",)),),
        separator=("",),
        closing=("]",),
        is_parallel=False,
    )
    structure = Structure(kind="calls", text=msgspec.json.encode(given).decode(), mark=mark)
    grammar = asyncio.run(compiler.compile(structure))
    request = replace(REQUEST, sampling=SamplingParams(structure=structure))
    for text in ("", "[f(", "<|use"):
        token_ids = [7, *tokenizer.encode(text, add_special_tokens=False)]
        masks = made_masks(
            [
                (grammar.matcher(request), token_ids),
                (grammar.matcher(request), [*token_ids, mark_id]),
            ]
        )
        free, marked = (int.from_bytes(one, "little") for one in masks if isinstance(one, bytes))
        assert free >> mark_id & 1
        found = {tokenizer.token_bytes.bytes_of(one) for one in range(3072) if marked >> one & 1}
        assert found == {b"[", b"[f", b"[f("} & {*map(tokenizer.token_bytes.bytes_of, range(3072))}


@pytest.mark.parametrize("text", ["à", "root ::= 世", "\x9f\U000408e8ñ%"])
def test_an_invalid_grammar_is_rejected_whatever_its_characters(
    text: str, compiler: StructureCompiler
) -> None:
    # The library quotes an incomplete character.
    with pytest.raises(InvalidRequestError, match=r"Unexpected character: \ufffd"):
        asyncio.run(compiler.compile(Structure(kind="grammar", text=text)))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_sockets_for_a_process_that_does_not_start_are_closed() -> None:
    process = StructureCompilerClient(
        lambda: pytest.fail("A vocabulary was made."), CompileLimits()
    )
    process.close()
    with pytest.raises(ShuttingDownError):
        process.connect_masks()


def test_a_structure_that_takes_too_long_is_rejected_and_harms_no_other(
    own_compiler: StructureCompiler,
) -> None:
    rejected, grammar, same = asyncio.run(compile_all(own_compiler, LARGE, SMALL, SMALL))
    assert isinstance(rejected, InvalidRequestError)
    assert rejected.param == "structure"
    assert str(rejected) == (
        "structure cannot be compiled within 1 s of CPU time (--structure-compile-s)."
    )
    assert grammar is same
    assert own_compiler._cache
    own_compiler.close()
    with pytest.raises(ShuttingDownError):
        asyncio.run(own_compiler.compile(SMALL))


def test_a_structure_that_is_rejected_after_its_call_was_cancelled_logs_nothing(
    compiler: StructureCompiler, caplog: pytest.LogCaptureFixture
) -> None:
    rejected = Structure(kind="grammar", text="root ::= rejected")

    async def cancel_one_of_two_calls() -> None:
        cancelled, waiting = (asyncio.ensure_future(compiler.compile(rejected)) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(InvalidRequestError):
            await waiting

    asyncio.run(cancel_one_of_two_calls())
    gc.collect()
    assert caplog.records == []


def test_a_compilation_that_is_killed_is_reported_as_killed(
    own_compiler: StructureCompiler,
) -> None:
    async def kill_while_it_compiles() -> BaseException | None:
        await own_compiler.compile(SMALL)
        # Only the mask process is left.
        await asyncio.to_thread(wait_for, lambda: len(children(own_compiler)) == 1)
        running = asyncio.ensure_future(own_compiler.compile(LARGE))
        await asyncio.to_thread(wait_for, lambda: compilations(own_compiler))
        compilations(own_compiler)[0].send_signal(signal.SIGKILL)
        await asyncio.wait([running])
        return running.exception()

    error = asyncio.run(kill_while_it_compiles())
    assert type(error) is EngineError
    assert str(error) == "The structure compiler was killed by a signal: Killed."


def compilations(compiler: StructureCompiler) -> list[psutil.Process]:
    """Return the processes that compile, without the one that makes masks."""
    return sorted(children(compiler), key=psutil.Process.create_time)[1:]


def suspend_compilations(compiler: StructureCompiler) -> bool:
    """Stop the processes that compile, and return whether there are any."""
    running = compilations(compiler)
    for one in running:
        one.suspend()
    return bool(running)


def test_calls_that_wait_for_a_compilation_end_when_no_more_are_accepted(
    own_compiler: StructureCompiler, tokenizer: Tokenizer
) -> None:
    async def stop_while_it_compiles() -> tuple[
        CompiledGrammar, list[object], list[psutil.Process]
    ]:
        grammar = await own_compiler.compile(SMALL)
        # Only the mask process is left.
        await asyncio.to_thread(wait_for, lambda: len(children(own_compiler)) == 1)
        structures = [LARGE, Structure(kind="grammar", text=LARGE.text + ' | "x"'), OTHER, LARGE]
        running = asyncio.ensure_future(compile_all(own_compiler, *structures))
        # It does not end by itself, however late this test is.
        await asyncio.to_thread(wait_for, lambda: suspend_compilations(own_compiler))
        own_compiler.stop_accepting()
        return grammar, await running, compilations(own_compiler)

    grammar, ends, left = asyncio.run(stop_while_it_compiles())
    assert [type(one) for one in ends] == [ShuttingDownError] * 4
    assert left
    for one in left:
        one.kill()
    # Sequences that run go on.
    assert next_bytes(grammar, tokenizer, "aa") == {b"a"}


def test_close_does_not_wait_for_a_compilation(tokenizer: Tokenizer) -> None:
    limits = CompileLimits(compile_s=600.0, wait_s=600.0)
    compiler = StructureCompiler(lambda: vocabulary(tokenizer), limits=limits)

    async def close_while_it_compiles() -> tuple[list[object], list[psutil.Process]]:
        await compiler.compile(SMALL)
        # Only the mask process is left.
        await asyncio.to_thread(wait_for, lambda: len(children(compiler)) == 1)
        running = asyncio.ensure_future(compile_all(compiler, LARGE))
        # It does not end by itself, however late this test is.
        await asyncio.to_thread(wait_for, lambda: suspend_compilations(compiler))
        left = compilations(compiler)
        await asyncio.to_thread(compiler.close)
        return await running, left

    ends, left = asyncio.run(close_while_it_compiles())
    assert [type(one) for one in ends] == [ShuttingDownError]
    assert all(one.is_running() for one in left)
    for one in left:
        one.kill()


def test_a_dead_process_is_replaced_and_its_grammars_live_on(
    own_compiler: StructureCompiler, tokenizer: Tokenizer
) -> None:
    grammar = asyncio.run(own_compiler.compile(SMALL))
    first = own_compiler.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert next_bytes(grammar, tokenizer, "") == {b"a", b"aa", b"aaa"} & set(
        vocabulary(tokenizer).tokens
    )
    other, kept = asyncio.run(compile_all(own_compiler, OTHER, SMALL))
    assert kept is grammar
    assert next_bytes(other, tokenizer, "") == {b"b"}  # type: ignore[arg-type]  # a grammar
    assert own_compiler.process_id not in (None, first)


@pytest.mark.slow
def test_a_process_that_hangs_is_replaced(tokenizer: Tokenizer) -> None:
    limits = CompileLimits(compile_s=10.0, wait_s=15.0)
    compiler = StructureCompiler(lambda: vocabulary(tokenizer), limits=limits)
    grammar = asyncio.run(compiler.compile(SMALL))
    assert compiler.process_id is not None
    first = psutil.Process(compiler.process_id)
    first.suspend()
    # Those that have waited for it are compiled by its replacement.
    one, other = asyncio.run(compile_all(compiler, OTHER, Structure(kind="regex", text="a{2}")))
    assert next_bytes(one, tokenizer, "") == {b"b"}  # type: ignore[arg-type]  # a grammar
    assert next_bytes(other, tokenizer, "a") == {b"a"}  # type: ignore[arg-type]  # a grammar
    assert not first.is_running()
    assert next_bytes(grammar, tokenizer, "aa") == {b"a"}
    compiler.close()


def test_the_death_of_the_mask_process_ends_no_sequence(
    own_compiler: StructureCompiler, tokenizer: Tokenizer
) -> None:
    grammars = [asyncio.run(own_compiler.compile(one)) for one in (SMALL, OTHER)]
    matchers = [grammar.matcher(REQUEST) for grammar in grammars]
    made_masks([(matcher, [7]) for matcher in matchers])
    wait_for(lambda: len(children(own_compiler)) == 1)
    (maker,) = children(own_compiler)
    maker.send_signal(signal.SIGKILL)
    maker.wait(60.0)
    token_ids = [[7, *tokenizer.encode(text, add_special_tokens=False)] for text in ("aaa", "b")]
    end = 1 << EOS
    for mask in made_masks(list(zip(matchers, token_ids, strict=True))):
        assert isinstance(mask, bytes)
        assert int.from_bytes(mask, "little") == end


def test_a_structure_that_is_complete_ends_a_sequence_that_ignores_eos(
    compiler: StructureCompiler, tokenizer: Tokenizer
) -> None:
    grammar = asyncio.run(compiler.compile(SMALL))
    request = replace(REQUEST, sampling=SamplingParams(structure=SMALL, ignore_eos=True))
    token_ids = [7, *tokenizer.encode("aaa", add_special_tokens=False)]
    assert made_masks([(grammar.matcher(request), token_ids)]) == [FinishReason.STOP]


def test_a_sequence_that_leaves_its_grammar_ends_alone(
    compiler: StructureCompiler, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    grammar = asyncio.run(compiler.compile(SMALL))
    wrong, right = ([7, *tokenizer.encode(text, add_special_tokens=False)] for text in ("b", "aa"))
    asked = [(grammar.matcher(REQUEST), wrong if i == 3 else right) for i in range(9)]
    found = made_masks(asked)
    assert found[3] is FinishReason.ERROR
    # A defect, whose details the client does not receive.
    assert [matcher.error for matcher, _ in asked] == [""] * 9
    masks = {one for one in found if isinstance(one, bytes)}
    assert len(masks) == 1
    assert sum(isinstance(one, bytes) for one in found) == 8
    assert caplog.messages == ["Ending a sequence with an error: the grammar rejected a token."]


def test_a_text_that_is_too_long_starts_nothing() -> None:
    compiler = StructureCompiler(lambda: pytest.fail("A vocabulary was made."))
    with pytest.raises(InvalidRequestError, match="at most 262144 are allowed"):
        asyncio.run(compiler.compile(Structure(kind="grammar", text="a" * (MAX_TEXT_LENGTH + 1))))
    compiler.close()


HOPELESS = [
    (
        {"properties": {str(i): {"pattern": f"^.{{{i}}}$"} for i in range(40, 90)}},
        "#/properties/.*/pattern brings .* states, more than .* 1024",
    ),
    (
        {"type": "string", "pattern": "^(?:[a-z]{1,99}x){1,99}$"},
        "to 9801 wide characters, more than the maximum of 1024, .* in #/pattern",
    ),
    (
        {"type": "string", "pattern": "(?:(?:a{1,99}){1,99}){1,99}"},
        "to 970299 characters, more than the maximum of 10000",
    ),
    ({"oneOf": [{"const": str(i)} for i in range(2000)]}, "#/oneOf must have at most 128 schemas"),
    ({"anyOf": [{"type": "null"}] * 20_000}, "#/anyOf/16383 exceeds .* of 16384 subschemas"),
]


@pytest.mark.parametrize(("schema", "place"), HOPELESS)
def test_unsupported_schemas_never_reach_the_compiler(schema: object, place: str) -> None:
    with pytest.raises(InvalidRequestError, match=place):
        grammar_text(Structure(kind="json_schema", text=json.dumps(schema)))


@pytest.mark.parametrize("most", [100, pytest.param(200, marks=pytest.mark.slow), 3000])
def test_long_strings_are_compiled_and_enforced(
    compiler: StructureCompiler, tokenizer: Tokenizer, most: int
) -> None:
    schema = {"type": "string", "maxLength": most}
    grammar = asyncio.run(compiler.compile(Structure(kind="json_schema", text=json.dumps(schema))))
    assert b'"' in next_bytes(grammar, tokenizer, '"' + "a" * (most - 1))
    assert next_bytes(grammar, tokenizer, '"' + "a" * most) == {b'"'}


def test_a_structure_that_takes_too_much_memory_is_rejected_and_harms_no_other(
    tokenizer: Tokenizer,
) -> None:
    limits = CompileLimits(compile_s=60.0, wait_s=120.0, memory_bytes=24 * 2**20)
    compiler = StructureCompiler(lambda: vocabulary(tokenizer), limits=limits)
    rejected, grammar = asyncio.run(compile_all(compiler, large(150), SMALL))
    compiler.close()
    assert isinstance(rejected, InvalidRequestError)
    assert str(rejected) == (
        "structure cannot be compiled within 24 MiB of memory; use fewer optional properties, "
        "choices or tools."
    )
    assert isinstance(grammar, CompiledGrammar)


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
        compiler._cache_bytes = 4 * sum(size for _, size in compiler._cache.values())
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
