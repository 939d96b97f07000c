"""The rotation of pairs of elements, with the same bits in every kernel that rotates."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["rotated", "rotated_pairs"]


@triton.jit
def rotated(own: tl.tensor, partner: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """Return rotated elements, given the partner of each element, all in float32.

    For the first element of each pair, the partner or the sine must be negated.
    """
    # Left to itself, the compiler fuses one product or the other, which are rounded differently.
    return tl.fma(own, cos, partner * sin)


@triton.jit
def rotated_pairs(
    first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Return the rotated first and second elements of pairs, in float32."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    return rotated(first, -second, cos, sin), rotated(second, first, cos, sin)
