"""Bad words: sequences of tokens; the last token is not sampled after the others.

Only tokens of the output count. The last tokens of each row are on the device, since the host
learns a token after the next step has been launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pagedray.sampling_params import MAX_BAD_WORD_TOKENS
from workers.sampling.arrays import IntArray, upload

if TYPE_CHECKING:
    from pagedray.batch import SequenceStart

__all__ = ["BadWords"]

_LENGTH = MAX_BAD_WORD_TOKENS - 1
"""Tokens of an output that may begin a word."""
_NONE = -1
"""Stands for a token that the output does not have yet."""
_ANY = -2
"""Stands for a token that a word does not have."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Words:
    """The words of several rows, on the device."""

    beginnings: Tensor
    """int32 `[num_words, _LENGTH]`: the tokens before the last token, after `_ANY`."""
    last_ids: Tensor
    """int64 `[num_words]`."""
    owners: Tensor
    """int64 `[num_words]`: the index of the word's row among the rows."""
    rows: Tensor
    """int64 `[num_words]`."""


class BadWords:
    """The bad words of every row that has some."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._words_by_row: dict[int, tuple[tuple[int, ...], ...]] = {}
        # Made in inference mode, it could not be written to outside of it.
        with torch.inference_mode(mode=False):
            self._last_tokens = torch.full(
                (max_num_rows, _LENGTH), _NONE, dtype=torch.int32, device=device
            )
        self._words: tuple[bytes, _Words] | None = None
        """The rows of the last step and their bad words; most steps have the same rows again."""

    def start(self, start: SequenceStart) -> None:
        """Replace the words of the row, and record the output with which it starts."""
        words = tuple(filter(self._is_known, start.bad_token_ids))
        self._words_by_row[start.row] = words
        self._words = None
        tokens = np.full(_LENGTH, _NONE, dtype=np.int32)
        output = np.frombuffer(start.token_ids, np.int32)[start.num_prompt_tokens :][-_LENGTH:]
        tokens[_LENGTH - len(output) :] = output
        self._last_tokens[start.row].copy_(upload(tokens, self._device))

    def end(self, row: int) -> None:
        """Forget the row."""
        if self._words_by_row.pop(row, None) is not None:
            self._words = None

    def apply(self, scores: Tensor, indices: IntArray, rows: IntArray) -> None:
        """Forbid the ends of words in `scores[indices]`, which belong to these rows, in place."""
        words = self._words_of(rows)
        is_begun = (words.beginnings == _ANY) | (words.beginnings == self._last_tokens[words.rows])
        # Adding -inf, rather than writing it, keeps a NaN visible.
        added = torch.zeros(len(words.last_ids), device=self._device)
        added.masked_fill_(is_begun.all(1), -torch.inf)
        where = (upload(indices, self._device)[words.owners], words.last_ids)
        scores.index_put_(where, added, accumulate=True)

    def append(self, rows: IntArray, token_ids: Tensor) -> None:
        """Record the tokens just sampled for these rows, `[num_rows]`; -1 is none."""
        row_ids = upload(rows, self._device)
        before, token_ids = self._last_tokens[row_ids], token_ids.unsqueeze(1).int()
        after = torch.cat((before[:, 1:], token_ids), dim=1)
        self._last_tokens[row_ids] = torch.where(token_ids >= 0, after, before)

    def _words_of(self, rows: IntArray) -> _Words:
        key = rows.tobytes()
        if self._words is None or self._words[0] != key:
            self._words = key, self._upload(rows)
        return self._words[1]

    def _upload(self, rows: IntArray) -> _Words:
        table: list[tuple[int, ...]] = []
        for owner, row in enumerate(rows.tolist()):
            for word in self._words_by_row[row]:
                padding = (_ANY,) * (_LENGTH + 1 - len(word))
                table.append((owner, row, *padding, *word))
        words = np.array(table, dtype=np.int64).reshape(-1, _LENGTH + 3)
        owners, rows_of_words, last_ids = upload(words[:, [0, 1, -1]].T, self._device)
        return _Words(
            beginnings=upload(words[:, 2:-1].astype(np.int32), self._device),
            last_ids=last_ids,
            owners=owners,
            rows=rows_of_words,
        )

    def _is_known(self, word: tuple[int, ...]) -> bool:
        return all(0 <= token_id < self._vocab_size for token_id in word)
