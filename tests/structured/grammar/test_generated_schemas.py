"""Schemas as generators of other projects write them are accepted and enforced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string

from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.errors import InvalidRequestError
from pagedray.structure import Structure

LINES = Path(__file__).with_name("generated_schemas.jsonl").read_text().splitlines()
"""A schema in each line, with a valid and an invalid value."""
LEAST_SHARE = 0.97


# Any: JSON
def problem_of(entry: dict[str, Any]) -> str:
    """Return what is wrong about the grammar of a schema, or an empty text."""
    schema = entry["schema"]
    try:
        text = grammar_text(Structure(kind="json_schema", text=json.dumps(schema)))
    except InvalidRequestError as error:
        return str(error)
    grammar = Grammar.from_ebnf(text)
    if not _is_grammar_accept_string(grammar, json.dumps(entry["good"])):
        return "the valid value is rejected"
    if _is_grammar_accept_string(grammar, json.dumps(entry["bad"])):
        return "the invalid value is accepted"
    return ""


def test_the_values_are_what_they_are_said_to_be() -> None:
    assert len({json.dumps(json.loads(line)["schema"], sort_keys=True) for line in LINES}) == 250
    for line in LINES:
        entry = json.loads(line)
        validator = jsonschema.Draft202012Validator(entry["schema"])
        assert validator.is_valid(entry["good"]), line
        assert not validator.is_valid(entry["bad"]), line


def test_almost_all_schemas_of_generators_are_enforced() -> None:
    entries = [json.loads(line) for line in LINES]
    problems = {json.dumps(one["schema"]): problem_of(one) for one in entries}
    wrong = {schema: problem for schema, problem in problems.items() if problem}
    assert len(wrong) <= (1 - LEAST_SHARE) * len(entries), wrong
    # What is accepted is enforced.
    assert "the invalid value is accepted" not in wrong.values(), wrong
