"""The log line of a replacement of ranks: how long each phase took."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Healing"]

_LEAST_S = 0.005
"""Shorter parts of a rank's start are left out."""


class Healing:
    """The phases of a replacement of ranks, in order, with the parts of each rank."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phase_started_s = clock()
        self._is_waiting = False
        self._phases: dict[str, float] = {}
        self._replaced: dict[int, str] = {}
        self._kept: list[int] = []
        self._parts: list[Mapping[str, float]] = []

    def wait_for_phase(self) -> None:
        """Let the next phase begin with `start_phase`; the time until then counts to none."""
        self._is_waiting = True

    def start_phase(self) -> None:
        """Begin a phase that was waited for; otherwise have no effect."""
        if self._is_waiting:
            self._phase_started_s = self._clock()
            self._is_waiting = False

    def end_phase(self, name: str) -> None:
        """Give the time since the last phase ended to the phase `name`."""
        now_s = self._clock()
        self._phases[name] = now_s - self._phase_started_s
        self._phase_started_s = now_s

    def note_ranks(
        self,
        *,
        kept: Sequence[int],
        replaced: Mapping[int, str],
        parts: Sequence[Mapping[str, float]],
    ) -> None:
        """Note the ranks that stayed, the replaced ranks, and the parts of each rank."""
        self._kept, self._replaced, self._parts = list(kept), dict(replaced), list(parts)

    def __str__(self) -> str:
        """Return one line with all figures in seconds."""
        total_s = sum(self._phases.values())
        kept = f", kept {_listed(self._kept)}" if self._kept else ""
        what = ", ".join(f"{rank} ({how})" for rank, how in sorted(self._replaced.items()))
        parts = "".join(
            f"; rank {rank}: {figures}"
            for rank, times in enumerate(self._parts)
            if (figures := _figures(times))
        )
        return (
            f"Replaced {'rank' if len(self._replaced) == 1 else 'ranks'} {what}{kept} in "
            f"{total_s:.2f} s: {_figures(self._phases)}{parts}."
        )


def _figures(times: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {time_s:.2f}" for name, time_s in times.items() if time_s >= _LEAST_S)


def _listed(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
