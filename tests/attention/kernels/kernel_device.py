"""The device on which Triton kernels are tested: a GPU, or Triton's interpreter on a CPU."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.slow_params import some_slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROTATED_DTYPES = [
    torch.float16,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            DEVICE != "cuda", reason="the interpreter cuts bfloat16 off where a GPU rounds it"
        ),
    ),
]
"""Types of 16 bits in which new tokens are rotated."""


# Any: parameters of any type.
def or_slow(values: Sequence[Any], *, slow: Sequence[Any]) -> list[Any]:
    """Return parameters of a test, of which some are marked as slow under the interpreter."""
    if DEVICE == "cuda":
        return list(values)
    return some_slow(values, slow=slow)
