"""What the served model supports of a conversation, for the bodies that bring one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["ModelSupport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSupport:
    """What a model and its chat template support; the template may be another one with tools."""

    known_variables: frozenset[str]
    """The variables of the chat template that a request may set."""
    keeps_system_messages: Callable[[], bool]
    """Returns whether the template writes later system messages at their places.

    The first call renders the template.
    """
    can_limit_reasoning: bool
    """Whether the model's reasoning can be ended after a number of tokens."""
