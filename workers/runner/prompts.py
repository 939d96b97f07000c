"""The prompts of rows, for sequences that start with the prompt of another row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pagedray.batch import TOKEN_ID_BYTES

if TYPE_CHECKING:
    from pagedray.batch import SequenceStart

__all__ = ["Prompts"]


class Prompts:
    """Keeps the prompt of each row, packed as in its start, until another starts there.

    Rows that have it from a donor share its copy.
    """

    def __init__(self) -> None:
        self._by_row: dict[int, bytes] = {}

    def complete_starts(self, starts: list[SequenceStart]) -> list[SequenceStart]:
        """Return starts in which those with a donor have its prompt as their tokens."""
        completed: list[SequenceStart] = []
        # In order, since a later one may take the row of a donor.
        for start in starts:
            if start.donor_row < 0:
                self._by_row[start.row] = start.token_ids[
                    : start.num_prompt_tokens * TOKEN_ID_BYTES
                ]
                completed.append(start)
                continue
            prompt = self._by_row[start.row] = self._by_row[start.donor_row]
            completed.append(msgspec.structs.replace(start, token_ids=prompt))
        return completed
