"""Finds the requests that kill their ranks, from which requests ran at each death.

A request that kills its ranks does so whenever it reaches the same token. Hence a request that gets
beyond the tokens that it had at a death did not cause it, and deaths with another cause, such as a
signal, clear every request within a few steps. Requests that saw two deaths without getting beyond
the first are examined: half of them run, without any other request. The half that dies is halved
again, and a request that dies alone runs once more: if it dies alone again it is accused, since the
first of these deaths may have had another cause. One such request among n costs 3 + log2(n) deaths.
An accused request waits until another one survives, which proves that the ranks work; then it is a
culprit.

Requests may die only together. Then each half survives and the search finds none. After two such
searches among the same requests, half of them wait until the others have ended.

It has no clock, and knows requests only by their ids and numbers of tokens.
"""

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["Lengths", "Suspects"]

Lengths = Mapping[str, Mapping[int, int]]
"""The number of known tokens of unfinished sequences, by request and index."""

_DEATHS_TO_EXAMINE = 2
_SOLITARY_DEATHS = 2
"""Deaths of a request that ran alone after which it is accused."""
_MARGIN = 3
"""Tokens beyond those known at a death that clear a sequence: two steps were in flight."""
_VAIN_SEARCHES = 2
"""Number of searches without a result after which requests are separated."""


class _Separation(NamedTuple):
    """Requests that do not run together."""

    first: set[str]
    second: set[str]
    """Requests that wait until all of `first` have ended."""


class Suspects:
    """The open requests that may have caused a death, and the search among them."""

    def __init__(self) -> None:
        self._num_deaths: dict[str, int] = {}
        """Deaths that a request has not got beyond."""
        self._num_solitary: dict[str, int] = {}
        """The number of these deaths at which no other request ran."""
        self._marks: dict[str, dict[int, int]] = {}
        """The number of tokens that clears each sequence of a suspect."""
        self._is_searching = False
        self._examined: set[str] = set()
        """The requests that run during a search."""
        self._other_half: list[str] = []
        """Includes a culprit if no examined request is one."""
        self._rest: list[str] = []
        """Suspects that may all be innocent, to be examined together at the end."""
        self._died: list[str] = []
        """The requests that ran at the last death of the search."""
        self._survivors: set[str] = set()
        """Open requests that survived the search."""
        self._accused: list[str] = []
        """Requests that died alone twice, until it is proven that the ranks work without them."""
        self._is_proven = False
        """Whether a request has survived since the search began."""
        self._has_culprit = False
        """Whether the search has accused a request."""
        self._num_vain: dict[str, int] = {}
        """Searches without a result that an open request survived."""
        self._separations: list[_Separation] = []

    @property
    def are_any(self) -> bool:
        """Whether `note_lengths` may change what runs."""
        return bool(self._marks or self._accused or self._separations)

    @property
    def ids(self) -> set[str]:
        """The requests whose lengths `note_lengths` needs."""
        return {*self._marks, *self._num_vain, *self._accused}

    @property
    def is_searching(self) -> bool:
        """Whether only some requests may run because suspects are examined."""
        return self._is_searching

    @property
    def accused(self) -> list[str]:
        """Requests that died alone twice and are not proven to be the cause."""
        return list(self._accused)

    @property
    def num_examined(self) -> int:
        """Suspects that run at present."""
        return len(self._examined)

    @property
    def needs_proof(self) -> bool:
        """Whether requests are accused, and no suspect is left that could prove it."""
        return bool(self._accused) and not self._is_searching and not self._is_proven

    def may_run(self, request_id: str) -> bool:
        """Return whether a request may run now."""
        if self._is_searching:
            return request_id in self._examined
        if request_id in self._accused:
            return False
        return not any(request_id in one.second for one in self._separations)

    def note_death(self, lengths: Lengths) -> bool:
        """Note the sequences that ran at a death; return whether it narrowed a search."""
        for request_id, known in lengths.items():
            marks = self._marks.setdefault(request_id, {})
            for index, length in known.items():
                marks.setdefault(index, length + _MARGIN)
            self._num_deaths[request_id] = self._num_deaths.get(request_id, 0) + 1
        if len(lengths) == 1:
            (alone,) = lengths
            self._num_solitary[alone] = self._num_solitary.get(alone, 0) + 1
        if self._is_searching:
            # Sequences of those examined before may be in flight; then it is not known who died.
            is_known = bool(lengths) and self._examined.issuperset(lengths)
            return is_known and self._narrow(list(lengths))
        guilty = [one for one in lengths if self._num_deaths[one] >= _DEATHS_TO_EXAMINE]
        if guilty:
            self._is_searching, self._is_proven = True, False
            self._died = guilty
            self._halve(guilty)
        return False

    def note_lengths(self, lengths: Lengths) -> bool:
        """Note how far the requests of `ids` are; return whether `may_run` changes.

        Requests and sequences without a length have ended.
        """
        for request_id in self.ids:
            if not lengths.get(request_id):
                self._forget(request_id)
        for request_id in list(self._examined if self._is_searching else self._marks):
            known, marks = lengths[request_id], self._marks[request_id].items()
            if all(index not in known or known[index] >= mark for index, mark in marks):
                self._clear(request_id)
                if self._is_searching:
                    self._survivors.add(request_id)
                    self._is_proven = True
        return self._go_on()

    def take_culprits(self, *, is_proven: bool = False) -> list[str]:
        """Return the accused requests, once, if it is proven that the ranks work without them.

        A survivor of the search proves it; `is_proven` is true if something else does.
        """
        if not (is_proven or self._is_proven):
            return []
        culprits, self._accused = self._accused, []
        return culprits

    def _narrow(self, ran: list[str]) -> bool:
        """Continue the search after a death of examined requests only.

        Returns whether fewer are examined than before, or one of them died alone for the first
        time.
        """
        num_examined = len(self._examined)
        self._rest += self._other_half
        self._rest += (one for one in self._examined if one not in ran)
        self._other_half = []
        self._died = ran
        if len(ran) > 1 or self._num_solitary[ran[0]] < _SOLITARY_DEATHS:
            self._halve(ran)
            return len(self._examined) < num_examined or len(ran) == 1
        (accused,) = ran
        self._examined = set()
        self._forget(accused)
        self._accused.append(accused)
        self._has_culprit = True
        self._go_on()
        return 0 < len(self._examined) < num_examined

    def _halve(self, guilty: list[str]) -> None:
        """Examine half of some requests that include a culprit."""
        half = (len(guilty) + 1) // 2
        self._examined, self._other_half = set(guilty[:half]), guilty[half:]

    def _go_on(self) -> bool:
        """Examine the next suspects if no examined one is left; return whether any changed."""
        has_ended = self._end_separations()
        if not self._is_searching:
            return has_ended
        if self._examined:
            return False
        if self._other_half:
            self._halve(self._other_half)
        elif self._rest:
            self._examined, self._rest = set(self._rest), []
        else:
            self._end_search()
        return True

    def _end_search(self) -> None:
        if not self._has_culprit:
            for one in self._survivors:
                self._num_vain[one] = self._num_vain.get(one, 0) + 1
            self._separate([o for o in self._died if self._num_vain.get(o, 0) >= _VAIN_SEARCHES])
        self._is_searching = self._has_culprit = False
        self._died, self._survivors = [], set()

    def _separate(self, requests: list[str]) -> None:
        """Have half of some requests wait until the others have ended."""
        half = (len(requests) + 1) // 2
        if half < len(requests):
            self._separations.append(_Separation(set(requests[:half]), set(requests[half:])))
        for one in requests:
            self._num_vain[one] -= 1

    def _end_separations(self) -> bool:
        left = [one for one in self._separations if one.first and one.second]
        has_ended = len(left) < len(self._separations)
        self._separations = left
        return has_ended

    def _clear(self, request_id: str) -> None:
        """Stop suspecting a request."""
        self._num_deaths.pop(request_id, None)
        self._num_solitary.pop(request_id, None)
        self._marks.pop(request_id, None)
        self._examined.discard(request_id)

    def _forget(self, request_id: str) -> None:
        """Forget all about a request."""
        self._clear(request_id)
        self._num_vain.pop(request_id, None)
        self._survivors.discard(request_id)
        for requests in (self._other_half, self._rest, self._accused):
            if request_id in requests:
                requests.remove(request_id)
        for one in self._separations:
            one.first.discard(request_id)
            one.second.discard(request_id)
