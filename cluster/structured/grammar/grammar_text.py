"""Converts a structure to a grammar in xgrammar's EBNF."""

import json

from cluster.structured.grammar.call_arguments import read_calls, read_leading_calls
from cluster.structured.grammar.expressions import (
    JSON_RULES,
    OBJECT,
    Alternation,
    Text,
    invalid_structure,
    write_ebnf,
)
from cluster.structured.grammar.json_schema import read_json_schema
from cluster.structured.grammar.regex import read_regex
from cluster.structured.grammar.rewrites import inline_rules, with_loops_as_rules, with_shared_parts
from cluster.structured.grammar.structural_tag import read_structural_tag
from cluster.structured.grammar.turn import Grammar, read_messages, read_turn
from pagedray.sampling_params import Structure

__all__ = ["MAX_TEXT_BYTES", "MAX_TEXT_LENGTH", "grammar_text"]

MAX_TEXT_LENGTH = 262_144
"""Maximum number of characters of a structure."""
MAX_TEXT_BYTES = 4 * MAX_TEXT_LENGTH
"""The most bytes that this many characters take."""
_MAX_CHOICES = 1024


def grammar_text(structure: Structure) -> str:
    """Return the EBNF of a structure, not compiled yet. Raises InvalidRequestError."""
    match structure.kind:
        case "grammar":
            return structure.text
        case "turn":
            return _written(read_turn(structure.text, _grammar))
        case "calls":
            return _written(read_calls(structure.text))
        case "leading_calls":
            return _written(read_leading_calls(structure.text))
        case "messages":
            return _written(read_messages(structure.text, _grammar))
    return write_ebnf(*_grammar(structure.kind, structure.text))


def _written(grammar: Grammar) -> str:
    """Return the EBNF of the calls of several tools; their arguments are often similar."""
    return write_ebnf(*inline_rules(*with_shared_parts(*grammar, "common")))


def _grammar(kind: str, text: str) -> Grammar:
    match kind:
        case "json_object":
            return JSON_RULES, OBJECT
        case "json_schema":
            return read_json_schema(text)
        case "regex":
            return with_loops_as_rules(read_regex(text))
        case "choice":
            return {}, _choice(text)
        case "structural_tag":
            return read_structural_tag(text, _grammar)
    raise invalid_structure("structure is a grammar, which cannot be combined with tools.")


def _choice(text: str) -> Alternation:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_structure("structure has invalid choices: not a JSON list.") from error
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        raise invalid_structure("structure has invalid choices: not a list of strings.")
    if not 0 < len(choices) <= _MAX_CHOICES or not all(choices):
        raise invalid_structure(f"structure must have 1 to {_MAX_CHOICES} non-empty choices.")
    if any(
        "\ud800" <= character <= "\udfff" or not ord(character) for character in "".join(choices)
    ):
        raise invalid_structure("structure has a choice with NUL or a lone surrogate.")
    return Alternation(tuple(map(Text, dict.fromkeys(choices))))
