"""Matches stop strings in text that arrives in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Cuts a text before the first stop string, by the Knuth-Morris-Pratt algorithm.

    The result does not depend on the pieces. Of stop strings that end at the same character, the
    longest is found. The work per character is constant.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._fallbacks = tuple(_fallbacks_of(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""

    def match_text(self, text: str) -> tuple[str, str | None]:
        """Return the text before a stop string, and the stop string if one was found.

        A suffix that may begin a stop string is held back.
        """
        if not self._stops:
            return text, None
        for position, character in enumerate(text):
            found = self._step(character)
            if found is not None:
                return (self._held + text[: position + 1])[: -len(found)], found
        seen = self._held + text
        num_held = max(self._matched)
        self._held = seen[len(seen) - num_held :]
        return seen[: len(seen) - num_held], None

    def flush(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        found = None
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._fallbacks[index][matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                found = found or stop
                matched = 0
            self._matched[index] = matched
        return found


def _fallbacks_of(stop: str) -> tuple[int, ...]:
    """Return, for each prefix, the length of its longest proper prefix that is also a suffix."""
    fallbacks = [0] * len(stop)
    matched = 0
    for position in range(1, len(stop)):
        while matched and stop[matched] != stop[position]:
            matched = fallbacks[matched - 1]
        matched += stop[matched] == stop[position]
        fallbacks[position] = matched
    return tuple(fallbacks)
