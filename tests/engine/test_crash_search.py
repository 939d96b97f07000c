"""Which requests are blamed for the deaths of ranks, by simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.crash_search import CrashingRequests, CrashSearch, DeathBudget
from pagedray.errors import LethalRequestError, OverloadedError, WorkerError

MAX_TURNS = 20_000

ERROR = WorkerError("A rank died.")


@dataclass
class Rig:
    """Ranks that run a token of each request per turn, two steps in flight, and may die."""

    poisons: dict[str, int]
    """The length at which a request kills its ranks."""
    max_length: int = 30
    batch: int = 1_000
    lethal_steps: dict[str, int] = field(default_factory=dict)
    """The step after each start from which a request kills its ranks."""
    lethal_times: dict[str, int] = field(default_factory=dict)
    """The time after each start at which a request kills its ranks; a step takes up to 3."""
    pairs: tuple[frozenset[str], ...] = ()
    """Requests that kill their ranks together."""
    suspects: CrashSearch = field(default_factory=CrashSearch)
    lengths: dict[str, int] = field(default_factory=dict)
    barred: set[str] = field(default_factory=set)
    """Requests that may not run, until the suspects report a change."""
    culprits: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    num_deaths: int = 0
    num_steps: int = 0
    """Steps since the ranks started."""
    time: float = 0.0

    def add(self, name: str, length: int = 1) -> None:
        self.lengths[name] = length
        if not self.suspects.may_run(name):
            self.barred.add(name)

    def turn(self, *, is_killed: bool = False) -> None:
        """Run a step, or lose it with the ranks."""
        running = [one for one in self.lengths if one not in self.barred][: self.batch]
        assert running or not self.lengths, "no request runs"
        deadly = any(self.lengths[one] == self.poisons.get(one) for one in running)
        deadly = deadly or any(pair <= set(running) for pair in self.pairs)
        self.num_steps += 1
        self.time += 1 + 2 * len(running) / max(self.batch, len(self.lengths))
        deadly = deadly or any(self.num_steps >= self.lethal_steps.get(one, 1e9) for one in running)
        deadly = deadly or any(self.time >= self.lethal_times.get(one, 1e9) for one in running)
        has_died = deadly or is_killed
        if has_died:
            self.num_deaths += 1
            ran = {one: {0: self.lengths[one]} for one in running}
            self.suspects.note_death(ran, self.num_steps)
            self.num_steps, self.time = 0, 0.0
        else:
            for one in running:
                self.lengths[one] += 1
                if self.lengths[one] >= self.max_length:
                    del self.lengths[one]
                    self.finished.append(one)
        self.look(has_died=has_died)

    def look(self, *, has_died: bool = False) -> None:
        """Have the suspects see what has become of the requests."""
        known = {one: {0: self.lengths[one]} for one in self.suspects.ids if one in self.lengths}
        if self.suspects.note_lengths(known) or has_died:
            self.barred = {one for one in self.lengths if not self.suspects.may_run(one)} - {
                "probe"
            }
        suspects = self.suspects
        if suspects.isolated is None:
            self.lengths.pop("probe", None)
        elif "probe" in self.finished:
            self.finished.remove("probe")
            self.culprits.append(suspects.confirm_crash())
            del self.lengths[self.culprits[-1]]
            self.look(has_died=True)
        elif "probe" not in self.lengths:
            self.lengths["probe"] = max(1, self.max_length - suspects.num_probe_tokens)

    def drain(self) -> None:
        for _ in range(MAX_TURNS):
            if not self.lengths:
                break
            self.turn()
        assert not self.lengths
        assert not self.suspects.ids
        assert not self.suspects.is_searching


def names(number: int) -> list[str]:
    return [f"r{index}" for index in range(number)]


@given(
    number=st.integers(1, 200),
    place=st.integers(0, 199),
    length=st.integers(1, 29),
    batch=st.sampled_from([7, 64, 1_000]),
)
@settings(max_examples=80)
def test_one_poison_ends_alone_within_the_bound(
    number: int, place: int, length: int, batch: int
) -> None:
    requests = names(number)
    poison = requests[place % number]
    rig = Rig({poison: length}, batch=batch)
    for one in requests:
        rig.add(one)
    rig.drain()
    assert rig.culprits == [poison]
    assert sorted(rig.finished) == sorted(set(requests) - {poison})
    num_suspects = min(number, batch)
    assert rig.num_deaths <= 3 + math.ceil(math.log2(num_suspects))


@given(
    number=st.integers(1, 64),
    place=st.integers(0, 63),
    step=st.integers(1, 100),
    num_before=st.sampled_from([0, 1, 30, 150]),
    is_timed=st.booleans(),
)
@settings(max_examples=60)
def test_a_poison_that_kills_a_while_after_each_start_ends_alone(
    number: int, place: int, step: int, num_before: int, is_timed: bool
) -> None:
    requests = names(number)
    poison = requests[place % number]
    rig = Rig({}, max_length=10_000)
    for one in requests:
        rig.add(one)
    for _ in range(num_before):
        rig.turn()
    (rig.lethal_times if is_timed else rig.lethal_steps)[poison] = step
    for _ in range(MAX_TURNS):
        if rig.culprits:
            break
        rig.turn()
    assert rig.culprits == [poison]
    assert len(rig.lengths) == number - 1
    assert rig.num_deaths <= 4 + math.ceil(math.log2(number))


@given(
    data=st.data(),
    number=st.integers(1, 60),
    batch=st.sampled_from([3, 16, 1_000]),
)
@settings(max_examples=80)
def test_only_poisons_are_blamed_whatever_their_number_and_arrival(
    data: st.DataObject, number: int, batch: int
) -> None:
    requests = names(number)
    poisons = data.draw(st.dictionaries(st.sampled_from(requests), st.integers(1, 29)))
    rig = Rig(poisons, batch=batch)
    for one in requests:
        for _ in range(data.draw(st.integers(0, 3))):
            rig.turn()
        rig.add(one)
    rig.drain()
    assert sorted(rig.culprits) == sorted(poisons)
    assert sorted(rig.finished) == sorted(set(requests) - set(poisons))
    assert rig.num_deaths <= len(poisons) * (4 + math.ceil(math.log2(number)))


@given(
    poison=st.integers(0, 11),
    ends=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 11)), max_size=11),
    batch=st.sampled_from([3, 1_000]),
)
@settings(max_examples=80)
def test_requests_that_clients_cancel_during_a_search_are_forgotten(
    poison: int, ends: list[tuple[int, int]], batch: int
) -> None:
    requests = names(12)
    rig = Rig({requests[poison]: 5}, batch=batch)
    for one in requests:
        rig.add(one)
    cancelled = set()
    for num_turns, index in ends:
        for _ in range(num_turns):
            rig.turn()
        if rig.lengths.pop(requests[index], None) is not None:
            cancelled.add(requests[index])
            rig.look()
    rig.drain()
    assert set(rig.culprits) == {requests[poison]} - cancelled
    assert set(rig.finished) == set(requests) - {requests[poison]} - cancelled


@given(gaps=st.lists(st.integers(201, 400)), number=st.integers(1, 20))
@settings(max_examples=40)
def test_deaths_with_many_steps_between_end_no_request(gaps: list[int], number: int) -> None:
    rig = Rig({}, max_length=3_000)
    for one in names(number):
        rig.add(one)
    for gap in gaps:
        for _ in range(gap):
            rig.turn()
        rig.turn(is_killed=True)
        assert not rig.suspects.is_searching
    rig.drain()
    assert rig.culprits == []
    assert len(rig.finished) == number


@pytest.mark.parametrize("period", [1, 2, 3, 10, 30])
@pytest.mark.parametrize("number", [1, 2, 7])
def test_ranks_that_die_soon_after_each_start_blame_no_request(number: int, period: int) -> None:
    rig = Rig({}, max_length=10_000)
    for one in names(number):
        rig.add(one)
    for turn in range(60 * period):
        rig.turn(is_killed=turn % period == period - 1)
    assert rig.culprits == []


@pytest.mark.parametrize("number", [4, 20])
def test_a_few_deaths_in_a_row_without_a_step_blame_none_of_many(number: int) -> None:
    rig = Rig({})
    for one in names(number):
        rig.add(one)
    for _ in range(3):
        rig.turn(is_killed=True)
    rig.drain()
    assert rig.culprits == []
    assert len(rig.finished) == number


@given(
    number=st.integers(2, 40),
    first=st.integers(0, 39),
    second=st.integers(0, 39),
)
@settings(max_examples=60)
def test_requests_that_die_only_together_all_finish(number: int, first: int, second: int) -> None:
    requests = names(number)
    pair = {requests[first % number], requests[second % number]}
    if len(pair) == 1:
        pair = set(requests[:2])
    rig = Rig({}, pairs=(frozenset(pair),), max_length=100)
    for one in requests:
        rig.add(one)
    rig.drain()
    assert rig.culprits == []
    assert len(rig.finished) == number
    assert rig.num_deaths <= 2 * (2 + math.ceil(math.log2(number)))


def test_others_wait_while_suspects_are_examined() -> None:
    suspects = CrashSearch()
    for _ in range(2):
        assert suspects.may_run("new")
        suspects.note_death({name: {0: 5} for name in names(4)}, 0)
    assert [suspects.may_run(name) for name in [*names(4), "new"]] == [True] * 2 + [False] * 3


def test_the_end_of_the_examined_continues_the_search() -> None:
    suspects = CrashSearch()
    for _ in range(2):
        suspects.note_death({name: {0: 5} for name in names(2)}, 0)
    assert suspects.note_lengths({"r1": {0: 5}})
    assert [suspects.may_run(name) for name in names(2)] == [False, True]
    assert suspects.note_lengths({})
    assert not suspects.is_searching
    assert suspects.may_run("new")


def test_every_sequence_of_a_request_must_get_beyond_a_death() -> None:
    suspects = CrashSearch()
    suspects.note_death({"a": {0: 5, 1: 7}}, 0)
    suspects.note_lengths({"a": {0: 20, 1: 9}})
    assert suspects.ids
    suspects.note_lengths({"a": {0: 20, 1: 10}})
    assert not suspects.ids


def test_a_sequence_that_has_ended_got_beyond_a_death() -> None:
    suspects = CrashSearch()
    suspects.note_death({"a": {0: 5, 1: 7}}, 0)
    suspects.note_lengths({"a": {1: 9}})
    assert suspects.ids
    suspects.note_lengths({"a": {1: 10}})
    assert not suspects.ids


@pytest.mark.parametrize("ran", [{}, {"r9": {0: 1}}, {"r0": {0: 5}, "r9": {0: 1}}])
def test_a_death_of_others_or_of_idle_ranks_changes_nothing_of_a_search(
    ran: dict[str, dict[int, int]],
) -> None:
    suspects = CrashSearch()
    for _ in range(2):
        suspects.note_death({name: {0: 5} for name in names(4)}, 0)
    for _ in range(3):
        assert not suspects.note_death(ran, 0)
        assert [suspects.may_run(name) for name in [*names(4), "r9"]] == [True] * 2 + [False] * 3
    assert suspects.isolated is None


def test_no_request_is_accused_while_a_step_of_others_is_in_flight() -> None:
    suspects = CrashSearch()
    for _ in range(2):
        suspects.note_death({name: {0: 5} for name in names(2)}, 0)
    for _ in range(2):
        suspects.note_death({"r0": {0: 5}, "r9": {0: 1}}, 0)
        assert suspects.may_run("r0")
    for _ in range(2):
        assert suspects.may_run("r0")
        suspects.note_death({"r0": {0: 5}}, 0)
    assert not suspects.may_run("r0")


def test_only_the_probe_runs_before_a_request_is_a_culprit() -> None:
    suspects = CrashSearch()
    for _ in range(2):
        suspects.note_death({name: {0: 5} for name in names(2)}, 0)
    for _ in range(2):
        suspects.note_death({"r0": {0: 5}}, 0)
    assert suspects.isolated == "r0"
    assert not any(map(suspects.may_run, names(3)))
    assert suspects.confirm_crash() == "r0"
    assert suspects.isolated is None
    assert suspects.may_run("r1")


def test_one_death_by_chance_while_examined_alone_accuses_no_request() -> None:
    suspects = CrashSearch()
    for _ in range(2):
        suspects.note_death({name: {0: 5} for name in names(2)}, 0)
    suspects.note_death({"r0": {0: 5}}, 0)
    assert suspects.isolated is None
    assert [suspects.may_run(name) for name in names(2)] == [True, False]
    suspects.note_lengths({name: {0: 8} for name in names(2)})
    for _ in range(2):
        assert [suspects.may_run(name) for name in names(2)] == [False, True]
        suspects.note_death({"r1": {0: 5}}, 0)
    assert suspects.isolated == "r1"


@pytest.mark.parametrize("number", [2, 8])
def test_three_deaths_of_a_search_do_not_narrow_it(number: int) -> None:
    suspects = CrashSearch()
    running, narrowed = names(number), []
    while not suspects.isolated:
        narrowed.append(suspects.note_death({one: {0: 5} for one in running}, 0))
        running = [one for one in running if suspects.may_run(one)]
    # The two that begin it, and the one that accuses; the first death alone tells more.
    assert narrowed == [False, False, *[True] * round(math.log2(number)), False]


def test_an_accused_request_is_acquitted_if_the_probe_dies_twice() -> None:
    suspects = CrashSearch()
    for _ in range(3):
        suspects.note_death({"r0": {0: 5}}, 10)
    for _ in range(2):
        assert suspects.isolated == "r0"
        suspects.note_death({"probe": {0: 1}}, 10)
    assert suspects.isolated is None
    assert suspects.may_run("r0")
    # The ranks die whatever runs, so that any progress clears a request.
    suspects.note_death({"r0": {0: 15}}, 10)
    suspects.note_lengths({"r0": {0: 18}})
    assert not suspects.ids


def test_the_search_continues_when_the_accused_request_leaves() -> None:
    suspects = CrashSearch()
    for _ in range(2):
        suspects.note_death({name: {0: 5} for name in names(4)}, 0)
    suspects.note_death({name: {0: 5} for name in names(2)}, 0)
    for _ in range(2):
        suspects.note_death({"r0": {0: 5}}, 0)
    assert suspects.isolated == "r0"
    assert suspects.note_lengths({name: {0: 5} for name in names(4)[1:]})
    assert suspects.isolated is None
    assert suspects.is_searching
    assert [suspects.may_run(name) for name in names(4)] == [False, True, True, True]


def test_a_search_that_finds_a_culprit_is_not_in_vain() -> None:
    rig = Rig({"r0": 3}, max_length=100)
    for one in names(3):
        rig.add(one)
    while not rig.culprits:
        rig.turn()
    # The others die together by another cause, and survive one search.
    for _ in range(2):
        rig.turn(is_killed=True)
    while rig.suspects.is_searching:
        rig.turn()
    assert [rig.suspects.may_run(one) for one in ("r1", "r2")] == [True, True]
    rig.drain()


def test_a_death_while_idle_accuses_no_request() -> None:
    suspects = CrashSearch()
    for _ in range(5):
        suspects.note_death({}, 0)
    assert not suspects.ids


def test_an_equal_request_is_rejected_for_ten_minutes() -> None:
    lethal = CrashingRequests()
    assert not lethal
    lethal.note_request("poison", "", 100.0)
    lethal.check("honest", "", 101.0)
    for tenant in ("", "other"):
        with pytest.raises(LethalRequestError):
            lethal.check("poison", tenant, 699.0)
    lethal.check("poison", "", 701.0)
    assert not lethal


def test_tenant_with_many_waits_until_the_first_is_old() -> None:
    lethal = CrashingRequests()
    for number in range(3):
        lethal.check("honest", "bad", float(number))
        lethal.note_request(number, "bad", float(number))
    with pytest.raises(OverloadedError) as caught:
        lethal.check("honest", "bad", 100.0)
    assert caught.value.retry_after_s == 500.0
    lethal.check("honest", "good", 100.0)
    lethal.check("honest", "bad", 601.0)


def test_clients_without_keys_are_not_rejected_for_one_another() -> None:
    lethal = CrashingRequests()
    for number in range(20):
        lethal.note_request(number, "", 0.0)
    lethal.check("honest", "", 1.0)


def test_only_some_are_kept() -> None:
    lethal = CrashingRequests()
    for number in range(1000):
        lethal.note_request(number, "", 0.0)
    lethal.check(0, "", 1.0)
    with pytest.raises(LethalRequestError):
        lethal.check(999, "", 1.0)


def test_deaths_with_steps_between_are_replaced_at_once_for_hours() -> None:
    budget = DeathBudget()
    for number in range(900):
        assert budget.note_death(20.0 * number, ERROR, num_steps=number) == 0.0


def test_many_deaths_in_a_short_time_spend_the_budget() -> None:
    budget = DeathBudget(max_deaths=60, window_s=600.0)
    for second in range(59):
        budget.note_death(float(second), ERROR, num_steps=second)
    with pytest.raises(WorkerError, match=r"60 times in 600 s\. A rank died\.") as caught:
        budget.note_death(599.0, ERROR, num_steps=59)
    assert caught.value.retry_after_s == 10.0


def test_pauses_grow_while_no_step_finishes() -> None:
    budget = DeathBudget()
    pauses = [budget.note_death(0.1, ERROR, num_steps=7) for _ in range(9)]
    assert pauses == [0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    assert budget.note_death(0.2, ERROR, num_steps=8) == 0.0


def test_deaths_without_a_step_end_the_engine_after_a_minute() -> None:
    budget = DeathBudget()
    now_s, num_deaths = 0.0, 0
    error: WorkerError | None = None
    while error is None:
        try:
            now_s += 4.0 + budget.note_death(now_s, ERROR, num_steps=0)
            num_deaths += 1
        except WorkerError as spent:
            error = spent
    assert "without finishing a step" in str(error)
    assert 60.0 <= now_s < 75.0
    assert num_deaths >= 5


def test_an_engine_that_has_run_for_long_may_lose_ranks_for_a_minute() -> None:
    budget = DeathBudget()
    for number in range(12):
        budget.note_death(5000.0 + 5.0 * number, ERROR, num_steps=7)
    with pytest.raises(WorkerError, match="died 13 times in 60 s without finishing a step"):
        budget.note_death(5060.0, ERROR, num_steps=7)


def test_a_slow_start_gets_five_tries() -> None:
    budget = DeathBudget()
    for now_s in (0.0, 30.0, 60.0, 90.0):
        budget.note_death(now_s, ERROR, num_steps=3)
    with pytest.raises(WorkerError):
        budget.note_death(120.0, ERROR, num_steps=3)


def test_deaths_that_narrow_a_search_do_not_count_as_barren() -> None:
    budget = DeathBudget()
    budget.note_death(0.0, ERROR, num_steps=0)
    budget.note_death(15.0, ERROR, num_steps=0)
    for number in range(10):
        now_s = 30.0 + 15.0 * number
        assert budget.note_death(now_s, ERROR, num_steps=0, has_narrowed=True) == 0.0


def test_a_death_that_narrows_a_search_is_followed_by_no_pause() -> None:
    budget = DeathBudget()
    pauses = [budget.note_death(0.1, ERROR, num_steps=7) for _ in range(4)]
    assert pauses[-1] == 2.0
    assert budget.note_death(0.1, ERROR, num_steps=7, has_narrowed=True) == 0.0
