"""How long a step waits for masks that are not made yet."""

__all__ = ["MaskPatience"]

_MIN_S = 0.003
_MAX_S = 0.02
_SHARE = 0.75
"""Of the duration of a step: less than one, so that waiting does not extend the wait."""


class MaskPatience:
    """Derives the wait from the duration of earlier steps, since masks are made during a step."""

    def __init__(self) -> None:
        self._step_s = 0.0
        self._are_late = False

    @property
    def wait_s(self) -> float:
        """Seconds to wait for the masks of the next step."""
        return min(max(_MIN_S, _SHARE * self._step_s), _MAX_S)

    def note_masks(self, *, are_late: bool) -> None:
        """Note whether masks of the step in flight were late."""
        self._are_late = are_late

    def note_step(self, step_s: float) -> None:
        """Note the duration of a step."""
        if not self._are_late:
            self._step_s = step_s
