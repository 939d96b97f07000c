"""Arrays without equal items, if the schema of the items lists their values."""

import json
from collections.abc import Sequence

from cluster.structured.grammar.expressions import Alternation, Concat, Expression, Rule, Text
from cluster.structured.grammar.json_text import COMMA, surrounded
from cluster.structured.grammar.schemas.schema_keywords import Schema, fail

__all__ = ["must_differ", "unique_items"]

_MAX_SETS = 128
"""The sets of values that an array may have so far. The size of a grammar grows with the square of
their number."""


def must_differ(schema: Schema, path: str) -> bool:
    """Return whether the items of an array must be unique."""
    given = schema.get("uniqueItems", False)
    if not isinstance(given, bool):
        fail(f"{path}/uniqueItems", "must be true or false")
    if given and schema.get("prefixItems"):
        fail(f"{path}/uniqueItems", "cannot be combined with prefixItems")
    return given


def unique_items(
    values: Sequence[object] | None,
    path: str,
    rules: dict[str, Expression],
    *,
    minimum: int,
    maximum: int | None,
) -> Expression:
    """Return arrays of `minimum` to `maximum` different values, in any order.

    `values` are those that items may have; None are unlimited. Rules are added to `rules`.
    """
    if values is None:
        fail(
            f"{path}/uniqueItems",
            "is supported only for items whose values are listed (enum, const, boolean or null), "
            "or with maxItems 1",
        )
    texts = list({_equality_key(value): _text_of(value) for value in reversed(values)}.values())
    texts.reverse()
    maximum = len(texts) if maximum is None else min(maximum, len(texts))
    if minimum > maximum:
        fail(path, "requires more different items than it allows")
    prefix = f"unique{len(rules)}x"
    pending, found = [0], {0}
    while pending:
        used = pending.pop()
        choices: list[Expression] = [Concat(())] if used.bit_count() >= minimum else []
        for place, text in enumerate(texts if used.bit_count() < maximum else ()):
            after = used | 1 << place
            if after == used:
                continue
            if after not in found:
                found.add(after)
                pending.append(after)
            comma = COMMA.parts if used else ()
            choices.append(Concat((*comma, Text(text), Rule(f"{prefix}{after}"))))
        if len(found) > _MAX_SETS:
            fail(
                f"{path}/uniqueItems",
                f"needs more than {_MAX_SETS} rules; allow fewer values, or set maxItems",
            )
        rules[f"{prefix}{used}"] = Alternation(tuple(choices))
    return surrounded("[", Rule(f"{prefix}0"), "]")


def _text_of(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _equality_key(value: object) -> str:
    """Return a text that is the same for values that JSON Schema considers equal."""
    return json.dumps(_normalized(value), sort_keys=True)


def _normalized(value: object) -> object:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_normalized(one) for one in value]
    if isinstance(value, dict):
        return {name: _normalized(one) for name, one in value.items()}
    return value
