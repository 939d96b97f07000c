"""Parameters of tests, some of which run with slow tests only."""

from collections.abc import Sequence
from typing import Any

import pytest

__all__ = ["some_slow"]


# Any: parameters of any type.
def some_slow(values: Sequence[Any], *, slow: Sequence[Any]) -> list[Any]:
    """Return parameters of a test, of which some are marked as slow; tuples are several."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[pytest.mark.slow] if value in slow else [],
        )
        for value in values
    ]
