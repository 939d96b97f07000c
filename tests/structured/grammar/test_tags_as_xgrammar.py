"""Structural tags accept what those of xgrammar do, where no mark is like another one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.sampling_params import Structure

Part = dict[str, Any]  # Any: JSON

MARKS = ["<a>", "[b", "{{", "|", ";;"]
DIGIT = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 9}}
LETTERS = {"type": "regex", "pattern": "[xy]+"}
ANY = {"type": "any_text"}
MOST_LEVELS = 3


def random_part(rng: random.Random, level: int = 0) -> Part:
    leaves = ["json_schema", "regex", "const_string"]
    nested = ["sequence", "or", "tag", "tags_with_separator", "triggered_tags"]
    kind = rng.choice(leaves if level == MOST_LEVELS else leaves + nested * 2)
    flags = {name: rng.random() < 0.4 for name in ("at_least_one", "stop_after_first")}
    match kind:
        case "json_schema":
            return DIGIT
        case "regex":
            return LETTERS
        case "const_string":
            return {"type": kind, "value": rng.choice(MARKS)}
        case "sequence" | "or":
            parts = [random_part(rng, level + 1) for _ in range(rng.randrange(1, 4))]
            return {"type": kind, "elements": parts}
        case "tag":
            return random_tag(rng, level)
        case "tags_with_separator":
            tags = [random_tag(rng, level) for _ in range(rng.randrange(1, 3))]
            return {"type": kind, "tags": tags, "separator": rng.choice(MARKS), **flags}
    # Only an end of its own marks where its text ends.
    tags = [random_tag(rng, level, begin) for begin in rng.sample(MARKS[:3], rng.randrange(1, 3))]
    triggers = [tag["begin"][: rng.randrange(1, 3)] for tag in tags]
    content = {"type": kind, "triggers": triggers, "tags": tags, **flags}
    return {"type": "tag", "begin": rng.choice(MARKS), "content": content, "end": MARKS[-1]}


def random_tag(rng: random.Random, level: int, begin: str | None = None) -> Part:
    content = ANY if rng.random() < 0.3 else random_part(rng, level + 1)
    begin = begin or rng.choice(MARKS)
    return {"type": "tag", "begin": begin, "content": content, "end": rng.choice(MARKS)}


def example(part: Part, rng: random.Random) -> str:
    """Return a text that a part is likely to accept."""
    match part["type"]:
        case "json_schema":
            return rng.choice("059")
        case "regex":
            return rng.choice(["x", "yx"])
        case "const_string":
            return str(part["value"])
        case "any_text":
            return rng.choice(["", "q", "<q"])
        case "sequence":
            return "".join(example(one, rng) for one in part["elements"])
        case "or":
            return example(rng.choice(part["elements"]), rng)
        case "tag":
            return f"{part['begin']}{example(part['content'], rng)}{part['end']}"
        case "tags_with_separator":
            tags = [example(rng.choice(part["tags"]), rng) for _ in range(rng.randrange(3))]
            return str(part["separator"]).join(tags)
    texts = [example(rng.choice(part["tags"]), rng) for _ in range(rng.randrange(3))]
    return "".join(rng.choice(["", "q"]) + text for text in texts) + rng.choice(["", "q"])


@pytest.mark.parametrize("seed", range(4))
def test_random_tags_accept_the_same_texts(seed: int) -> None:
    rng = random.Random(seed)
    num_accepted = num_rejected = 0
    for _ in range(60):
        part = random_part(rng)
        text = json.dumps({"type": "structural_tag", "format": part})
        ours = xgrammar.Grammar.from_ebnf(grammar_text(Structure(kind="structural_tag", text=text)))
        theirs = xgrammar.Grammar.from_structural_tag(text)
        texts = [example(part, rng) for _ in range(10)]
        # Most of these have a mistake.
        texts += [one.replace(rng.choice("<x5|;"), "", 1) for one in texts]
        for one in texts:
            accepted = _is_grammar_accept_string(ours, one)
            assert accepted == _is_grammar_accept_string(theirs, one), (part, one)
            num_accepted += accepted
            num_rejected += not accepted
    assert num_accepted > 200
    assert num_rejected > 200
