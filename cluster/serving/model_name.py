"""The model that a client names, and the names of the served model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.errors import StartupError, UnknownModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedray.config import EngineConfig
    from pagedray.model_config import ModelConfig

__all__ = ["check_model_name", "served_names", "with_served_names"]

_MAX_SHOWN = 128


def check_model_name(given: str | None, model: ModelConfig) -> None:
    """Raise UnknownModelError unless the name is a name of the model; None is accepted."""
    if given is not None and given != model.name and given not in model.other_names:
        raise UnknownModelError(given[:_MAX_SHOWN], *served_names(model))


def served_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the names that clients may give; answers have the first."""
    return (model.name, *model.other_names)


def with_served_names(config: EngineConfig, names: Sequence[str]) -> EngineConfig:
    """Return a configuration with these names of the model, or its own without any.

    Raises StartupError for an empty name.
    """
    if not all(names):
        raise StartupError("served_model_name must not be empty.")
    if not names:
        return config
    first, *others = dict.fromkeys(names)
    return replace(config, model=replace(config.model, name=first, other_names=tuple(others)))
