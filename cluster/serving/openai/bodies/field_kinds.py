"""Kinds of fields that several bodies have, with their schemas."""

from __future__ import annotations

from typing import Any

from pydantic import Field, JsonValue

from cluster.serving.inputs import MAX_SALT_LENGTH

__all__ = [
    "UNLIMITED",
    "bounds",
    "cache_salt_field",
    "model_field",
    "prompts_field",
    "template_variables_field",
    "thinking_budget",
    "thinking_budget_field",
]

UNLIMITED = -1
"""The value of a limit that is the same as none."""


# Any: a pydantic field.
def bounds(description: str, low: float | None = None, high: float | None = None) -> Any:
    """Return an optional numeric field with documented bounds, which the validator checks."""
    limits = {"minimum": low, "maximum": high}
    known: dict[str, JsonValue] = {
        name: value for name, value in limits.items() if value is not None
    }
    return Field(None, description=description, json_schema_extra=known)


def cache_salt_field() -> Any:  # Any: a pydantic field
    """Return a field that restricts which requests share prefixes, by vLLM's name."""
    return Field(
        None,
        description="Prefixes are shared only by requests with the same salt.",
        json_schema_extra={"minLength": 1, "maxLength": MAX_SALT_LENGTH},
    )


def thinking_budget_field() -> Any:  # Any: a pydantic field
    """Return a field that limits the model's reasoning, by vLLM's name."""
    return bounds(
        "Number of tokens after which the model's reasoning is ended; -1 does not limit it. "
        "Requires a model that reasons, other than gpt-oss.",
        UNLIMITED,
    )


def thinking_budget(given: int | None) -> int | None:
    """Return the limit that such a field sets; None is none."""
    return None if given == UNLIMITED else given


def template_variables_field() -> Any:  # Any: a pydantic field
    """Return a field with variables of the chat template, by vLLM's name."""
    return Field(
        None,
        description="Variables for the model's chat template, such as `enable_thinking`; those "
        "that it does not read are ignored.",
        json_schema_extra={"type": "object"},
    )


def model_field() -> Any:  # Any: a pydantic field
    """Return a field with the name of the model, which clients may omit."""
    return Field(None, description="The name of the model, which `/v1/models` lists; optional.")


def prompts_field(max_items: int, *, min_items: int | None = None) -> Any:  # Any: a pydantic field
    """Return a field that is a text or its token ids, or a list of either."""
    token_ids: dict[str, JsonValue] = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0},
        "minItems": 1,
    }
    limits: dict[str, JsonValue] = {} if min_items is None else {"minItems": min_items}
    limits["maxItems"] = max_items
    text: dict[str, JsonValue] = {"type": "string", "minLength": 1}
    kinds: list[JsonValue] = [
        text,
        {"type": "array", "items": text, **limits},
        token_ids,
        {"type": "array", "items": token_ids, **limits},
    ]
    return Field(
        description="A string or an array of token ids, or an array of either.",
        json_schema_extra={"anyOf": kinds},
    )
