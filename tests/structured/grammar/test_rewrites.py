"""Loops that are rewritten as rules match the same texts as in Python."""

from __future__ import annotations

import asyncio
import json
import random
import re
from typing import TYPE_CHECKING

import pytest

from cluster.structured.grammar.expressions import (
    MAX_SIZE,
    Alternation,
    Characters,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    Text,
    optional,
    write_ebnf,
)
from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.grammar.json_schema import read_json_schema
from cluster.structured.grammar.regex import read_regex
from cluster.structured.grammar.rewrites import inline_rules, with_loops_as_rules, with_shared_parts
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams, Structure
from tests.structured.conftest import EOS, made_masks

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.compiler import StructureCompiler
    from cluster.structured.xgrammar_library import XGrammarLibrary

REQUEST = Request(
    id="r", prompt_token_ids=(7,), sampling=SamplingParams(), seed=0, eos_token_ids=(EOS,)
)
PATTERNS = [
    *("(?:ab)*", "(?:ab)+", "(?:ab){2,}c", "(?:a|bc)*b", "(?:(?:ab)*c)*", "(?:(?:ab)+c)+a?"),
    *("(?:a{1,3}b)*", "a{2,4}b{0,2}c{3}", "(?:a|b){2,3}(?:c|a)*", "(?:ab?){1,3}", "(?:a*b*)*c"),
    *("(?:(?:a|b)c|ca)*(?:b|)", "(?:a(?:b(?:c)*)*)*", "((a+)+)+b", "(?:a{0,2}){0,2}", "a?b?c?"),
]

A, B = Text("a"), Text("b")
EITHER = Alternation((A, B))
A, B = Text("a"), Text("b")


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


def test_a_part_that_occurs_twice_is_a_rule() -> None:
    rules: dict[str, Expression] = {"first": Concat((EITHER, A))}
    assert with_shared_parts(rules, Concat((Rule("first"), EITHER)), "new") == (
        {"new0": EITHER, "first": Concat((Rule("new0"), A))},
        Concat((Rule("first"), Rule("new0"))),
    )


def test_the_parts_of_a_shared_part_are_rules_only_if_they_occur_elsewhere() -> None:
    outer, inner = optional(Concat((EITHER, A))), Repeat(B, 0, None)
    start = Concat((outer, outer, EITHER, Repeat(Concat((inner, A)), 0, 5)))
    rules, _ = with_shared_parts({}, start, "new")
    assert rules == {"new0": EITHER, "new1": optional(Concat((Rule("new0"), A)))}


def test_equal_rules_are_one_rule() -> None:
    rules: dict[str, Expression] = {
        "one": Concat((A, B)),
        "other": Concat((A, B)),
        "after one": Concat((Rule("one"), A)),
        "after other": Concat((Rule("other"), A)),
        "recursive": Concat((optional(Rule("recursive")), Rule("last"))),
        "last": Concat((A, B)),
    }
    start = Alternation((Rule("after one"), Rule("after other"), Rule("recursive")))
    assert with_shared_parts(rules, start, "new") == (
        {
            "one": Concat((A, B)),
            "after one": Concat((Rule("one"), A)),
            "recursive": Concat((optional(Rule("recursive")), Rule("one"))),
        },
        Alternation((Rule("after one"), Rule("after one"), Rule("recursive"))),
    )


@pytest.mark.parametrize(
    "part",
    [Repeat(Characters(((0x30, 0x39),)), 1, 9), Alternation((A, Lookahead(B))), Concat((A, B))],
)
def test_characters_and_texts_stay_in_their_places(part: Expression) -> None:
    start = Concat((part, A, part))
    assert with_shared_parts({}, start, "new") == ({}, start)


def properties(*names: str) -> dict[str, object]:
    kinds = ("string", "integer", "boolean", "number", "null")
    found = {name: {"type": kind} for name, kind in zip(names, kinds, strict=True)}
    return {"type": "object", "properties": found}


def test_objects_with_the_same_properties_share_their_rules() -> None:
    def num_rules(num_objects: int) -> int:
        names = [f"object{number}" for number in range(num_objects)]
        inside = dict.fromkeys(names, properties(*"abcde"))
        whole = {"type": "object", "properties": inside, "required": names}
        return len(read_json_schema(json.dumps(whole))[0])

    assert num_rules(2) == num_rules(9)


def test_calls_of_many_tools_compile_to_a_small_grammar(library: XGrammarLibrary) -> None:
    calls = []
    for number in range(16):
        names = [f"tool{number}_argument{place}" for place in range(5)]
        call = {"name": {"const": f"tool{number}"}, "parameters": properties(*names)}
        calls.append({"type": "object", "properties": call, "required": list(call)})
    schema = {
        "type": "array",
        "items": {"$ref": "#/$defs/call"},
        "$defs": {"call": {"anyOf": calls}},
    }
    structure = Structure(kind="json_schema", text=json.dumps(schema))
    compiled, _ = library.compile_grammar(grammar_text(structure))
    # Sixteen times as much memory is needed to write it.
    assert len(library.json_of(compiled)) < 10 * 2**20


def test_rules_used_once_are_put_in_their_places() -> None:
    rules: dict[str, Expression] = {
        "inner": Concat((A, B)),
        "outer": Concat((Rule("inner"), Text("c"))),
        "unused": Rule("inner"),
    }
    start = Alternation((Repeat(Rule("outer"), 0, None), Text("d")))
    kept, filled = inline_rules(rules, start)
    assert kept == {}
    assert filled == Alternation((Repeat(Concat((A, B, Text("c"))), 0, None), Text("d")))


def test_rules_used_several_times_stay() -> None:
    rules: dict[str, Expression] = {
        "pair": Concat((A, B)),
        "repeated": A,
        "asserting": Concat((A, Lookahead(B))),
        "loop": optional(Concat((A, Rule("loop")))),
    }
    start = Concat(
        (
            Rule("pair"),
            optional(Rule("pair")),
            Repeat(Rule("repeated"), 0, 9),
            Rule("asserting"),
            Rule("loop"),
        )
    )
    assert inline_rules(rules, start) == (rules, start)


def test_expressions_do_not_become_too_large() -> None:
    rules: dict[str, Expression] = {
        "first": Text("a" * (MAX_SIZE - 1)),
        "second": Text("bb"),
        "third": Concat((Rule("first"), Rule("second"))),
    }
    kept, start = inline_rules(rules, Rule("third"))
    assert start == rules["third"]
    assert set(kept) == {"first", "second"}
    assert write_ebnf(kept, start)


def test_deeply_nested_objects_can_be_written() -> None:
    schema = '{"type":"string"}'
    for _ in range(60):
        schema = f'{{"type":"object","properties":{{"a":{schema}}},"required":["a"]}}'
    rules, start = read_json_schema(schema)
    assert not any(name.startswith("from") for name in rules)
    assert write_ebnf(rules, start)
