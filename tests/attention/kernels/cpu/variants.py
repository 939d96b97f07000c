"""The kernels compiled with fewer instructions than this machine has."""

from pathlib import Path
from typing import Any

import pytest

from attention.kernels.cpu import native

__all__ = ["compile_with", "variants"]


def variants(*flags: str) -> list[Any]:  # Any: the parameters of a fixture
    """Return sets of flags for a fixture, less optimized; in slow tests, also fully optimized.

    Less optimized, the kernels compile in a quarter of the time.
    """
    slow = [pytest.param(one, marks=pytest.mark.slow) for one in flags]
    return [*(f"-O1 {one}" for one in flags), *slow]


def compile_with(patch: pytest.MonkeyPatch, flags: str, cache: Path) -> None:
    """Compile kernels with additional flags into an own cache, until `patch` is undone."""
    patch.setenv("XDG_CACHE_HOME", str(cache))
    patch.setattr(native, "_FLAGS", (*native._FLAGS, *flags.split()))
