"""Which drafts are guessed and bought, and what the scheduler makes of their tokens."""

from __future__ import annotations

import random
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cluster.scheduling.draft_estimates import RowTimes
from cluster.scheduling.drafters import NgramDrafter, PredictionDrafter
from cluster.scheduling.fault_recovery import BlamedError
from cluster.scheduling.sequence import ForcedTokens, SequenceDrafts, SequenceMasks
from cluster.scheduling.speculation import (
    Chain,
    Speculator,
    _Offer,
)
from pagedray.batch import (
    BlockCopy,
    Decodes,
    SequencePlan,
    StepOutput,
    StepPlan,
    pack_token_ids,
)
from pagedray.config import SpeculationConfig
from pagedray.errors import StartupError
from pagedray.request import FinishReason
from tests.scheduling.drafting import FreeDrafts, GuessingDrafter
from tests.scheduling.harness import Harness

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.drafters import Drafter
    from cluster.scheduling.sequence import Sequence

CONFIG = SpeculationConfig(num_speculative_tokens=4)
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}  # Any: arguments of any type


def sequence_of(token_ids: AnySequence[int]) -> Sequence:
    """Return a sequence with these tokens."""
    harness = Harness(max_model_len=1000, num_blocks=1000)
    harness.add(token_ids)
    return harness.sequences[0]


def longest_match(tokens: list[int], shortest: int, longest: int) -> int | None:
    """Return the end of the last earlier occurrence of the longest n-gram at the end."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                return end
    return None


@pytest.mark.parametrize(("shortest", "longest"), [(2, 4), (1, 3), (3, 3), (1, 8)])
def test_ngrams_are_found_as_by_a_search_of_all_places(shortest: int, longest: int) -> None:
    rng = random.Random(shortest)
    drafter = NgramDrafter(shortest=shortest, longest=longest)
    num_found = 0
    for _ in range(100):
        # Large ids, of which bytes repeat at other offsets.
        choices = rng.choice(([1, 256, 65536], [0, 1, 2], [7, 7 * 257, 7 * 65793]))
        tokens = [rng.choice(choices) for _ in range(rng.randint(1, 40))]
        limit = rng.randint(1, 6)
        end = longest_match(tokens, shortest, longest)
        found = drafter.propose(sequence_of(tokens), limit)
        if end is None:
            assert not found
            continue
        num_found += 1
        repeated = tokens[end:] * limit
        assert list(found) == repeated[:limit]
    assert num_found > 30


class Nothing:
    """Guesses no tokens."""

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        return ()


def predicted(prompt: list[int], prediction: list[int]) -> Sequence:
    """Return a sequence with a prediction."""
    sequence = sequence_of(prompt)
    sequence.own_tokens()
    active = sequence.active
    active.request = msgspec.structs.replace(active.request, prediction=pack_token_ids(prediction))
    sequence.drafts = SequenceDrafts()
    return sequence


def test_a_prediction_is_followed_from_its_beginning() -> None:
    drafter = PredictionDrafter(Nothing())
    prediction = [7, 8, 9, 10, 11, 12]
    sequence = predicted([1, 2], prediction)
    for number, token_id in enumerate(prediction):
        assert list(drafter.propose(sequence, 3)) == prediction[number : number + 3]
        sequence.token_ids.append(token_id)
    assert not drafter.propose(sequence, 3)


@pytest.mark.parametrize("seed", range(5))
def test_a_prediction_is_found_again_after_each_edit(seed: int) -> None:
    rng = random.Random(seed)
    drafter = PredictionDrafter(Nothing())
    prediction = [256 * rng.randrange(100) for _ in range(300)]
    parts = [prediction[:80], prediction[100:200], [5, 6, 7], prediction[200:260], prediction[90:]]
    output = [token_id for part in parts for token_id in part]
    sequence = predicted([1, 2], prediction)
    num_right = 0
    while len(sequence.token_ids) - 2 < len(output):
        place = len(sequence.token_ids) - 2
        # Several tokens may be added at once.
        guesses = list(drafter.propose(sequence, 4))
        right = 0
        while right < len(guesses) and guesses[right : right + 1] == output[place + right :][:1]:
            right += 1
        num_right += right
        sequence.token_ids.extend(output[place : place + right + 1])
    # Around each edit, a few tokens are not guessed.
    assert num_right > 0.75 * len(output)


@pytest.mark.parametrize(("number", "guesses"), [(40, [5]), (80, [])])
def test_a_search_gives_up_among_bytes_that_match_between_tokens(
    number: int, guesses: list[int]
) -> None:
    misleading = [1, 0, 256] * number
    sequence = predicted([1, 2], [*misleading, 0, 0, 5])
    sequence.token_ids.extend([0, 0])
    assert list(PredictionDrafter(Nothing()).propose(sequence, 1)) == guesses
    sequence = sequence_of([0, 0, 5, *misleading, 0, 0])
    assert list(NgramDrafter(shortest=2, longest=2).propose(sequence, 1)) == guesses


def test_tokens_without_a_prediction_are_guessed_by_others() -> None:
    drafter = PredictionDrafter(NgramDrafter(shortest=1, longest=2))
    sequence = predicted([1, 2], [7, 8, 9])
    # The prediction is wrong, so another guess is made.
    sequence.token_ids.extend([3, 1, 2])
    assert list(drafter.propose(sequence, 2)) == [3, 1]
    assert list(drafter.propose(sequence_of([1, 2, 1]), 1)) == [2]


def speculator(times: dict[int, float], rates: list[float] | None = None) -> Speculator:
    """Return a speculator that knows how long steps take, and how well drafts are guessed."""
    made = Speculator(CONFIG, GuessingDrafter(0, right=1.0))
    for num_rows, seconds in times.items():
        for _ in range(3):
            made.times.note(num_rows, seconds)
    if rates is not None:
        made.rates._rates = rates
    return made


def num_bought(made: Speculator, *, num_sequences: int, room: int = 100) -> list[int]:
    """Return the lengths of the chains of so many sequences, in descending order."""

    class Always:
        def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
            return [1] * limit

    made.drafter = Always()
    harness = Harness(max_num_seqs=64, num_blocks=1000)
    for _ in range(num_sequences):
        harness.add([1, 2, 3], **LONG)
    for sequence in harness.sequences:
        made.open_sequence(sequence)
    chains = made.buy_drafts(harness.sequences, num_rows=num_sequences, room=room)
    return sorted((len(chain.draft_ids) for chain in chains), reverse=True)


def test_drafts_are_bought_while_they_make_tokens_cheaper() -> None:
    flat = {1: 0.010, 2: 0.0101, 4: 0.0102, 8: 0.0103, 16: 0.0104}
    steep = {number: 0.005 + 0.005 * number for number in (1, 2, 3, 4, 5, 8, 16)}
    full = {number: 0.005 * number for number in (8, 16, 24, 32, 40)}
    good, bad = [0.9, 0.9, 0.9, 0.9], [0.1, 0.1, 0.1, 0.1]
    assert num_bought(speculator(flat, good), num_sequences=1) == [4]
    assert num_bought(speculator(flat, bad), num_sequences=1) == [2]
    assert num_bought(speculator(steep, good), num_sequences=1) == [3]
    assert num_bought(speculator(steep, bad), num_sequences=1) == []
    # Each row of a full batch costs nearly as much as the token that it computes is worth.
    assert num_bought(speculator(full, good), num_sequences=8) == []
    assert num_bought(speculator(flat, good), num_sequences=4, room=6) == [2, 2, 1, 1]


@pytest.mark.parametrize("seed", range(20))
def test_the_drafts_that_are_bought_give_the_most_tokens_per_second(seed: int) -> None:
    rng = random.Random(seed)
    num_rows, room = rng.randint(1, 12), rng.randint(0, 40)
    row_s = rng.choice((1e-5, 1e-4, 1e-3))
    made = speculator({size: 0.004 + row_s * size for size in (*range(1, 9), *range(16, 65, 8))})
    sequence = sequence_of([1, 2, 3])
    offers = []
    for _ in range(num_rows):
        rates = [rng.choice((1.0, 0.9, 0.5, rng.random())) for _ in range(rng.randint(1, 5))]
        offers.append(_Offer(sequence, [7] * len(rates), 0, list(accumulate(rates, mul))))
    chosen = made._chosen(offers, num_rows=num_rows, room=room)

    def rate(survivals: list[float]) -> float:
        seconds = made.times.time_of(num_rows + len(survivals), is_alone=bool(survivals))
        return (num_rows + sum(survivals)) / seconds

    likeliest = sorted((one for offer in offers for one in offer.survivals), reverse=True)[:room]
    best = max(rate(likeliest[:number]) for number in range(len(likeliest) + 1))
    bought = [
        one
        for offer, number in zip(offers, chosen, strict=True)
        for one in offer.survivals[:number]
    ]
    assert len(bought) <= room
    assert rate(bought) == pytest.approx(best)


def test_the_gap_of_a_step_outweighs_the_drafts_of_a_few_of_many_rows() -> None:
    flat = {8: 0.001, 16: 0.001}
    assert num_bought(speculator(flat, [0.05] * 4), num_sequences=8) == []
    assert num_bought(speculator(flat, [0.9] * 4), num_sequences=8) != []


def note_steps(
    made: Speculator, *, idle_s: float, is_alone: bool = True, **fields: Any
) -> None:  # Any: fields of any type
    """Note many steps of 8 decodes that take a millisecond, and that ranks waited for."""
    plan = StepPlan(0, [], decodes=Decodes.pack(range(8), range(8)), **fields)
    for _ in range(60):
        made.note_step(plan, StepOutput(0, [], forward_s=0.001, idle_s=idle_s), is_alone=is_alone)


def test_drafts_are_bought_if_they_outweigh_the_gap_before_plans_that_wait() -> None:
    made = speculator({8: 0.001, 16: 0.001}, [0.9, 0.5, 0.5, 0.5])
    assert num_bought(made, num_sequences=8, room=8) == [1] * 8
    # Ranks also wait for requests, and for copies of blocks.
    prompt = StepPlan(0, [SequencePlan(0, 0, 3, True)])
    made.note_step(prompt, StepOutput(0, [], forward_s=0.001, idle_s=1.0), is_alone=True)
    note_steps(made, idle_s=1.0, swap_ins=[BlockCopy(0, 1)])
    assert num_bought(made, num_sequences=8, room=8) == [1] * 8
    note_steps(made, idle_s=0.001)
    assert num_bought(made, num_sequences=8, room=8) == []
    # A plan that overlaps with the step before has no gap, but other plans with drafts may have it.
    note_steps(made, idle_s=0.0, is_alone=False, is_overlapped=True)
    assert num_bought(made, num_sequences=8, room=8) == []
    made.has_head = True
    note_steps(made, idle_s=0.0, is_alone=False, is_overlapped=True)
    made.has_head = False
    assert num_bought(made, num_sequences=8, room=8) == [1] * 8


def test_a_gap_is_the_time_that_ranks_wait_longer_than_for_plans_made_ahead() -> None:
    made = speculator({8: 0.001, 16: 0.001}, [0.9] * 4)
    # The controller takes longer than the device.
    note_steps(made, idle_s=0.002, is_alone=False)
    note_steps(made, idle_s=0.003)
    assert made.times.gap_s == pytest.approx(0.001, rel=0.05)
    assert made.times.time_of(8) == pytest.approx(0.003, rel=0.05)
    # A single step may have had to wait for anything.
    made.times.note_idle(10.0, has_gap=True)
    assert made.times.gap_s < 0.0013


def test_a_step_behind_a_gap_waits_for_its_launches() -> None:
    made = speculator({8: 0.001})
    plan = StepPlan(0, [], decodes=Decodes.pack(range(8), range(8)))
    for _ in range(60):
        output = StepOutput(0, [], forward_s=0.0015, idle_s=0.0004)
        made.note_step(plan, output, is_alone=True)
    assert made.times.time_of(8, is_alone=True) == pytest.approx(0.0019)
    assert made.times.time_of(8) == pytest.approx(0.001)


def plan_head(made: Speculator, harness: Harness, *, num_new: int = 0) -> tuple[bool, int]:
    """Plan the head of a step of all sequences, of which the last have just started."""
    sequences = harness.sequences
    new = sequences[len(sequences) - num_new :]
    return made.plan_head(sequences, new, num_running=len(sequences), room=100)


def test_a_head_reads_no_tokens_while_its_guesses_do_not_pay() -> None:
    made = Speculator(SpeculationConfig(num_speculative_tokens=4, method="mtp"))
    harness = Harness()
    for num_rows in (1, 2, 5, 8, 10):
        made.times.note(num_rows, 0.01)

    def add_sequence() -> None:
        harness.add([1, 2, 3], **LONG)
        made.open_sequence(harness.sequences[-1])

    add_sequence()
    assert plan_head(made, harness, num_new=1) == (True, 4)
    made.rates._rates, made.rates._weights = [0.01] * 4, [0.003] * 4
    for _ in range(150):
        plan_head(made, harness)
    assert plan_head(made, harness) == (False, 0)
    # A sequence that starts is read from its first token on, if it has been a while.
    add_sequence()
    assert plan_head(made, harness, num_new=1) == (False, 0)
    for _ in range(2100):
        assert plan_head(made, harness) == (False, 0)
    add_sequence()
    assert plan_head(made, harness, num_new=1) == (True, 0)
    assert plan_head(made, harness) == (True, 4)
    assert made.is_trying
    # The guesses of the last sequence are right; the tokens of the others were not all read.
    drafts = [sequence.drafts for sequence in harness.sequences]
    for sequence, found in zip(harness.sequences, drafts, strict=True):
        assert found is not None
        found.head_ids, found.num_known = [5, 6, 7, 8], len(sequence.token_ids)
        sequence.own_tokens()
        sequence.token_ids.extend([5, 6, 7] if sequence is harness.sequences[-1] else [9])
    for _ in range(7):
        assert plan_head(made, harness) == (True, 0)
    assert made.rates._rates[0] > 0.05
    for sequence in harness.sequences:
        sequence.drafts.num_known = len(sequence.token_ids)  # type: ignore[union-attr]
    chains = made.buy_drafts(harness.sequences, num_rows=3, room=7)
    assert [chain.sequence for chain in chains] == harness.sequences[-1:]


def survivals_of(made: Speculator, sequence: Sequence) -> list[float]:
    """Return how likely the drafts of a sequence are believed to be accepted."""
    assert sequence.drafts is not None
    return made.rates.survivals(sequence.drafts.lead, 4)


def note_drafts(made: Speculator, num_accepted: dict[Sequence, Callable[[], int]]) -> None:
    """Note 200 chains of each sequence with so many accepted drafts of four."""
    for sequence in num_accepted:
        made.open_sequence(sequence)
    for _ in range(200):
        for sequence, draw in num_accepted.items():
            made.note_chain(Chain(sequence, 2, [1] * 4), draw())


def test_rates_follow_the_drafts_of_each_place() -> None:
    made = Speculator(CONFIG)
    first = sequence_of([1, 2, 3])
    note_drafts(made, {first: lambda: 1})
    rates = survivals_of(made, first)
    assert rates[0] > 0.9
    # Nothing is known of drafts behind a wrong draft.
    assert max(rates[1:]) < 0.1
    stats = made.stats()
    assert (stats.num_chains, stats.num_draft_tokens) == (200, 800)
    assert stats.num_accepted_at == (200, 0, 0, 0)
    assert (stats.num_accepted_tokens, stats.num_refused_tokens) == (200, 600)


def test_rates_differ_between_sequences_only_as_far_as_their_drafts_do() -> None:
    made = Speculator(CONFIG)
    good, bad = sequence_of([1, 2, 3]), sequence_of([1, 2, 3])
    note_drafts(made, {good: lambda: 4, bad: lambda: 0})
    assert survivals_of(made, good)[3] > 0.7
    assert survivals_of(made, bad)[0] < 0.1
    made, rng = Speculator(CONFIG), random.Random(0)
    alike = [sequence_of([1, 2, 3]) for _ in range(8)]
    note_drafts(made, dict.fromkeys(alike, lambda: int(rng.random() < 0.5)))
    rates = [survivals_of(made, sequence)[0] for sequence in alike]
    assert max(rates) - min(rates) < 0.1
    assert sum(rates) / 8 == pytest.approx(0.5, abs=0.1)


def test_times_of_sizes_that_were_not_measured_lie_between_those_that_were() -> None:
    times = RowTimes()
    assert times.time_of(5) == pytest.approx(1.0, rel=0.05)
    for num_rows, seconds in (*[(4, 0.010)] * 3, *[(16, 0.022)] * 80):
        times.note(num_rows, seconds)
    assert times.time_of(4) == pytest.approx(0.010, rel=0.02)
    # Sizes in between are assumed to be fast, so that they are tried.
    assert 0.010 < times.time_of(8) < 0.014
    # Graphs have sizes that are multiples of 8.
    assert times.time_of(9) == times.time_of(16) == pytest.approx(0.022)
    # So are sizes beyond.
    assert times.time_of(1) == pytest.approx(0.0025, rel=0.02)
    assert 0.022 < times.time_of(24) < 0.024
    # The first step of a size may be much slower than others.
    times.note(8, 9.0)
    assert times.time_of(8) < 0.03
    for _ in range(30):
        times.note(8, 0.015)
    assert times.time_of(8) == pytest.approx(0.015, rel=0.01)
    # One slow step does not say that steps of this size are slow.
    times.note(16, 5.0)
    assert times.time_of(16) < 0.03


def test_single_slow_steps_change_no_times() -> None:
    times = RowTimes()
    for num_rows in (8, 32, 96):
        # The first step captures a graph.
        for seconds in (0.011, 0.004, 0.004):
            times.note(num_rows, seconds + num_rows * 1e-5)
    for _ in range(20):
        times.note(96, 0.02)
        for _ in range(20):
            times.note(32, 0.00432)
    assert times.time_of(8) == pytest.approx(0.00408, rel=0.02)
    assert times.time_of(32) == pytest.approx(0.00432, rel=0.02)
    assert times.time_of(96) < 0.0062


def test_steps_that_never_ran_ahead_are_as_slow_as_behind_gaps() -> None:
    times = RowTimes(0.0)
    for num_rows, seconds in ((32, 0.0055), (96, 0.0065)):
        for _ in range(3):
            times.note(num_rows, seconds, is_alone=True)
    assert times.time_of(96) == pytest.approx(0.0065)
    times.note(96, 0.005)
    assert times.time_of(96) == pytest.approx(0.005)
    assert times.time_of(96, is_alone=True) == pytest.approx(0.0065)
    # Contexts grow alike for both.
    for _ in range(3):
        times.note(32, 0.004)
    for step in range(200):
        times.note(32, 0.004 * (1 + step / 1000))
    assert times.time_of(96, is_alone=True) > 0.0072


def test_times_follow_contexts_that_grow() -> None:
    times = RowTimes()

    def seconds(num_rows: int, step: int) -> float:
        return 0.004 + num_rows * (1e-5 + 1e-7 * step)

    for num_rows in (64, 128) * 3:
        times.note(num_rows, seconds(num_rows, 0))
    for step in range(400):
        times.note(128, seconds(128, step))
    # The time of 64 rows has not been measured since.
    assert seconds(64, 400) > 1.5 * seconds(64, 0)
    assert times.time_of(64) == pytest.approx(seconds(64, 400), rel=0.05)
    assert times.time_of(128) == pytest.approx(seconds(128, 400), rel=0.01)


def test_sequences_run_ahead_unless_drafts_are_likely_right() -> None:
    harness = Harness(num_drafts=3, right=1.0)
    harness.add([1, 2, 1, 2], **LONG)
    made = harness.scheduler._speculator
    assert made is not None
    made.drafter = NgramDrafter(shortest=3, longest=4)
    harness.plan()
    # Nothing repeats yet, so the next plan does not wait for tokens.
    assert len(harness.plan().decodes) == 1
    harness.settle()
    made.drafter = GuessingDrafter(1, right=1.0)
    while not harness.plan().decodes.draft_ids:
        harness.settle()
    # The number of tokens is not known, so there is no plan before the output.
    assert harness.schedule() is None
    harness.drain()


def test_drafts_follow_a_guess_if_it_is_not_worth_waiting_for_its_token() -> None:
    made = Speculator(CONFIG, GuessingDrafter(1, right=1.0))
    harness = Harness(speculator=made)
    for num_rows in (1, 8):
        for _ in range(3):
            made.times.note(num_rows, 0.01)
    made.times._gap_s, made.rates._rates = 0.1, [0.8]
    harness.add([1, 2], **LONG)
    harness.plan()
    # The token of the plan in flight is not known.
    while not harness.plan().decodes.draft_ids:
        harness.execute()
        harness.collect()
    assert len(harness.worker.plans) == 2
    harness.drain()


def test_a_sequence_may_end_while_its_next_token_is_planned() -> None:
    made = Speculator(CONFIG)
    harness = Harness(speculator=made)
    made.times.note(4, 0.01)
    request_id = harness.add([1, 2, 3], **LONG)
    harness.plan()
    harness.execute()
    harness.collect()
    harness.plan()
    harness.finish(request_id, 0)
    # No sequence is running, but a plan is in flight.
    assert harness.schedule() is None
    harness.drain()


def test_a_defect_of_a_drafter_ends_only_its_request() -> None:
    harness = Harness(num_drafts=3, right=1.0)
    harness.add([1, 2], **LONG)
    harness.add([1, 3], **LONG)
    made = harness.scheduler._speculator
    assert made is not None
    drafter = made.drafter

    class Failing:
        def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
            if sequence.request_id == "request-0" and len(sequence.token_ids) > 9:
                raise ZeroDivisionError
            return drafter.propose(sequence, limit)

    made.drafter = Failing()
    with pytest.raises(BlamedError) as caught:
        harness.drain()
    assert caught.value.sequence is harness.sequences[0]


def test_requests_may_disable_drafts() -> None:
    harness = Harness(num_drafts=3, right=1.0)
    harness.add([1, 2], **LONG)
    harness.add([1, 3], disable_spec_decode=True, **LONG)
    harness.drain()
    stats = harness.scheduler.stats().speculation
    assert [one.drafts is None for one in harness.sequences] == [False, True]
    # Both sequences have 40 tokens, of which the first got several in most steps.
    assert len(harness.plans) >= 40
    assert stats.num_accepted_tokens > 20


def chained(harness: Harness, *drafts: int) -> StepOutput:
    """Plan a chain with these drafts, of the only sequence, and return the worker's output."""

    class Fixed:
        def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
            return drafts[:limit]

    made = harness.scheduler._speculator
    assert made is not None
    harness.settle()
    made.drafter = Fixed()
    plan = harness.plan()
    assert len(plan.decodes) == len(drafts) + 1
    harness.execute()
    return harness.worker.outputs.popleft()


# Any: options of any type
def started(prompt: AnySequence[int] = (1, 2, 4), **options: Any) -> Harness:
    """Return a harness with a sequence of a prompt and one token."""
    harness = Harness(num_drafts=4, max_model_len=50)
    harness.add(prompt, **{**LONG, **options})
    harness.step()
    return harness


def test_tokens_up_to_the_first_wrong_draft_are_one_event() -> None:
    harness = started()
    share = harness.sequences[0].share
    time = share.time
    output = chained(harness, 5, 6, 7, 8)
    output = StepOutput(output.step, [5, 6, 9, 8, 1])
    (event,) = harness.scheduler.update(output)
    assert event.token_ids == (5, 6, 9)
    assert event.finish_reason is None
    # A tenant pays for the tokens that it receives.
    assert share.time - time == 3.0
    assert harness.sequences[0].num_pending == 0


def test_a_sequence_ends_inside_a_chain() -> None:
    harness = started(stop_token_ids=(6,))
    output = chained(harness, 5, 6, 7, 8)
    (event,) = harness.scheduler.update(StepOutput(output.step, [5, 6, 7, 8, 1]))
    assert event.token_ids == (5, 6)
    assert (event.finish_reason, event.stop_token_id) == (FinishReason.STOP, 6)
    assert harness.scheduler._kv.pool.num_free == harness.scheduler._kv.pool.num_blocks


def test_logits_that_are_not_finite_count_only_behind_right_drafts() -> None:
    harness = started()
    output = chained(harness, 5, 6, 7)
    (event,) = harness.scheduler.update(StepOutput(output.step, [9, -1, -1, -1]))
    assert (event.token_ids, event.finish_reason) == ((9,), None)
    harness = started()
    output = chained(harness, 5, 6, 7)
    kept, end = harness.scheduler.update(StepOutput(output.step, [5, -1, 8, 9]))
    assert (kept.token_ids, kept.finish_reason) == ((5,), None)
    assert (end.token_ids, end.finish_reason) == ((), FinishReason.ERROR)
    assert harness.scheduler.num_nonfinite_sequences == 1


def test_blocks_of_an_aborted_sequence_with_bad_logits_are_forgotten() -> None:
    harness = started(prompt=[1, 2, 4] * 3)
    output = chained(harness, 5, 6)
    assert len(harness.scheduler._kv.device) > 0
    (event,) = harness.scheduler.abort_request("request-0")
    assert event.finish_reason is FinishReason.ABORT
    assert harness.scheduler.update(StepOutput(output.step, [5, -1, 3])) == []
    assert len(harness.scheduler._kv.device) == 0


def test_chains_end_at_the_maximum_length() -> None:
    harness = started(max_tokens=4)
    output = chained(harness, 5, 6)
    (event,) = harness.scheduler.update(StepOutput(output.step, [5, 6, 7]))
    assert event.token_ids == (5, 6, 7)
    assert event.finish_reason is FinishReason.LENGTH


def test_drafts_leave_a_block_for_each_running_sequence() -> None:
    harness = Harness(num_drafts=8, block_size=1, num_blocks=12, max_model_len=12, right=1.0)
    harness.add([1, 2], max_tokens=8)
    harness.add([1, 3], max_tokens=8)
    most = 0
    while harness.scheduler.has_work:
        plan = harness.schedule()
        if plan is not None and plan.decodes.draft_ids:
            most = max(most, len(plan.decodes.draft_ids) // 4)
            assert harness.scheduler._kv.pool.num_free >= 2
        harness.settle()
    assert most > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens must be 1 or more, not 0"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min must be 1 or more, not 0"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_max must be at least prompt_lookup_min, 5"),
    ],
)
# Any: fields of any type
def test_wrong_configurations_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        SpeculationConfig(**{"num_speculative_tokens": 3, **fields})


class Constant:
    """Guesses the same tokens."""

    def __init__(self, *draft_ids: int) -> None:
        self._draft_ids = draft_ids

    def propose(self, sequence: Sequence, limit: int) -> AnySequence[int]:
        return self._draft_ids[:limit]


def forcing(
    *forced_ids: int, drafter: Drafter | None = None, place: int = 3
) -> tuple[Speculator, Sequence, SequenceMasks]:
    """Return a speculator, and a sequence of which a grammar forces the fourth token and others."""
    made = Speculator(CONFIG, drafter or Constant())
    made.times = FreeDrafts()
    sequence = sequence_of([1, 2, 3])
    sequence.own_tokens()
    sequence.masks = SequenceMasks(0)
    sequence.masks.forced = ForcedTokens(place, [*forced_ids])
    made.open_sequence(sequence)
    return made, sequence, sequence.masks


def bought(made: Speculator, sequence: Sequence) -> tuple[list[int], int]:
    """Return the drafts that are bought, and how many of them a grammar forces."""
    for chain in made.buy_drafts([sequence], num_rows=1, room=10):
        return [*chain.draft_ids], chain.num_forced
    return [], 0


def test_tokens_that_a_grammar_forces_are_guessed_as_long_as_they_are_right() -> None:
    made, sequence, masks = forcing(7, 8, 9)
    assert bought(made, sequence) == ([7, 8, 9], 3)
    sequence.token_ids.append(7)
    assert bought(made, sequence) == ([8, 9], 2)
    # A shorter token of the same text.
    sequence.token_ids.append(5)
    assert bought(made, sequence) == ([], 0)
    masks.forced = ForcedTokens(6, [7])
    assert bought(made, sequence) == ([], 0)


def test_forced_tokens_are_guessed_although_other_guesses_pause() -> None:
    made, sequence, masks = forcing(7, 8)
    assert sequence.drafts is not None
    sequence.drafts.paused_until = 100
    assert bought(made, sequence) == ([7, 8], 2)
    # The masks behind them would be late.
    masks.num_deferred = 1
    assert bought(made, sequence) == ([], 0)


def test_other_guesses_may_continue_forced_tokens_but_not_contradict_them() -> None:
    made, sequence, _ = forcing(7, 8, drafter=Constant(7, 8, 1, 2, 3))
    assert bought(made, sequence) == ([7, 8, 1, 2], 2)
    made, sequence, _ = forcing(7, 8, drafter=Constant(7, 1, 1))
    assert bought(made, sequence) == ([7, 8], 2)
    made, sequence, _ = forcing(7, 8, drafter=Constant(7))
    assert bought(made, sequence) == ([7, 8], 2)


def test_forced_tokens_have_a_rate_of_their_own() -> None:
    made, sequence, _ = forcing(7, 8)
    others = made.rates.survivals(0.0, 3)
    for _ in range(300):
        made.note_chain(Chain(sequence, 2, [7, 8], num_forced=2), 0)
    # They are tried again from time to time.
    assert made.rates.survivals(0.0, 2, 2) == pytest.approx([0.3, 0.09])
    assert made.rates.survivals(0.0, 3) == others
    for _ in range(300):
        made.note_chain(Chain(sequence, 2, [7, 8, 1], num_forced=2), 2)
    assert made.rates.survivals(0.0, 2, 2)[1] > 0.95
    assert made.rates.survivals(0.0, 1)[0] < others[0]


def test_a_plan_waits_for_a_token_before_forced_tokens() -> None:
    made, sequence, _ = forcing(7, 8, 9)
    sequence.is_prefill, sequence.num_computed = False, 3
    assert sequence.num_pending == 1
    assert made.is_worth_waiting([sequence], room=4)
    made, sequence, _ = forcing(7)
    sequence.is_prefill, sequence.num_computed = False, 3
    assert not made.is_worth_waiting([sequence], room=4)
