"""Several trials of one attack, of which the median decides about the time between tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tests.hostile.outcome import Outcome

__all__ = ["RepeatedTrial"]


@dataclass(frozen=True, slots=True)
class RepeatedTrial:
    """The outcomes of the same attack on servers of their own.

    Times between tokens vary by half from one server to the next on a busy machine. All else must
    hold in each trial.
    """

    outcomes: tuple[Outcome, ...]

    def median(self) -> Outcome:
        """Return the outcome whose ratio of times is the median."""
        return sorted(self.outcomes, key=Outcome.gap_ratio)[len(self.outcomes) // 2]

    def not_held(self) -> list[str]:
        """Return what did not hold, as sentences."""
        found = [text for one in self.outcomes for text in (*one.damage(), *one.excesses())]
        return [*dict.fromkeys(found), *self.median().delays()]

    def figures(self) -> dict[str, object]:
        """Return everything for the report: the median trial, and the ratios of all."""
        return {
            **self.median().figures(),
            "gap_ratios": [round(one.gap_ratio(), 2) for one in self.outcomes],
            "not_held": self.not_held(),
        }

    def row(self) -> str:
        """Return a line of the table whose head is `TABLE_HEAD`."""
        return self.median().row(self.not_held())
