"""Plans that are made before the tokens of the step before are known."""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cluster.scheduling.draft_estimates import DraftRates
from cluster.scheduling.drafters import NgramDrafter
from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.speculation import Speculator
from cluster.simulation.step_cost import LLAMA_8B_H200
from cluster.simulation.virtual_replica import VirtualHead, VirtualReplica, distinct_prompt
from pagedray.batch import StepOutput, pack_token_ids
from pagedray.config import SchedulerConfig, SpeculationConfig
from pagedray.errors import WorkerError
from pagedray.request import FinishReason
from tests.scheduling.drafting import FreeDrafts
from tests.scheduling.harness import Harness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.sequence import Sequence
    from pagedray.batch import StepPlan

CONFIG = SpeculationConfig(num_speculative_tokens=3, method="mtp")
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}  # Any: arguments of any type


class Eager(Speculator):
    """Has a draft head guess three tokens behind each step, and buys all of them."""

    def __init__(self, num_guesses: int = 3) -> None:
        super().__init__(CONFIG)
        self.times = FreeDrafts()
        self.num_guesses = num_guesses

    def plan_head(
        self,
        sampled: AnySequence[Sequence],
        prefilled: Iterable[Sequence],
        *,
        num_running: int,
        room: int,
    ) -> tuple[bool, int]:
        super().plan_head(sampled, prefilled, num_running=num_running, room=room)
        self.is_trying = False
        return True, self.num_guesses if sampled else 0


# Any: options of any type
def decoding(*prompts: list[int], speculator: Speculator | None = None, **options: Any) -> Harness:
    """Return a harness with sequences that decode, and no plan in flight."""
    harness = Harness(speculator=speculator or Eager(), **options)
    for prompt in prompts or ([1, 2],):
        harness.add(prompt, **LONG)
    harness.step()
    return harness


def decodes(plan: StepPlan) -> list[tuple[int, int]]:
    """Return the row and the position of each decode."""
    rows, positions = array("i", plan.decodes.rows), array("i", plan.decodes.positions)
    return list(zip(rows, positions, strict=True))


def receive(harness: Harness, token_ids: list[int], guesses: tuple[int, ...] = (7, 8, 9)) -> None:
    """Apply the output of the oldest plan, of a single sequence, with guesses behind it."""
    step = harness.worker.plans.popleft().step
    draft_ids = pack_token_ids(guesses)
    harness.results.note(harness.scheduler.update(StepOutput(step, token_ids, draft_ids=draft_ids)))


def test_positions_are_too_high_by_the_number_of_wrong_drafts() -> None:
    harness = decoding()
    (sequence,) = harness.sequences
    # The guesses behind the prompt are known: the first plan is not overlapped.
    first = harness.plan()
    assert (first.is_overlapped, len(first.decodes.draft_ids)) == (False, 3 * 4)
    assert decodes(first) == [(0, position) for position in (2, 3, 4, 5)]
    second = harness.plan()
    assert (second.is_overlapped, second.decodes.draft_ids, second.num_drafts) == (True, b"", 3)
    assert decodes(second) == [(0, position) for position in (6, 7, 8, 9)]
    assert harness.schedule() is None
    right = array("i", first.decodes.draft_ids)[0]
    receive(harness, [right, 10, 0, 0])
    assert sequence.token_ids.tolist()[-2:] == [right, 10]
    # One of three drafts is right, so the chain is at positions 4 to 7.
    assert (sequence.num_computed, sequence.num_pending) == (8, 4)
    assert decodes(harness.plan())[0] == (0, 8)
    receive(harness, [7, 8, 5, 0], guesses=(1, 1, 1))
    assert sequence.token_ids.tolist()[-3:] == [7, 8, 5]
    assert sequence.num_pending == 4
    # No guess is right, which the last plan did not know.
    assert decodes(harness.plan())[0] == (0, 8 + 4 - 1)
    receive(harness, [0, 1, 1, 1])
    assert sequence.token_ids.tolist()[-1] == 0
    stats = harness.scheduler.stats().speculation
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (9, 1 + 2)


def test_plans_end_to_overlap_when_the_head_is_not_asked_again() -> None:
    speculator = Eager()
    harness = decoding(speculator=speculator)
    chained = harness.plan()
    speculator.num_guesses = 0
    stopped = harness.plan()
    assert (chained.is_overlapped, stopped.is_overlapped, stopped.num_drafts) == (False, True, 0)
    harness.execute()
    harness.collect()
    # The chain in flight has drafts, but there are no guesses behind it.
    single = harness.plan()
    assert (single.is_overlapped, len(single.decodes), single.num_drafts) == (True, 1, 0)
    harness.execute()
    harness.collect()
    plain = harness.plan()
    assert (plain.is_overlapped, len(plain.decodes)) == (False, 1)
    harness.drain()


def waiting(harness: Harness) -> None:
    harness.add([1, 4], **LONG)


def quarantined(harness: Harness) -> None:
    """Let a request run again that lost its blocks."""
    harness.restrict(())
    harness.restrict(None)


@pytest.mark.parametrize("change", [waiting, quarantined])
def test_sequences_that_wait_start_before_others_continue(
    change: Callable[[Harness], None],
) -> None:
    harness = decoding()
    harness.plan()
    change(harness)
    assert harness.schedule() is None
    harness.settle()
    plan = harness.plan()
    assert plan.starts
    # A prompt may end behind it, so it is not continued.
    assert harness.schedule() is None
    harness.drain()


# Any: options of any type
@pytest.mark.parametrize(
    "options",
    [
        {"state_blocks": 1},
        {"speculator": Speculator(SpeculationConfig(num_speculative_tokens=3))},
    ],
    ids=["states", "n-grams"],
)
def test_other_drafts_wait_for_tokens(options: dict[str, Any]) -> None:
    speculator = options.get("speculator")
    if speculator is not None:
        speculator.times = FreeDrafts()
        speculator.drafter = NgramDrafter(shortest=1, longest=2)
    harness = decoding([1, 2, 1, 2], **options)
    for _ in range(60):
        if not harness.scheduler.has_work:
            break
        harness.turn()
        harness.acknowledge()
    assert any(plan.decodes.draft_ids for plan in harness.plans)
    assert not any(plan.is_overlapped for plan in harness.plans)


def test_masked_tokens_wait_for_tokens() -> None:
    harness = Harness(speculator=Eager(), right=1.0)
    harness.masks.lateness = 0.0
    harness.add([1, 2], is_masked=True, max_tokens=40)
    (sequence,) = harness.sequences
    assert sequence.masks is not None
    first_masked = sequence.masks.start = 20
    harness.drain()
    overlapped = [plan for plan in harness.plans if plan.is_overlapped]
    assert len(overlapped) > 2
    assert all(decodes(plan)[-1][1] + 1 < 2 + first_masked for plan in overlapped)


def test_sequences_that_follow_a_prediction_wait_for_tokens() -> None:
    harness = decoding()
    (sequence,) = harness.sequences
    harness.plan()
    active = sequence.active
    active.request = msgspec.structs.replace(active.request, prediction=pack_token_ids([5]))
    assert harness.schedule() is None


def test_requests_without_drafts_are_in_overlapped_plans() -> None:
    harness = Harness(speculator=Eager(), right=1.0)
    harness.add([1, 2], **LONG)
    harness.add([1, 3], disable_spec_decode=True, **LONG)
    harness.step()
    harness.plan()
    plan = harness.plan()
    assert plan.is_overlapped
    assert Counter(row for row, _ in decodes(plan)) == {0: 4, 1: 1}
    harness.drain()


class Sure(DraftRates):
    """Predicts that all drafts are right."""

    def survivals(self, lead: float, num_drafts: int, num_forced: int = 0) -> list[float]:
        return [1.0] * num_drafts


def without_drafts_right(rates: DraftRates) -> tuple[list[set[int]], list[StepPlan]]:
    """Return the rows of plans behind the prompts, and the plans, of a short and a long answer."""
    speculator = Eager()
    speculator.rates = rates
    harness = Harness(speculator=speculator, right=0.0)
    harness.add([1, 2], max_tokens=6)
    harness.add([1, 3], max_tokens=40)
    harness.turn()
    assert [sequence.state.row for sequence in harness.sequences] == [0, 1]
    harness.drain()
    plans = [plan for plan in harness.plans if not plan.chunks]
    return [{row for row, _ in decodes(plan)} for plan in plans], plans


def test_a_sequence_that_has_probably_ended_sits_out_for_one_plan() -> None:
    rows, _ = without_drafts_right(Sure())
    with_short = [index for index, found in enumerate(rows) if 0 in found]
    assert {later - index for index, later in pairwise(with_short)} == {1, 2}
    assert all(1 in found for found in rows)


def test_positions_may_be_behind_the_end_that_is_not_likely() -> None:
    rates = DraftRates()
    rates._rates = [0.05]
    rows, plans = without_drafts_right(rates)
    with_short = [index for index, found in enumerate(rows) if 0 in found]
    # Five plans give it the tokens behind the first, and no other plan has it.
    assert with_short == list(range(5))
    # It ends with the token at position 7, from the token at position 6.
    positions = [position for plan in plans for row, position in decodes(plan) if row == 0]
    assert max(positions) > 6
    assert all(1 in found for found in rows)


def test_drafts_are_bounded_by_guesses_rows_tokens_and_length() -> None:
    # Any: options of any type
    bounds: list[tuple[dict[str, Any], int]] = [
        ({}, 3),
        ({"max_num_seqs": 3}, 2),
        ({"max_num_batched_tokens": 2}, 1),
    ]
    for options, most in bounds:
        harness = decoding(**options)
        harness.plan()
        plan = harness.plan()
        assert plan.is_overlapped
        assert len(plan.decodes) == 1 + most
    speculator = Eager(num_guesses=1)
    harness = decoding(speculator=speculator)
    harness.plan()
    assert len(harness.plan().decodes) == 2


@pytest.mark.parametrize(("num_free", "rows"), [(2, []), (3, [0]), (4, [0, 1])])
def test_a_sequence_without_a_spare_block_sits_out(num_free: int, rows: list[int]) -> None:
    speculator = Eager(num_guesses=1)
    harness = decoding([1, 2], [1, 3], speculator=speculator, block_size=1)
    # Without guesses behind the chains, there are no blocks for more tokens.
    speculator.num_guesses = 0
    assert len(harness.plan().decodes) == 4
    before = [len(sequence.blocks.ids) for sequence in harness.sequences]
    pool = harness.scheduler._kv.pool
    taken = pool.allocate_all(pool.num_free - num_free)
    plan = harness.scheduler.schedule()
    assert ([] if plan is None else [row for row, _ in decodes(plan)]) == rows
    # Each block is the only spare block, so it is for a token and not for a draft.
    added = [int(row in rows) for row in range(2)]
    after = [len(sequence.blocks.ids) for sequence in harness.sequences]
    assert after == [number + more for number, more in zip(before, added, strict=True)]
    assert len(taken) > 0


@pytest.mark.parametrize("ends", ["abort", "finish", "stop"])
def test_a_sequence_that_ends_is_ignored_in_the_next_step(ends: str) -> None:
    harness = Harness(speculator=Eager())
    request_id = harness.add([1, 2], max_tokens=40, stop_token_ids=(8,))
    harness.step()
    first = harness.plan()
    assert harness.plan().is_overlapped
    right = array("i", first.decodes.draft_ids)[0]
    if ends == "abort":
        harness.abort(request_id)
    elif ends == "finish":
        harness.finish(request_id, 0)
    tokens = [*harness.results.tokens[request_id, 0]]
    receive(harness, [right, 8, 0, 0])
    if ends == "stop":
        assert harness.results.tokens[request_id, 0] == [*tokens, right, 8]
        assert harness.results.reasons[request_id, 0] is FinishReason.STOP
    receive(harness, [7, 8, 9, 0])
    assert len(harness.results.tokens[request_id, 0]) == len(tokens) + 2 * (ends == "stop")
    kv, stats = harness.scheduler._kv, harness.scheduler.stats().speculation
    assert kv.pool.num_free == kv.pool.num_blocks
    assert not harness.scheduler.has_work
    # The drafts of steps without effect are not counted as wrong.
    is_read = ends == "stop"
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (3 * is_read, is_read)
    assert stats.num_dropped == 6 - 3 * is_read


def test_bad_logits_behind_an_end_forget_the_blocks_of_the_sequence() -> None:
    harness = Harness(speculator=Eager(), block_size=1)
    request_id = harness.add([1, 2, 3, 4, 5], **LONG)
    harness.step()
    harness.plan()
    assert harness.plan().is_overlapped
    harness.abort(request_id)
    assert len(harness.scheduler._kv.device) > 0
    receive(harness, [0, 0, 0, 0], guesses=(7, 8, 9))
    receive(harness, [7, -1, 0, 0])
    assert len(harness.scheduler._kv.device) == 0


def test_missing_guesses_are_an_error_of_the_ranks() -> None:
    harness = decoding()
    harness.plan()
    harness.plan()
    receive(harness, [0, 0, 0, 0], guesses=())
    with pytest.raises(WorkerError, match="The guesses of a draft head are missing"):
        receive(harness, [0, 0, 0, 0])


def test_blocks_are_released_behind_the_window_of_the_lowest_position() -> None:
    harness = decoding([1, 2, 3, 4, 5], block_size=1, windows=(2,), num_blocks=60)
    (sequence,) = harness.sequences
    harness.plan()
    harness.plan()
    # If no draft is right, the next query is at position 6, which sees positions 5 and 6.
    assert sequence.num_computed == 5 + 8
    assert sequence.blocks.num_dead == [5]
    harness.drain()


class Predictor:
    """Guesses that tokens are one more than the tokens before."""

    def propose(self, sequence: Sequence, limit: int) -> list[int]:
        last = sequence.token_ids[-1]
        return [last + number for number in range(1, limit + 1)]


class LongGaps(FreeDrafts):
    """Plans that wait for tokens take half as long again."""

    gap_s = 0.5


def predicting(rate: float) -> tuple[Harness, int]:
    """Return a harness with drafts of a predictor, and the last token of its sequence."""
    speculator = Speculator(SpeculationConfig(num_speculative_tokens=3), Predictor())
    speculator.times = LongGaps()
    speculator.rates._rates = [rate]
    harness = decoding(speculator=speculator)
    return harness, harness.sequences[0].token_ids[-1]


def test_drafts_follow_drafts_that_are_likely_right() -> None:
    harness, last = predicting(0.99)
    speculator = harness.scheduler._speculator
    assert speculator is not None
    plan = harness.plan()
    assert array("i", plan.decodes.draft_ids).tolist() == [last + 1, last + 2, last + 3]
    plan = harness.plan()
    assert plan.is_overlapped
    assert decodes(plan) == [(0, position) for position in (6, 7, 8, 9)]
    # The token that is sampled behind the drafts in flight is the next of the prediction.
    assert array("i", plan.decodes.draft_ids).tolist() == [last + 5, last + 6, last + 7]
    receive(harness, [last + 1, last + 2, last + 3, last + 4], guesses=())
    assert harness.plan().is_overlapped
    receive(harness, [last + 5, last + 9, 0, 0], guesses=())
    # Drafts behind a wrong draft say nothing about drafts, but may be right.
    rates = [*speculator.rates._rates]
    receive(harness, [last + 9, 0, 0, 0], guesses=())
    assert speculator.rates._rates == rates
    ids = harness.sequences[0].token_ids.tolist()
    assert ids[-4:] == [last + 5, last + 9, last + 9, 0]
    stats = speculator.stats()
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (9, 3 + 1 + 1)


def test_drafts_wait_for_tokens_if_drafts_in_flight_are_often_wrong() -> None:
    harness, last = predicting(0.6)
    plan = harness.plan()
    assert len(plan.decodes) == 4
    assert harness.schedule() is None
    receive(harness, [last + 1, last + 2, last + 3, last + 4], guesses=())
    assert not harness.plan().is_overlapped


def test_steps_overlap_in_virtual_time() -> None:
    rates = []
    for gap_s in (0.0, 0.01):
        replica = VirtualReplica(
            SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
            KvOptions(block_size=16, num_blocks=200, num_cpu_blocks=0),
            msgspec.structs.replace(LLAMA_8B_H200, gap_s=gap_s),
            max_model_len=1000,
            speculator=Eager(),
            head=VirtualHead(acceptance=0.7),
        )
        calls = [
            replica.submit(
                distinct_prompt(number, 16), num_output_tokens=length, has_limit=has_limit
            )
            for number, (length, has_limit) in enumerate([(300, True), (200, False)])
        ]
        replica.run()
        # The virtual ranks know positions only if they subtract wrong drafts.
        assert [call.num_tokens for call in calls] == [300, 200]
        rates.append(replica.num_generated_tokens / replica.now_s)
    assert rates[1] > 0.9 * rates[0]
