"""The kernels compiled with fewer instructions than this machine has."""

import platform
from pathlib import Path
from typing import Any

import pytest

from attention.kernels.cpu import native

__all__ = ["compile_with", "variants"]

KEPT = Path(__file__).parents[4] / "build" / "cache"
"""Kernels of earlier runs, found by the contents of their sources and by their flags."""


def variants(*flags: str) -> list[Any]:  # Any: the parameters of a fixture
    """Return sets of flags for a fixture, less optimized; in slow tests, also fully optimized.

    Less optimized, the kernels compile in a quarter of the time. The flags are those of x86-64.
    """
    other = pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
    slow = [pytest.param(one, marks=[other, pytest.mark.slow]) for one in flags]
    return [*(pytest.param(f"-O1 {one}", marks=other) for one in flags), *slow]


def compile_with(patch: pytest.MonkeyPatch, flags: str, cache: Path = KEPT) -> None:
    """Compile kernels with additional flags, or load them from a cache, until `patch` is undone."""
    patch.setenv("XDG_CACHE_HOME", str(cache))
    patch.setattr(native, "_FLAGS", (*native._FLAGS, *flags.split()))
