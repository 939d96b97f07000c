"""The arguments of many tools, whose compiled grammar would be far larger as JSON."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import psutil
import pytest

from cluster.structured.compiler import StructureCompiler
from cluster.structured.messages import CompileLimits
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams, Structure
from tests.structured.conftest import EOS, made_masks, vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.mask_client import CompiledGrammar

NUM_TOOLS = 128
KINDS = ({"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["a", "b"]})
REQUEST = Request(
    id="r", prompt_token_ids=(7,), sampling=SamplingParams(), seed=0, eos_token_ids=(EOS,)
)


def structure_of_calls() -> Structure:
    """Return the structure of a list of calls of tools with five optional arguments each."""
    calls = []
    for number in range(NUM_TOOLS):
        arguments = {f"tool{number}_argument{place}": KINDS[place % 4] for place in range(5)}
        call = {"name": {"enum": [f"tool{number}"]}, "arguments": {"properties": arguments}}
        calls.append({"properties": call, "required": list(call)})
    schema = {"items": {"$ref": "#/$defs/call"}, "$defs": {"call": {"anyOf": calls}}}
    return Structure(kind="json_schema", text=json.dumps(schema))


@pytest.fixture(scope="module")
def many_tools(tokenizer: Tokenizer) -> Iterator[StructureCompiler]:
    """A compiler with the default limits of memory, for a busy machine."""
    limits = CompileLimits(compile_s=60.0, wait_s=120.0, repeat_s=60.0, mask_s=4.0)
    compiler = StructureCompiler(lambda: vocabulary(tokenizer), limits=limits)
    yield compiler
    compiler.close()


def next_texts(grammar: CompiledGrammar, tokenizer: Tokenizer, text: str) -> set[str]:
    """Return the tokens of ASCII characters that may follow the beginning of a text."""
    token_ids = [7, *tokenizer.encode(text, add_special_tokens=False)]
    (mask,) = made_masks([(grammar.matcher(REQUEST), token_ids)])
    assert isinstance(mask, bytes)
    bits = int.from_bytes(mask, "little")
    found = (tokenizer.token_bytes.bytes_of(i) for i in range(len(mask) * 8) if bits >> i & 1)
    return {one.decode() for one in found if one.isascii() and len(one) == 1}


def test_the_arguments_of_128_tools_are_constrained(
    many_tools: StructureCompiler, tokenizer: Tokenizer
) -> None:
    grammar = asyncio.run(many_tools.compile(structure_of_calls()))
    begin = '[{"name":"tool93","arguments":{"tool93_argument'
    assert next_texts(grammar, tokenizer, begin) == set("01234")
    assert next_texts(grammar, tokenizer, begin + '1":7,"tool93_argument') == set("234")
    assert next_texts(grammar, tokenizer, begin + '2":') == set(" \ntf")
    assert sum(size for _, size in many_tools._cache.values()) < 8 * 2**20


def test_they_are_constrained_in_another_mask_process(
    many_tools: StructureCompiler, tokenizer: Tokenizer
) -> None:
    grammar = asyncio.run(many_tools.compile(structure_of_calls()))
    assert many_tools.process_id is not None
    for process in psutil.Process(many_tools.process_id).children():
        process.kill()
    text = '[{"name":"tool5","arguments":{"tool5_argument'
    assert next_texts(grammar, tokenizer, text) == set("01234")


def test_a_grammar_that_compiles_slowly_is_sent_compiled(tokenizer: Tokenizer) -> None:
    limits = CompileLimits(compile_s=60.0, wait_s=120.0, state_bytes=0, repeat_s=0.0, mask_s=4.0)
    compiler = StructureCompiler(lambda: vocabulary(tokenizer), limits=limits)
    grammar = asyncio.run(compiler.compile(Structure(kind="choice", text='["a", "b"]')))
    compiler.close()
    assert grammar.text.is_compiled
