"""The prompts of rows, for sequences that start with the prompt of another row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagedray.batch import SequenceStart

__all__ = ["Prompts"]


class Prompts:
    """Keeps the prompt of each row as int32 until another starts there.

    Rows that have it from a donor share its copy.
    """

    def __init__(self) -> None:
        self._by_row: dict[int, NDArray[np.int32]] = {}

    def complete_starts(self, starts: list[SequenceStart]) -> list[SequenceStart]:
        """Return starts in which those with a donor have its prompt as their tokens."""
        completed: list[SequenceStart] = []
        # With the prompt, whose id is another's once it is freed.
        lists: dict[int, tuple[NDArray[np.int32], list[int]]] = {}
        # In order, since a later one may take the row of a donor.
        for start in starts:
            if start.donor_row < 0:
                known = start.token_ids[: start.num_prompt_tokens]
                self._by_row[start.row] = np.asarray(known, dtype=np.int32)
                completed.append(start)
                continue
            prompt = self._by_row[start.row] = self._by_row[start.donor_row]
            if id(prompt) not in lists:
                lists[id(prompt)] = prompt, prompt.tolist()
            _, token_ids = lists[id(prompt)]
            completed.append(msgspec.structs.replace(start, token_ids=token_ids, donor_row=-1))
        return completed
