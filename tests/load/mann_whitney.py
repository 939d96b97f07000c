"""The Mann-Whitney U test of whether two samples come from the same distribution."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["p_value"]


def p_value(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p-value by the normal approximation, with a correction for ties.

    Each sample needs at least 20 values.
    """
    num_first, num_second = len(first), len(second)
    total = num_first + num_second
    members = sorted([(value, 0) for value in first] + [(value, 1) for value in second])
    position_sum = ties = 0.0
    place = 0
    while place < total:
        end = place
        while end < total and members[end][0] == members[place][0]:
            end += 1
        size = end - place
        position_sum += (place + end + 1) / 2 * sum(which == 0 for _, which in members[place:end])
        ties += size**3 - size
        place = end
    u = position_sum - num_first * (num_first + 1) / 2
    mean = num_first * num_second / 2
    variance = num_first * num_second / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance == 0:
        return 1.0
    return math.erfc(max(abs(u - mean) - 0.5, 0.0) / math.sqrt(2 * variance))
