"""How many tokens of prompts a step may have, so that running sequences get theirs in time."""

import math

from cluster.scheduling.costs.step_times import StepTimes

__all__ = ["StepPace"]

_LEAST_TOKENS = 64
"""Tokens of prompts that any step may have, so that prompts end although decodes take longer."""
_FIRST_TOKENS = 256
"""What is tried before a step was measured; afterwards at most twice what was."""
_KEPT = 0.8
"""Weight of a step's error relative to the next one."""
_MOST_ERROR = 8.0


class StepPace:
    """Shortens steps with running sequences to a target time, by the fit of measured steps.

    What the fit gets wrong on average over recent steps with prompts is corrected.
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
            self._predicted_s = _KEPT * self._predicted_s + predicted_s
            self._actual_s = _KEPT * self._actual_s + seconds
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
