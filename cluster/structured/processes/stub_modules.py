"""Modules that stand in for others while a library is imported that names those in passing."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["StandIn", "in_place"]


class StandIn(ModuleType):
    """A module in which every name is a class without a meaning."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *given, **named: None})


@contextmanager
def in_place(**modules: ModuleType | None) -> Iterator[None]:
    """Put modules in the place of others, which are not imported yet; None makes imports fail.

    Meanwhile no other thread may import them.
    """
    # The type says that a module is a module, but Python knows None as well.
    sys.modules.update(modules)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
