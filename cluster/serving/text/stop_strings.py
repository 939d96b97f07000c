"""Matches stop strings in text that arrives in pieces."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["StopMatcher", "StopStrings"]

_ROOT = 0


class StopStrings:
    """The stop strings of a call, shared by the matchers of all its sequences.

    They form an automaton (Aho and Corasick, "Efficient string matching", 1975). A state is the
    longest suffix of the text so far with which a stop string begins. States are created when a
    text first reaches them, since a client may send thousands of characters of stop strings that
    the model never begins to generate.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self.first_characters = frozenset(stop[0] for stop in self._stops)
        """Other characters leave the first state as it is."""
        # Each has an entry per state; the state's text is `stops[owner][:depth]`.
        self._owners = array("H", (0,))
        self._depths = array("H", (0,))
        self._fallbacks = array("H", (_ROOT,))
        """The state of the longest proper suffix of a state's text."""
        self._followers: list[int | dict[str, int] | None] = [None]
        """The state after the only character that may follow, or the states by characters; 0 for a
        state that is not created yet, and None if the characters that may follow are not known."""
        self._seen_characters = [""]
        """The last character after each state."""
        self._seen_states = array("H", (_ROOT,))
        """The state after that character."""
        self._found: dict[int, str] = {}
        """The longest stop string with which a state's text ends."""

    def depth_of(self, state: int) -> int:
        """Return how many characters may be the beginning of a stop string."""
        return self._depths[state]

    def found_at(self, state: int) -> str | None:
        """Return the longest stop string that ends here."""
        return self._found.get(state)

    def step(self, state: int, character: str) -> int:
        """Return the state after another character."""
        if self._seen_characters[state] == character:
            return self._seen_states[state]
        suffix, following = state, self._goto(state, character)
        while following is None:
            if suffix == _ROOT:
                following = _ROOT
            else:
                suffix = self._fallbacks[suffix]
                following = self._goto(suffix, character)
        self._seen_characters[state] = character
        self._seen_states[state] = following
        return following

    def _goto(self, state: int, character: str) -> int | None:
        """Return the state of the text of `state` and the character; None if there is none."""
        followers = self._followers[state]
        if followers is None:
            followers = self._followers[state] = self._first_followers(state)
        if isinstance(followers, dict):
            following = followers.get(character)
            if following == _ROOT:
                following = followers[character] = self._make(state, character)
            return following
        stop, depth = self._stops[self._owners[state]], self._depths[state]
        if depth == len(stop) or stop[depth] != character:
            return None
        if followers == _ROOT:
            followers = self._followers[state] = self._make(state, character)
        return followers

    def _first_followers(self, state: int) -> int | dict[str, int]:
        depth = self._depths[state]
        text = self._stops[self._owners[state]][:depth]
        longer = [stop[depth] for stop in self._stops if len(stop) > depth and stop[:depth] == text]
        followers = dict.fromkeys(longer, _ROOT)
        owner = self._stops[self._owners[state]]
        is_of_owner = not followers or list(followers) == [owner[depth : depth + 1]]
        return _ROOT if is_of_owner else followers

    def _make(self, state: int, character: str) -> int:
        """Return a new state, for the text of `state` and the character."""
        depth = self._depths[state] + 1
        text = self._stops[self._owners[state]][: depth - 1] + character
        owners = [place for place, stop in enumerate(self._stops) if stop[:depth] == text]
        fallback = _ROOT if state == _ROOT else self.step(self._fallbacks[state], character)
        made = len(self._depths)
        self._owners.append(owners[0])
        self._depths.append(depth)
        self._fallbacks.append(fallback)
        self._followers.append(None)
        self._seen_characters.append("")
        self._seen_states.append(_ROOT)
        found = text if text in self._stops else self._found.get(fallback)
        if found is not None:
            self._found[made] = found
        return made


class StopMatcher:
    """Cuts a text before the first stop string.

    The result does not depend on the pieces. Of stop strings that end at the same character, the
    longest is found. The work for each character is constant on average.
    """

    __slots__ = ("_held", "_state", "_stops")

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._state = _ROOT
        self._held = ""

    def match_text(self, text: str) -> tuple[str, str | None]:
        """Return the text before a stop string, and the stop string if found.

        A suffix that may begin a stop string is held back.
        """
        stops, state = self._stops, self._state
        if state == _ROOT and stops.first_characters.isdisjoint(text):
            # The fast path of most tokens.
            return text, None
        for position, character in enumerate(text):
            state = stops.step(state, character)
            found = stops.found_at(state) if state else None
            if found is not None:
                return (self._held + text[: position + 1])[: -len(found)], found
        self._state = state
        seen = self._held + text
        num_certain = len(seen) - stops.depth_of(state)
        self._held = seen[num_certain:]
        return seen[:num_certain], None

    def flush(self) -> str:
        """Return the text that was held back."""
        held, self._held = self._held, ""
        return held
