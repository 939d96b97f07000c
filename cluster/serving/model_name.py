"""The model that a client names."""

from __future__ import annotations

from pagedray.errors import UnknownModelError

__all__ = ["check_model_name"]

_MAX_SHOWN = 128


def check_model_name(given: str | None, served: str) -> None:
    """Raise UnknownModelError for a name other than that of the served model; None is no name."""
    if given is not None and given != served:
        raise UnknownModelError(given[:_MAX_SHOWN], served)
