"""Turns panics of a library in Rust into errors.

A panic reaches Python as a `BaseException` that is not an `Exception`, so `except Exception` does
not catch it. Its class cannot be imported, and each library has its own.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LibraryPanicError", "panics_as_errors"]

_MODULE = "pyo3_runtime"


class LibraryPanicError(RuntimeError):
    """A library panicked, for example because of an invalid tokenizer file."""


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise LibraryPanicError instead of a panic."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != _MODULE:
            raise
        raise LibraryPanicError(f"The tokenizer library panicked: {error}") from error
