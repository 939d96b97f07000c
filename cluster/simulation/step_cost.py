"""How long a step takes, for simulations."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec

from pagedray.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

    from pagedray.batch import StepPlan

__all__ = ["LLAMA_8B_H200", "MOST_TOKENS", "StepCost", "read_step_cost"]

MOST_TOKENS = 10_000_000
"""Maximum number of tokens of a prompt, of an output, and of a step."""
_LONGEST_S = 1e4
"""A longer time was given in another unit."""


class StepCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the duration of a step, and of copies between the pools."""

    points: tuple[tuple[int, float], ...]
    """Numbers of tokens in a step, and its seconds without attention.

    In between and beyond, the time is linear.
    """
    context_s: float = 0.0
    """Time for each token that a sequence with a single token in the step attends to."""
    pair_s: float = 0.0
    """Time for each pair of a token and a token that it attends to, in a sequence of several
    tokens.
    """
    block_out_s: float = 0.0
    """Time for each block that is copied from the device to the CPU pool."""
    block_in_s: float = 0.0
    """Time for each block that is copied back."""
    gap_s: float = 0.0
    """Time before a step of which the plan was not made during another step."""
    launch_s: float = 0.0
    """How much longer such a step takes, since the device waits for launches within it."""
    capture_s: float = 0.0
    """How much longer the first decodes of a number of rows take, of which a graph is captured."""
    guess_s: float = 0.0
    """Time in which a draft head guesses tokens, however many."""
    feed_s: float = 0.0
    """Time that a draft head takes to read the tokens of a step."""

    def __post_init__(self) -> None:
        numbers = [number for number, _ in self.points]
        if len(numbers) < 2 or numbers != sorted(set(numbers)):
            raise ValueError(
                "points must have at least two numbers of tokens, sorted and without duplicates"
            )
        if not 0 <= numbers[0] <= numbers[-1] <= MOST_TOKENS:
            raise ValueError(f"numbers of tokens must be from 0 to {MOST_TOKENS}")
        values = [value for _, value in self.points]
        values += [self.context_s, self.pair_s, self.block_out_s, self.block_in_s]
        values += [self.gap_s, self.launch_s, self.capture_s, self.guess_s, self.feed_s]
        if not all(0.0 <= value <= _LONGEST_S for value in values):
            raise ValueError(f"times must be from 0 to {_LONGEST_S:g} seconds")
        if self.tokens_s(1) <= 0.0 or self.tokens_s(MOST_TOKENS) <= 0.0:
            raise ValueError("at least one duration must be greater than 0")

    @classmethod
    def linear(cls, *, step_s: float, token_s: float, block_s: float = 0.0) -> StepCost:
        """Return a fixed time for a step, and a time for each token and copied block.

        Blocks are copied equally fast in both directions.
        """
        return cls(
            points=((0, step_s), (1, step_s + token_s)), block_out_s=block_s, block_in_s=block_s
        )

    def tokens_s(self, num_tokens: int) -> float:
        """Return how long a step of this many tokens takes, without attention."""
        points = self.points
        index = bisect_left(points, (num_tokens, -1.0), 1, len(points) - 1)
        (low, low_s), (high, high_s) = points[index - 1], points[index]
        return low_s + (high_s - low_s) * (num_tokens - low) / (high - low)

    def forward_s(self, plan: StepPlan) -> float:
        """Return how long the step of a plan takes, without copies between the pools.

        A plan without tokens, which only starts copies, takes no time.
        """
        if not plan.num_tokens:
            return 0.0
        seconds = self.tokens_s(plan.num_tokens)
        if plan.num_drafts:
            seconds += self.guess_s
        if self.context_s:
            num_attended = plan.decodes.num_pairs + sum(
                chunk.num_pairs for chunk in plan.chunks if chunk.num_tokens == 1
            )
            seconds += self.context_s * num_attended
        if self.pair_s:
            seconds += self.pair_s * sum(
                chunk.num_pairs for chunk in plan.chunks if chunk.num_tokens > 1
            )
        return seconds


LLAMA_8B_H200 = StepCost(
    points=((1, 4.76e-3), (8, 4.88e-3), (64, 4.94e-3), (256, 7.05e-3), (8192, 179.5e-3)),
    context_s=36.5e-9,
    pair_s=1.03e-9,
    block_out_s=39.1e-6,
    block_in_s=39.2e-6,
)
"""A Llama of 8B parameters in bfloat16 on an NVIDIA H200, fitted to single steps.

Copies of blocks were measured on an H100. docs/simulation.md has the figures, docs/benchmarks.md
compares predictions with whole runs.
"""


def read_step_cost(path: Path) -> StepCost:
    """Return the cost in a JSON file with the fields of `StepCost`. Raises StartupError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepCost)
    except OSError as error:
        raise StartupError(
            f"Cannot read the costs of steps in {path}: {error.strerror}."
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not a JSON file of the costs of steps: {error}.") from error
