"""Drafters that guess what a fake worker samples, and steps in which drafts cost nothing."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from cluster.scheduling.draft_estimates import RowTimes
from tests.scheduling.fake_worker import VOCAB_SIZE, fingerprints, next_fingerprint, sample

if TYPE_CHECKING:
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.sequence import Sequence
    from pagedray.request import Request


class FreeDrafts(RowTimes):
    """Steps of any number of rows take the same time, without gaps, so every draft is worth it."""

    @property
    def gap_s(self) -> float:
        return 0.0

    @property
    def head_s(self) -> float:
        return 0.0

    def has_measured(self, num_rows: int) -> bool:
        return True

    def time_of(self, num_rows: int, *, is_alone: bool = False) -> float:
        return 1.0 + self.gap_s if is_alone else 1.0

    def has_run_ahead(self, num_rows: int) -> bool:
        return True


class RandomTimes(FreeDrafts):
    """Steps of any number of rows, and gaps, take any time: any number of drafts is worth it."""

    @property
    def gap_s(self) -> float:
        return self._rng.choice((0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 50.0))

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._rng = random.Random(seed)

    def time_of(self, num_rows: int, *, is_alone: bool = False) -> float:
        seconds = 1.0 if self._rng.random() < 0.8 else 9.0 * self._rng.random()
        return seconds + self.gap_s if is_alone else seconds


class GuessingDrafter:
    """Guesses the tokens of a fake worker; some guesses are wrong.

    Guesses behind the same tokens are equal.
    """

    def __init__(self, seed: int, *, right: float) -> None:
        """`right` is the probability that a guess is right."""
        self._seed = seed
        self._right = right

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        request, num_tokens = sequence.active.request, len(sequence.token_ids)
        rng = random.Random(hash((self._seed, request.seed, sequence.index, num_tokens)))
        number = min(rng.choice((0, 1, 2, 4, 8, 99)), limit)
        return self.guesses(request, sequence.token_ids, number, index=sequence.index, rng=rng)

    def guesses(
        self,
        request: Request,
        token_ids: AnySequence[int],
        number: int,
        *,
        index: int,
        rng: random.Random,
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
            if rng.random() > self._right:
                token_id = rng.randrange(VOCAB_SIZE)
            drafts.append(token_id)
            parent = next_fingerprint(parent, token_id)
        return drafts
