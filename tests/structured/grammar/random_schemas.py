"""Random JSON schemas of supported keywords, and random texts of a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams
from tests.structured.conftest import made_masks

if TYPE_CHECKING:
    import random

    from cluster.serving.text.tokenizer import Tokenizer
    from cluster.structured.mask_client import CompiledGrammar

import numpy as np

Schema = dict[str, object]


def random_schema(generator: random.Random, depth: int = 0) -> Schema:
    """Return a satisfiable schema."""
    kinds = [_string, _integer, _number, _plain, _enum]
    if depth < 3:
        kinds += [_object, _object, _array, _any_of]
    if depth == 0:
        kinds = [_object, _object, _array, _any_of, _recursive]
    return generator.choice(kinds)(generator, depth)


def random_text(
    grammar: CompiledGrammar,
    tokenizer: Tokenizer,
    generator: random.Random,
    *,
    eos: int,
    max_tokens: int = 600,
) -> str | None:
    """Return a text whose tokens were drawn from the masks; None if it was not completed.

    Tokens that close something are preferred, or few texts would end.
    """
    request = Request(
        id="r",
        prompt_token_ids=(7,),
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=0,
        eos_token_ids=(eos,),
    )
    matcher, token_ids = grammar.matcher(request), [7]
    while len(token_ids) < max_tokens:
        (mask,) = made_masks([(matcher, token_ids)])
        assert not isinstance(mask, FinishReason), mask
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        closing = [
            i for i in allowed.tolist() if set(tokenizer.token_bytes.bytes_of(i)) <= set(b'"]},:')
        ]
        if eos in closing:
            closing = [eos]
        ids = closing if closing and generator.random() < 0.6 else allowed.tolist()
        token_id = generator.choice(ids)
        if token_id == eos:
            return b"".join(map(tokenizer.token_bytes.bytes_of, token_ids[1:])).decode()
        token_ids.append(token_id)
    return None


def _string(generator: random.Random, depth: int) -> Schema:
    limits: list[Schema] = [
        {},
        {"minLength": generator.randint(0, 3), "maxLength": generator.randint(3, 8)},
        {"pattern": generator.choice([r"^[ab\"\\]{1,3}$", "cat|dog", r"^\d{2}", r"\S\.$"])},
        {"format": generator.choice(["date", "time", "date-time", "ipv4", "uuid"])},
    ]
    return {"type": "string", **generator.choice(limits)}


def _integer(generator: random.Random, depth: int) -> Schema:
    low = generator.randint(-500, 500)
    limits: list[Schema] = [
        {},
        {"minimum": low},
        {"minimum": low, "multipleOf": generator.choice([2, 15, 100])},
        {"maximum": low},
        {"exclusiveMinimum": low, "maximum": low + generator.randint(1, 900)},
    ]
    return {"type": "integer", **generator.choice(limits)}


def _number(generator: random.Random, depth: int) -> Schema:
    low = generator.randint(-500, 500) / generator.choice([1, 10, 1000])
    limits: list[Schema] = [{}, {"minimum": low}, {"exclusiveMinimum": low, "maximum": low + 1.5}]
    return {"type": "number", **generator.choice(limits)}


def _plain(generator: random.Random, depth: int) -> Schema:
    choices: list[Schema] = [
        {"type": "null"},
        {"type": "boolean"},
        {"type": ["integer", "null"], "maximum": 7},
        {"const": {"a": [1, "\u00e9"]}},
    ]
    return generator.choice(choices)


def _enum(generator: random.Random, depth: int) -> Schema:
    values = [1, -2.5, "x", 'q"\\\n', None, True, [1], {"k": "v"}, "\u2028"]
    return {"enum": generator.sample(values, generator.randint(1, 5))}


def _object(generator: random.Random, depth: int) -> Schema:
    if generator.random() < 0.2:
        return {"type": "object", "additionalProperties": random_schema(generator, depth + 1)}
    names = generator.sample(["a", "b b", 'c"', "d/e", "\u00e9", "f"], generator.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: random_schema(generator, depth + 1) for name in names},
        "required": generator.sample(names, generator.randint(0, len(names))),
        "additionalProperties": generator.random() < 0.5,
    }


def _array(generator: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array", "items": random_schema(generator, depth + 1)}
    if generator.random() < 0.4:
        schema["prefixItems"] = [
            random_schema(generator, depth + 1) for _ in range(generator.randint(1, 2))
        ]
    if generator.random() < 0.5:
        schema["minItems"] = generator.randint(0, 3)
    if generator.random() < 0.5:
        schema["maxItems"] = generator.randint(3, 5)
    return schema


def _any_of(generator: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(generator, depth + 1) for _ in range(generator.randint(1, 3))]}


def _recursive(generator: random.Random, depth: int) -> Schema:
    node = {
        "type": "object",
        "properties": {
            "value": random_schema(generator, 2),
            "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        },
        "required": ["value", "next"],
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
