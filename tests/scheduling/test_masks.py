"""Masked sequences of a step, masks that are late or costly, and sequences that end meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from cluster.scheduling.scheduler import Scheduler
from cluster.scheduling.speculation import Speculator
from pagedray.batch import SequencePlan, StepOutput
from pagedray.config import SpeculationConfig
from pagedray.request import AskedMasks, FinishReason, Grammar, Request
from tests.scheduling.builders import make_request, make_scheduler, plan_of
from tests.scheduling.drafting import FreeDrafts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.scheduling.event import TokenEvent
    from cluster.scheduling.masked_step import MadeMasks
    from cluster.scheduling.sequence import Sequence as ScheduledSequence
    from pagedray.batch import StepMasks, StepPlan


EVERYTHING = b"\xff" * 4


class PlainMatcher:
    """A matcher that knows only why it failed."""

    error = "its mask took 0.60 s"
    is_costly = False
    is_free = False
    forced_ids = ()


class LastTokenGrammar:
    """Allows only the token that equals the number of tokens so far, and none after three."""

    num_mask_bytes = 4

    def __init__(self, end: FinishReason = FinishReason.STOP) -> None:
        self.num_awaited: list[int] = []
        """Of each call."""
        self._end = end

    def matcher(self, request: Request) -> PlainMatcher:
        return PlainMatcher()

    def masks(
        self,
        asked: Sequence[AskedMasks],
        *,
        num_awaited: int,
        wait_s: float,
    ) -> list[bytes | FinishReason | None]:
        self.num_awaited.append(num_awaited)
        return [
            self._end if len(token_ids) > 3 else (1 << len(token_ids)).to_bytes(4, "little")
            for _, token_ids, *_ in asked
        ]


def request(name: str, grammar: Grammar | None, **fields: Any) -> Request:
    return make_request(name, (5,), grammar=grammar, **{"max_tokens": 9, **fields})


def scheduler() -> Scheduler:
    return make_scheduler(num_blocks=32, max_model_len=32, enable_prefix_cache=False)


def make_masks(one: Scheduler) -> MadeMasks:
    masked = one.masked_step()
    assert masked is not None
    return masked.make_masks(0.0)


def run_step(one: Scheduler, token_id: int) -> None:
    plan = plan_of(one)
    one.update(StepOutput(plan.step, [token_id] * len(plan.sequences)))
    one.acknowledge(plan.step)


def test_only_sequences_with_a_grammar_get_masks_in_the_order_of_the_plan() -> None:
    one, grammar = scheduler(), LastTokenGrammar()
    for name, given in (("a", None), ("b", grammar), ("c", None), ("d", grammar)):
        one.add_request(request(name, given))
    plan = plan_of(one)
    assert [start.mask_start for start in plan.starts] == [None, 0, None, 0]
    made = make_masks(one)
    assert made.masks is not None
    assert made.masks.step == plan.step
    assert made.masks.words == (1 << 1).to_bytes(4, "little") * 2
    assert [*made.ends, *made.late, *made.deferred] == []
    # A single call for all of them.
    assert grammar.num_awaited == [2]


def test_without_a_grammar_nothing_is_masked() -> None:
    one = scheduler()
    one.add_request(request("a", None))
    one.schedule()
    assert one.masked_step() is None


class FreeingGrammar(LastTokenGrammar):
    """Allows every token from its first mask on."""

    def matcher(self, request: Request) -> PlainMatcher:
        matcher = PlainMatcher()
        matcher.is_free = True
        return matcher


def test_a_budget_masks_no_token_before_it_and_none_once_all_are_allowed() -> None:
    one, grammar = scheduler(), FreeingGrammar()
    one.add_request(request("a", grammar, thinking_token_budget=2))
    for token_id in (7, 8):
        plan = plan_of(one)
        assert [start.mask_start for start in plan.starts] in ([2], [])
        assert one.masked_step() is None
        one.update(StepOutput(plan.step, [token_id]))
    plan = plan_of(one)
    made = make_masks(one)
    assert made.masks is not None
    assert (made.masks.step, list(made.masks.released)) == (plan.step, [0])
    one.update(StepOutput(plan.step, [9]))
    for token_id in (10, 11):
        run_step(one, token_id)
        assert one.masked_step() is None
    assert grammar.num_awaited == [1]


def test_a_sequence_that_starts_again_needs_no_mask_once_all_tokens_are_allowed() -> None:
    one = scheduler()
    one.add_request(request("a", FreeingGrammar(), thinking_token_budget=1))
    run_step(one, 7)
    one.schedule()
    assert make_masks(one).masks is not None
    # The ranks are replaced.
    one.reset()
    plan = plan_of(one)
    assert [start.mask_start for start in plan.starts] == [None]
    assert one.masked_step() is None


def test_the_masks_of_a_plan_are_those_of_the_tokens_that_it_samples() -> None:
    one, grammar = scheduler(), LastTokenGrammar()
    one.add_request(request("a", grammar, thinking_token_budget=1))
    one.add_request(request("b", grammar, thinking_token_budget=1))
    first, second = one.schedule(), one.schedule()
    assert first is not None
    assert second is not None
    # Its first token is discarded, so that less of its tokens are known than the plan assumes.
    one.abort_request("a")
    one.update(StepOutput(first.step, [7, 8]))
    made = make_masks(one)
    assert made.masks is not None
    assert made.masks.step == second.step
    assert made.masks.words == EVERYTHING + (1 << 2).to_bytes(4, "little")


def test_sequence_that_has_ended_gets_no_mask_and_may_sample_anything() -> None:
    one, grammar = scheduler(), LastTokenGrammar()
    for name in ("a", "b"):
        one.add_request(request(name, grammar))
    one.schedule()
    masked = one.masked_step()
    assert masked is not None
    one.abort_request("a")
    made = masked.make_masks(0.0)
    assert made.masks is not None
    assert made.masks.words == EVERYTHING + (1 << 1).to_bytes(4, "little")
    assert made.ends == []


@pytest.mark.parametrize(
    ("end", "error"), [(FinishReason.STOP, ""), (FinishReason.ERROR, PlainMatcher.error)]
)
def test_a_sequence_without_allowed_tokens_ends_without_a_token(
    end: FinishReason, error: str
) -> None:
    one, grammar = scheduler(), LastTokenGrammar(end)
    one.add_request(request("a", grammar))
    for token_id in (1, 2, 3):
        run_step(one, token_id)
    one.schedule()
    made = make_masks(one)
    assert made.masks is not None
    assert made.masks.words == EVERYTHING
    (event,) = one.apply_masks(made)
    assert (event.token_ids, event.finish_reason, event.error) == ((), end, error)
    assert one.apply_masks(made) == []


ALLOWED = b"\xff" * 4
NOTHING = b"\x00" * 4
_SLOW_ROW = 0
"""Of the sequence that follows a grammar."""


class SlowGrammar:
    """A grammar that allows everything, and one matcher of it."""

    num_mask_bytes = 4
    forced_ids = ()
    error = ""

    def __init__(self) -> None:
        self.is_late = False
        """Whether masks are not made yet."""
        self.is_costly = False
        self.is_free = False
        self.end: FinishReason | None = None
        """What masks are in place of a mask."""
        self.num_awaited: list[int] = []
        """Of each call."""

    def matcher(self, request: Request) -> SlowGrammar:
        return self

    def masks(
        self,
        asked: Sequence[AskedMasks],
        *,
        num_awaited: int,
        wait_s: float,
    ) -> list[bytes | FinishReason | None]:
        self.num_awaited.append(num_awaited)
        return [None if self.is_late else self.end or ALLOWED] * len(asked)


class Steps:
    """A scheduler with one sequence that follows a grammar, and its steps."""

    def __init__(self, *, has_other: bool) -> None:
        self.grammar = SlowGrammar()
        self.scheduler = make_scheduler()
        self.add("slow", self.grammar)
        if has_other:
            self.add("other", None)

    def plan(self) -> tuple[StepPlan | None, StepMasks | None, list[TokenEvent]]:
        """Make a plan and its masks."""
        plan = self.scheduler.schedule()
        masked = self.scheduler.masked_step()
        if masked is None:
            return plan, None, []
        made = masked.make_masks(1.0)
        return plan, made.masks, self.scheduler.apply_masks(made)

    def run(self) -> list[str]:
        """Run a step without another in flight; return whose tokens it sampled, slow ones first."""
        plan, masks, _ = self.plan()
        if plan is None:
            return []
        num_sampled = plan.num_sampled
        token_ids = [7] * num_sampled
        if masks is not None and masks.words == NOTHING:
            rows = [sequence.row for sequence in plan.sequences]
            token_ids[rows.index(_SLOW_ROW)] = -1
        events = self.scheduler.update(StepOutput(plan.step, token_ids))
        self.scheduler.acknowledge(plan.step)
        assert self.scheduler.num_nonfinite_sequences == 0
        return sorted((event.request_id for event in events), reverse=True)

    def add(self, name: str, grammar: SlowGrammar | None, *token_ids: int) -> None:
        """Add a request, whose prompt has a full block and these tokens."""
        prompt = (5, 6, 7, 8, *token_ids)
        self.scheduler.add_request(
            make_request(name, prompt, max_tokens=100, ignore_eos=True, grammar=grammar)
        )


def test_steps_run_without_a_sequence_whose_mask_is_late() -> None:
    steps = Steps(has_other=True)
    steps.grammar.is_late = True
    assert [steps.run() for _ in range(5)] == [["other"]] * 5
    # The first step waits for its mask.
    assert steps.grammar.num_awaited == [1, 0, 0, 0, 0]


def test_a_late_sequence_continues_once_its_mask_is_made() -> None:
    steps = Steps(has_other=True)
    steps.grammar.is_late = True
    steps.run()
    steps.grammar.is_late = False
    # Asked for with this step, its mask is used by the next.
    assert steps.run() == ["other"]
    plan, masks, _ = steps.plan()
    assert plan is not None
    # The last token of its prompt is computed again, in the blocks that it has.
    assert SequencePlan(_SLOW_ROW, 3, 1, True) in plan.sequences
    assert masks is not None
    assert masks.words == ALLOWED
    assert steps.scheduler.update(StepOutput(plan.step, [7, 7]))[0].token_ids == (7,)


def test_a_late_sequence_alone_is_not_planned_before_its_mask_is_made() -> None:
    steps = Steps(has_other=False)
    steps.grammar.is_late = True
    assert [steps.run() for _ in range(4)] == [[]] * 4
    assert steps.scheduler.has_work
    steps.grammar.is_late = False
    assert [steps.run(), steps.run()] == [[], ["slow"]]


def test_a_block_that_is_computed_again_is_not_shared_before() -> None:
    steps = Steps(has_other=False)
    steps.grammar.is_late = True
    steps.run()
    # Its prompt begins with that of the late sequence, whose last token will be written again.
    steps.add("same", None, 9)
    plan, _, _ = steps.plan()
    assert plan is not None
    assert [one.first_position for one in plan.sequences] == [0]


def test_a_block_that_was_computed_again_is_shared() -> None:
    steps = Steps(has_other=False)
    steps.grammar.is_late = True
    steps.run()
    steps.grammar.is_late = False
    assert [steps.run(), steps.run()] == [[], ["slow"]]
    steps.add("same", None, 9)
    plan, _, _ = steps.plan()
    assert plan is not None
    assert 4 in [one.first_position for one in plan.sequences]


def test_a_sequence_that_ends_while_its_mask_is_late_ends_once() -> None:
    steps = Steps(has_other=True)
    steps.grammar.is_late = True
    plan, _, _ = steps.plan()
    assert plan is not None
    (ended,) = steps.scheduler.abort_request("slow")
    assert ended.finish_reason is FinishReason.ABORT
    (event,) = steps.scheduler.update(StepOutput(plan.step, [-1, 7]))
    assert event.request_id == "other"
    steps.scheduler.acknowledge(plan.step)
    # Nor is it requested anymore.
    num_calls = len(steps.grammar.num_awaited)
    assert steps.run() == ["other"]
    assert len(steps.grammar.num_awaited) == num_calls


def test_a_sequence_that_is_aborted_while_its_masks_are_made_is_no_longer_late() -> None:
    steps = Steps(has_other=False)
    steps.grammar.is_late = True
    plan, masked = steps.scheduler.schedule(), steps.scheduler.masked_step()
    assert plan is not None
    assert masked is not None
    made = masked.make_masks(1.0)
    (ended,) = steps.scheduler.abort_request("slow")
    assert ended.finish_reason is FinishReason.ABORT
    assert steps.scheduler.apply_masks(made) == []
    assert steps.scheduler.update(StepOutput(plan.step, [-1])) == []
    steps.scheduler.acknowledge(plan.step)
    assert not steps.scheduler.has_work
    assert steps.scheduler.stats().num_free_blocks == 64


def test_a_sequence_that_is_quarantined_while_its_mask_is_late_starts_again() -> None:
    steps = Steps(has_other=True)
    steps.grammar.is_late = True
    plan, masked = steps.scheduler.schedule(), steps.scheduler.masked_step()
    assert plan is not None
    assert masked is not None
    made = masked.make_masks(1.0)
    steps.scheduler.restrict_requests(lambda request_id: request_id == "other")
    steps.scheduler.apply_masks(made)
    steps.scheduler.update(StepOutput(plan.step, [-1, 7]))
    steps.scheduler.acknowledge(plan.step)
    steps.grammar.is_late = False
    steps.scheduler.restrict_requests(lambda request_id: True)
    plan = plan_of(steps.scheduler)
    assert [(one.num_tokens, one.is_sampled) for one in plan.chunks] == [(4, True)]


def test_a_late_mask_may_be_the_end_of_its_sequence() -> None:
    steps = Steps(has_other=True)
    steps.grammar.is_late = True
    steps.run()
    steps.grammar.is_late, steps.grammar.end = False, FinishReason.STOP
    _, _, events = steps.plan()
    assert [(event.request_id, event.finish_reason) for event in events] == [
        ("slow", FinishReason.STOP)
    ]


def test_no_step_waits_for_the_masks_of_a_sequence_after_a_costly_one() -> None:
    steps = Steps(has_other=True)
    steps.grammar.is_costly = True
    assert steps.run() == ["slow", "other"]
    sampled = [steps.run() for _ in range(20)]
    # Its token of every second step, since the mask is made beside the other one.
    assert sampled == [["other"], ["slow", "other"]] * 10
    # Only a mask that is made is awaited.
    assert steps.grammar.num_awaited == [1] + [0, 1] * 10


def test_steps_wait_for_masks_again_after_some_that_were_not_costly() -> None:
    steps = Steps(has_other=True)
    steps.grammar.is_late = True
    steps.run()
    steps.grammar.is_late = False
    sampled = [steps.run() for _ in range(40)]
    assert sampled[:16] == [["other"], ["slow", "other"]] * 8
    assert sampled[17:] == [["slow", "other"]] * 23


def test_no_token_is_deferred_once_all_tokens_are_allowed() -> None:
    steps = Steps(has_other=True)
    steps.grammar.is_costly = True
    assert steps.run() == ["slow", "other"]
    steps.grammar.is_free = True
    assert [steps.run() for _ in range(4)] == [["other"]] + [["slow", "other"]] * 3


class ChainGrammar:
    """Makes the masks that a test says, and remembers what was asked."""

    num_mask_bytes = 4
    error = ""
    is_costly = False
    is_free = False
    forced_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.num_masks: int | None = 1
        """The number of masks that are made; None if the first is late."""
        self.asked: list[AskedMasks] = []

    def matcher(self, request: Request) -> ChainGrammar:
        return self

    def masks(
        self, asked: Sequence[AskedMasks], *, num_awaited: int, wait_s: float
    ) -> list[bytes | FinishReason | None]:
        self.asked += asked
        if self.num_masks is None:
            return [None] * len(asked)
        return [b"".join(bytes([number + 1]) * 4 for number in range(self.num_masks))] * len(asked)


class Fixed:
    """Guesses the same tokens."""

    def __init__(self, *draft_ids: int) -> None:
        self._draft_ids = draft_ids

    def propose(self, sequence: ScheduledSequence, limit: int) -> Sequence[int]:
        return self._draft_ids[:limit]


def chained(grammar: Grammar, *drafts: int, **fields: Any) -> tuple[Scheduler, StepPlan]:
    """Return a scheduler with a chain of these drafts in flight, behind a first token."""
    config = SpeculationConfig(num_speculative_tokens=max(len(drafts), 1))
    speculator = Speculator(config, Fixed(*drafts))
    speculator.times = FreeDrafts()
    one = make_scheduler(max_model_len=40, speculator=speculator)
    one.add_request(request("a", grammar, ignore_eos=True, **{"max_tokens": 20, **fields}))
    plan = plan_of(one)
    if one.masked_step() is not None:
        make_masks(one)
    one.update(StepOutput(plan.step, [7]))
    one.acknowledge(plan.step)
    plan = plan_of(one)
    assert len(plan.decodes) == len(drafts) + 1
    return one, plan


def numbers_of(made: MadeMasks) -> list[int]:
    """Return the first byte of each mask."""
    assert made.masks is not None
    return list(made.masks.words[::4])


def test_each_token_of_a_chain_has_a_mask() -> None:
    grammar = ChainGrammar()
    one, _ = chained(grammar, 8, 9)
    grammar.num_masks = 3
    made = make_masks(one)
    assert grammar.asked[-1].draft_ids == (8, 9)
    assert numbers_of(made) == [1, 2, 3]
    assert (made.late, made.cut, made.ends) == ([], {}, [])


@pytest.mark.parametrize(
    ("num_masks", "sampled", "received"),
    [
        # Both drafts are right, but nothing is known behind the second.
        (2, [8, 9, -1], (8, 9)),
        (2, [8, 5, -1], (8, 5)),
        (1, [8, -1, -1], (8,)),
        (3, [8, 9, 4], (8, 9, 4)),
    ],
)
def test_a_chain_ends_where_its_masks_end(
    num_masks: int, sampled: list[int], received: tuple[int, ...]
) -> None:
    grammar = ChainGrammar()
    one, plan = chained(grammar, 8, 9)
    grammar.num_masks = num_masks
    made = make_masks(one)
    assert numbers_of(made) == [*range(1, num_masks + 1)] + [0] * (3 - num_masks)
    assert one.apply_masks(made) == []
    (event,) = one.update(StepOutput(plan.step, sampled))
    assert (event.token_ids, event.finish_reason) == (received, None)
    (sequence,) = one._table.running
    assert sequence.num_pending == 0
    assert sequence.masks is not None
    assert not sequence.masks.num_deferred
    # The next plan computes its last token.
    assert plan_of(one).sequences[0].first_position == len(received) + 1


def test_a_chain_without_its_first_mask_samples_nothing_and_is_planned_again() -> None:
    grammar = ChainGrammar()
    one, plan = chained(grammar, 8, 9)
    grammar.num_masks = None
    made = make_masks(one)
    assert numbers_of(made) == [0, 0, 0]
    assert one.apply_masks(made) == []
    assert one.update(StepOutput(plan.step, [-1, -1, -1])) == []
    one.acknowledge(plan.step)
    assert one.num_nonfinite_sequences == 0
    assert one.schedule() is None
    grammar.num_masks = 1
    make_masks(one)
    # Steps do not wait for its masks, so it has no drafts.
    plan = plan_of(one)
    assert [(one.first_position, one.num_tokens) for one in plan.sequences] == [(1, 1)]
    assert numbers_of(make_masks(one)) == [1]


def test_masks_may_begin_within_a_chain() -> None:
    grammar = ChainGrammar()
    # The first token is known; the next is sampled without a mask.
    one, plan = chained(grammar, 8, 9, thinking_token_budget=2)
    grammar.num_masks = 3
    # The masks of the prefixes of the drafts, without that of the next token.
    assert numbers_of(make_masks(one)) == [2, 3]
    one, plan = chained(grammar, 8, 9, thinking_token_budget=2)
    grammar.num_masks = None
    made = make_masks(one)
    assert numbers_of(made) == [0, 0]
    assert made.late == []
    one.apply_masks(made)
    (event,) = one.update(StepOutput(plan.step, [8, -1, -1]))
    assert event.token_ids == (8,)
    assert one.num_nonfinite_sequences == 0
    one, _ = chained(grammar, 8, 9, thinking_token_budget=4)
    assert one.masked_step() is None


def test_a_sequence_is_released_by_the_first_masks_of_a_chain() -> None:
    grammar = ChainGrammar()
    one, plan = chained(grammar, 8, 9, thinking_token_budget=2)
    grammar.num_masks, grammar.is_free = 3, True
    made = make_masks(one)
    assert made.masks is not None
    assert list(made.masks.released) == [0]
    assert numbers_of(made) == [2, 3]
    one.update(StepOutput(plan.step, [8, 9, 4]))
    plan_of(one)
    assert one.masked_step() is None


def test_a_chain_that_ends_meanwhile_may_sample_anything() -> None:
    grammar = ChainGrammar()
    one, plan = chained(grammar, 8, 9)
    one.abort_request("a")
    made = make_masks(one)
    assert made.masks is not None
    assert made.masks.words == EVERYTHING * 3
    assert one.update(StepOutput(plan.step, [8, 9, 4])) == []
    assert one.stats().num_free_blocks == one._kv.pool.num_blocks
