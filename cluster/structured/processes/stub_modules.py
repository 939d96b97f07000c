"""Stubs for modules that a library imports without needing them."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["StubModule", "stubbed"]


class StubModule(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *given, **named: None})


@contextmanager
def stubbed(**modules: ModuleType | None) -> Iterator[None]:
    """Replace modules that are not imported yet; None makes their import fail.

    No other thread may import them at the same time.
    """
    # The type of sys.modules excludes None, which Python allows.
    sys.modules.update(modules)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
