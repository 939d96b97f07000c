"""The definition of a choice in float64, and how close a drawn number is to another token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from workers.sampling.choice import Draws


@dataclass(frozen=True, slots=True, eq=False)
class RankedRow:
    """A row of scores, likeliest first."""

    ids: np.ndarray
    scores: np.ndarray
    _sums: dict[float, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, scores: torch.Tensor) -> RankedRow:
        values = scores.double().cpu().numpy()
        ids = np.argsort(-values, kind="stable")
        return cls(ids, values[ids])

    def sums(self, temperature: float, top_k: int, min_p: float) -> np.ndarray:
        """Return the running sums of the weights that top_k and min_p keep."""
        if temperature not in self._sums:
            weights = np.exp((self.scores - self.scores[0]) / temperature)
            self._sums[temperature] = -weights, weights.cumsum()
        negative, sums = self._sums[temperature]
        return sums[: min(top_k, int(negative.searchsorted(-min_p, side="right")))]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens that a draw may give if its shares are right to a tolerance."""

    token_id: int
    nearby: frozenset[int]


def draw(row: RankedRow, draws: Draws, index: int, *, tolerance: float) -> Drawn:
    """Return the token of the definition, and those within the tolerance of a boundary."""
    temperature, min_p = float(draws.temperature[index]), float(draws.min_p[index])
    top_k, top_p = int(draws.top_k[index]), float(draws.top_p[index])
    uniform = float(draws.uniform[index])
    sums = row.sums(temperature, top_k, min_p)

    def place(top_p: float, uniform: float) -> int:
        num_kept = len(sums)
        if top_p < 1.0:
            num_kept = min(int(sums.searchsorted(top_p * sums[-1])) + 1, len(sums))
        drawn = sums[:num_kept].searchsorted(uniform * sums[num_kept - 1], side="right")
        return min(int(drawn), num_kept - 1)

    places = [
        place(top_p + shift_p if top_p < 1.0 else 1.0, min(max(uniform + shift_u, 0.0), 1.0))
        for shift_p in (-tolerance, tolerance)
        for shift_u in (-tolerance, tolerance)
    ]
    nearby = row.ids[min(places) : max(places) + 1]
    return Drawn(int(row.ids[place(top_p, uniform)]), frozenset(nearby.tolist()))
