"""The result of checking a history."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["Gap", "Verdict", "Violation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that a history breaks."""

    rule: str
    at_s: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which an open call got no token."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The violations of a history, and its figures."""

    violations: tuple[Violation, ...]
    figures: dict[str, object]

    @property
    def rules(self) -> Counter[str]:
        """How often each rule was broken."""
        return Counter(one.rule for one in self.violations)
