"""How long a step takes, fitted to the durations that rank 0 reports.

A step takes a fixed time, a time for each token that it computes, and a time for each pair of a
computed token and a token that it attends to. The three are the non-negative least squares over
recent steps, in which later steps count more.
"""

from __future__ import annotations

import math
from itertools import combinations

__all__ = ["StepPace", "StepTimes"]

_KEPT = 0.98
"""Weight of a step relative to the next step."""
_TOKEN_UNIT = 1e-3
_PAIR_UNIT = 1e-6
"""The features are scaled to about 1, so that the equations are well conditioned."""
_TOLERANCE = 1e-6
"""The part of the squares by which a fit with more features must be better than with fewer."""
_Vector = list[float]
# The time of a token comes first: a single step says nothing about the others.
_SUBSETS = ((1,), (0,), (2,), *combinations(range(3), 2), (0, 1, 2))

_LEAST_TOKENS = 64
"""Tokens of prompts that any step may have, so that prompts end although decodes take longer."""
_FIRST_TOKENS = 256
"""Tokens of steps before the first measurement; afterwards at most twice the measured number."""
_KEPT_STEPS = 0.8
"""Weight of a step's error relative to the next step."""
_MOST_ERROR = 8.0


class StepTimes:
    """A fit of step times that forgets old steps."""

    __slots__ = ("_products", "_squares", "_targets", "_weights")

    def __init__(self) -> None:
        self._products = [[0.0] * 3 for _ in range(3)]
        self._targets = [0.0] * 3
        self._squares = 0.0
        self._weights: _Vector | None = None
        """The fit; None if a step was noted since."""

    @property
    def is_measured(self) -> bool:
        """Whether a step was noted."""
        return self._squares > 0.0

    def note_step(self, *, num_tokens: int, num_pairs: int, seconds: float) -> None:
        """Add a step; `num_pairs` counts pairs of its tokens and the tokens that they attend to."""
        self._weights = None
        features = (1.0, num_tokens * _TOKEN_UNIT, num_pairs * _PAIR_UNIT)
        self._squares = _KEPT * self._squares + seconds * seconds
        for i, feature in enumerate(features):
            self._targets[i] = _KEPT * self._targets[i] + feature * seconds
            row = self._products[i]
            for j, other in enumerate(features):
                row[j] = _KEPT * row[j] + feature * other

    def marginal_s(self, *, num_tokens: int, num_pairs: int) -> float:
        """Return by how much tokens prolong the steps that compute them, without the fixed time."""
        _, token_s, pair_s = self._fit()
        return num_tokens * _TOKEN_UNIT * token_s + num_pairs * _PAIR_UNIT * pair_s

    def step_s(self, *, num_tokens: int, num_pairs: int) -> float:
        """Return how long a step takes; 0 if none was measured."""
        return self._fit()[0] + self.marginal_s(num_tokens=num_tokens, num_pairs=num_pairs)

    def num_tokens_within(self, seconds: float, *, first_position: int) -> float:
        """Return how many tokens of a prompt, from a position on, a step computes in so much time.

        The fixed time of the step is not included.
        """
        if seconds <= 0.0:
            return 0
        _, token_s, pair_s = self._fit()
        pair_s *= _PAIR_UNIT
        # Token i from there on attends to `first_position` + i + 1.
        linear, square = token_s * _TOKEN_UNIT + pair_s * (first_position + 0.5), pair_s / 2
        if not linear:
            return math.inf
        # The root of square * n * n + linear * n - seconds, also if `square` is 0.
        root = math.sqrt(linear * linear + 4.0 * square * seconds)
        return int(2.0 * seconds / (linear + root))

    def _fit(self) -> _Vector:
        """Return the weights of the features, none of which is negative."""
        if self._weights is None:
            self._weights = self._find_weights()
        return self._weights

    def _find_weights(self) -> _Vector:
        best, least = [0.0] * 3, self._squares
        for subset in _SUBSETS:
            found = self._fit_subset(subset)
            if found is None:
                continue
            weights, error = found
            if error < least - _TOLERANCE * self._squares:
                best, least = weights, error
        return best

    def _fit_subset(self, subset: tuple[int, ...]) -> tuple[_Vector, float] | None:
        """Return weights of features and the sum of squared errors, or None if a weight is < 0."""
        solution = _solve(
            [[self._products[i][j] for j in subset] for i in subset],
            [self._targets[i] for i in subset],
        )
        if solution is None or min(solution) < 0.0:
            return None
        weights = [0.0] * 3
        for i, weight in zip(subset, solution, strict=True):
            weights[i] = weight
        # At the least squares, the products with the errors are 0.
        explained = sum(w * target for w, target in zip(weights, self._targets, strict=True))
        return weights, self._squares - explained


def _solve(matrix: list[_Vector], right: _Vector) -> _Vector | None:
    """Return the solution of a small positive definite system, or None if it is singular."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for i, row in enumerate(rows):
        if row[i] <= 1e-9 * matrix[i][i]:
            return None
        for other in rows[i + 1 :]:
            factor = other[i] / row[i]
            for j in range(i, size + 1):
                other[j] -= factor * row[j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution


class StepPace:
    """Shortens steps with running sequences to a target time, by the fit of measured steps.

    The average error of the fit over recent steps with prompts is corrected.
    """

    __slots__ = (
        "_actual_s",
        "_left_s",
        "_most_tokens",
        "_num_left",
        "_predicted_s",
        "_target_s",
        "_times",
    )

    def __init__(self, target_s: float, times: StepTimes) -> None:
        self._target_s = target_s
        self._times = times
        self._actual_s = self._predicted_s = 0.0
        self._most_tokens = _FIRST_TOKENS // 2
        """The most tokens of prompts in a measured step."""
        self._left_s = math.inf
        self._num_left = 0
        """Tokens that may be added even beyond the target time."""

    def note_step(
        self, *, num_tokens: int, num_pairs: int, num_prompt_tokens: int, seconds: float
    ) -> None:
        """Note a measured step with prompts, before it is added to the fit."""
        predicted_s = self._times.step_s(num_tokens=num_tokens, num_pairs=num_pairs)
        if predicted_s > 0.0:
            self._predicted_s = _KEPT_STEPS * self._predicted_s + predicted_s
            self._actual_s = _KEPT_STEPS * self._actual_s + seconds
        self._most_tokens = max(num_prompt_tokens, self._most_tokens)

    def begin_step(self, *, num_tokens: int, num_pairs: int) -> None:
        """Begin a step with the decodes that are planned; without any it may take any time."""
        if not num_tokens:
            self._left_s, self._num_left = math.inf, 0
            return
        error = 1.0
        if self._predicted_s:
            error = self._actual_s / self._predicted_s
            error = min(max(error, 1.0 / _MOST_ERROR), _MOST_ERROR)
        decodes_s = self._times.step_s(num_tokens=num_tokens, num_pairs=num_pairs)
        self._left_s = self._target_s / error - decodes_s
        self._num_left = _LEAST_TOKENS

    def num_tokens(self, first_position: int) -> float:
        """Return how many tokens of a prompt may be added from a position on."""
        if self._left_s == math.inf:
            return math.inf
        fitting = self._times.num_tokens_within(self._left_s, first_position=first_position)
        return max(min(fitting, 2 * self._most_tokens), self._num_left)

    def add_tokens(self, num_tokens: int, *, first_position: int) -> None:
        """Note that tokens of a prompt were added."""
        num_pairs = num_tokens * first_position + num_tokens * (num_tokens + 1) // 2
        self._left_s -= self._times.marginal_s(num_tokens=num_tokens, num_pairs=num_pairs)
        self._num_left = max(self._num_left - num_tokens, 0)
