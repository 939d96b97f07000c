"""Rules that are used once are put in their places, and others stay."""

from __future__ import annotations

from cluster.structured.grammar.expressions import (
    MAX_SIZE,
    Alternation,
    Concat,
    Expression,
    Lookahead,
    Repeat,
    Rule,
    Text,
    optional,
    write_ebnf,
)
from cluster.structured.grammar.schemas.json_schema import read_json_schema
from cluster.structured.grammar.single_uses import without_single_uses

A, B = Text("a"), Text("b")


def test_rules_used_once_are_put_in_their_places() -> None:
    rules: dict[str, Expression] = {
        "inner": Concat((A, B)),
        "outer": Concat((Rule("inner"), Text("c"))),
        "unused": Rule("inner"),
    }
    start = Alternation((Repeat(Rule("outer"), 0, None), Text("d")))
    kept, filled = without_single_uses(rules, start)
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
    assert without_single_uses(rules, start) == (rules, start)


def test_expressions_do_not_become_too_large() -> None:
    rules: dict[str, Expression] = {
        "first": Text("a" * (MAX_SIZE - 1)),
        "second": Text("bb"),
        "third": Concat((Rule("first"), Rule("second"))),
    }
    kept, start = without_single_uses(rules, Rule("third"))
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
