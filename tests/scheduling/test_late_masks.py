"""Steps that do not wait for masks which are late or costly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.scheduler import Scheduler
from pagedray.batch import SequencePlan, StepOutput
from pagedray.config import SchedulerConfig
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.scheduling.event import TokenEvent
    from pagedray.batch import StepMasks, StepPlan

ALLOWED = b"\xff" * 4
NOTHING = b"\x00" * 4
_SLOW_ROW = 0
"""Of the sequence that follows a grammar."""


class SlowGrammar:
    """A grammar that allows everything, and one matcher of it."""

    num_mask_bytes = 4
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
        # Any: what `matcher` returns.
        asked: Sequence[tuple[Any, Sequence[int]]],
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
        self.scheduler = Scheduler(
            config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
            kv=KvOptions(
                block_size=4,
                num_blocks=64,
                num_cpu_blocks=0,
                enable_cpu_prefix_cache=False,
            ),
            max_model_len=128,
        )
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
        sampling = SamplingParams(max_tokens=100, ignore_eos=True)
        prompt = (5, 6, 7, 8, *token_ids)
        request = Request(id=name, prompt_token_ids=prompt, sampling=sampling, seed=0)
        self.scheduler.add_request(msgspec.structs.replace(request, grammar=grammar))


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


def test_a_sequence_that_is_barred_while_its_mask_is_late_starts_again() -> None:
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
    plan = steps.scheduler.schedule()
    assert plan is not None
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
