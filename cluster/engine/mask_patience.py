"""How long a step waits for masks that are not made yet."""

__all__ = ["MaskPatience"]

_MIN_S = 0.003
_MAX_S = 0.02
_SHARE = 0.75
"""Share of the duration of a step; less than one, so that waiting does not extend the wait."""


class MaskPatience:
    """Derives the wait from the duration of earlier steps, since masks are made during a step."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._may_delay_step = False

    def wait_s(self, *, delays_others: bool) -> float:
        """Return the seconds to wait for the masks of the next step.

        `delays_others` is true if a wait may delay sequences whose masks are not late.
        """
        if not delays_others:
            return _MAX_S
        return min(max(_MIN_S, _SHARE * self._step_s), _MAX_S)

    def note_masks(self, *, may_delay_step: bool) -> None:
        """Note whether masks of the step in flight were late, or awaited for longer than usual."""
        self._may_delay_step = may_delay_step

    def note_step(self, step_s: float) -> None:
        """Note the duration of a step."""
        if not self._may_delay_step:
            self._step_s = step_s
