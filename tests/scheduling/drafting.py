"""Drafters that guess what a fake worker samples, and steps in which drafts cost nothing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from cluster.scheduling.speculation import RowTimes
from tests.scheduling.fake_worker import VOCAB_SIZE, fingerprints, next_fingerprint, sample

if TYPE_CHECKING:
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.sequence import Sequence
    from pagedray.request import Request


class FreeDrafts(RowTimes):
    """Steps of any number of rows take the same time, without gaps, so every draft is worth it."""

    gap_s = 0.0

    def has_measured(self, num_rows: int) -> bool:
        return True

    def time_of(self, num_rows: int) -> float:
        return 1.0


class RandomTimes(FreeDrafts):
    """Steps of any number of rows take any time, so any number of drafts is worth it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def time_of(self, num_rows: int) -> float:
        return 1.0 if self._rng.random() < 0.8 else 9.0 * self._rng.random()


class GuessingDrafter:
    """Guesses the tokens of a fake worker; some guesses are wrong."""

    def __init__(self, seed: int, *, right: float) -> None:
        """`right` is the probability that a guess is right."""
        self._rng = random.Random(seed)
        self._right = right

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        request, number = sequence.active.request, self._rng.randint(0, limit)
        return self.guesses(request, sequence.token_ids, number, index=sequence.index)

    def guesses(
        self, request: Request, token_ids: AnySequence[int], number: int, *, index: int
    ) -> list[int]:
        """Return guesses of the tokens that follow some tokens of a sequence."""
        parent = fingerprints(request.tenant, token_ids)[-1]
        drafts: list[int] = []
        first = len(token_ids) - len(request.prompt_token_ids)
        for num_sampled in range(first, first + number):
            token_id = sample(
                parent,
                seed=request.seed,
                index=index,
                is_eos_allowed=request.sampling.ignore_eos
                or num_sampled >= request.sampling.min_tokens,
            )
            if self._rng.random() > self._right:
                token_id = self._rng.randrange(VOCAB_SIZE)
            drafts.append(token_id)
            parent = next_fingerprint(parent, token_id)
        return drafts
