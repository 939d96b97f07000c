"""Masks of compiled grammars, however long they take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.structured.mask_client import MatcherHandle
    from pagedray.request import FinishReason

__all__ = ["made_masks"]


def made_masks(
    asked: Sequence[tuple[MatcherHandle, Sequence[int]]],
) -> list[bytes | FinishReason]:
    """Return the mask, or how the sequence ends, for each matcher and its tokens."""
    grammar = asked[0][0].grammar
    found = grammar.masks(asked, num_awaited=len(asked), wait_s=math.inf)
    assert None not in found
    return [one for one in found if one is not None]
