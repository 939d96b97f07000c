"""A JSON schema as Python objects, with exact numbers."""

import json
from fractions import Fraction
from math import isinf
from typing import NoReturn

from cluster.structured.grammar.expressions import invalid_structure
from cluster.structured.grammar.schemas.schema_rewrites import rewritten

__all__ = ["load_schema"]

_MAX_EXPONENT = 400
"""The largest exponent of a number; no float has a larger one."""


def load_schema(text: str) -> tuple[object, object]:
    """Return a schema, rewritten, with fractions where it has floats, and with the floats.

    Raises InvalidRequestError.
    """
    try:
        schema = json.loads(text, parse_constant=_reject_constant, parse_float=_fraction)
    except ValueError as error:
        raise invalid_structure(f"structure is not valid JSON: {error}.") from error
    except RecursionError:
        raise invalid_structure("structure is a JSON Schema that is nested too deeply.") from None
    return rewritten(schema), rewritten(json.loads(text))


def _fraction(text: str) -> Fraction:
    """Return a number exactly. Raises ValueError if it has no finite float."""
    _, _, exponent = text.lower().partition("e")
    # A fraction has as many digits as its exponent says.
    if abs(int(exponent or 0)) > _MAX_EXPONENT or isinf(float(text)):
        raise ValueError(f"{text:.40} is beyond the range of a number")
    return Fraction(text)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")
