"""Masked sequences of a step, and those that end meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from cluster.scheduling.kv_manager import KvOptions
from cluster.scheduling.scheduler import Scheduler
from pagedray.batch import StepOutput
from pagedray.config import SchedulerConfig
from pagedray.request import FinishReason, Request
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.scheduling.masked_step import MadeMasks

EVERYTHING = b"\xff" * 4


class PlainMatcher:
    """A matcher that knows only why it failed."""

    error = "its mask took 0.60 s"
    is_costly = False
    is_free = False


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
        # Any: what `matcher` returns.
        asked: Sequence[tuple[Any, Sequence[int]]],
        *,
        num_awaited: int,
        wait_s: float,
    ) -> list[bytes | FinishReason | None]:
        self.num_awaited.append(num_awaited)
        return [
            self._end if len(token_ids) > 3 else (1 << len(token_ids)).to_bytes(4, "little")
            for _, token_ids in asked
        ]


def request(name: str, grammar: LastTokenGrammar | None) -> Request:
    plain = Request(id=name, prompt_token_ids=(5,), sampling=SamplingParams(max_tokens=9), seed=0)
    return msgspec.structs.replace(plain, grammar=grammar)


def scheduler() -> Scheduler:
    return Scheduler(
        config=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
        kv=KvOptions(
            block_size=4,
            num_blocks=32,
            num_cpu_blocks=0,
            enable_prefix_cache=False,
            enable_cpu_prefix_cache=False,
        ),
        max_model_len=32,
    )


def make_masks(one: Scheduler) -> MadeMasks:
    masked = one.masked_step()
    assert masked is not None
    return masked.make_masks(0.0)


def run_step(one: Scheduler, token_id: int) -> None:
    plan = one.schedule()
    assert plan is not None
    one.update(StepOutput(plan.step, [token_id] * len(plan.sequences)))
    one.acknowledge(plan.step)


def test_only_sequences_with_a_grammar_get_masks_in_the_order_of_the_plan() -> None:
    one, grammar = scheduler(), LastTokenGrammar()
    for name, given in (("a", None), ("b", grammar), ("c", None), ("d", grammar)):
        one.add_request(request(name, given))
    plan = one.schedule()
    assert plan is not None
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


def with_budget(name: str, num_tokens: int, grammar: LastTokenGrammar) -> Request:
    """Return a request whose reasoning may have this many tokens."""
    given = request(name, grammar)
    sampling = msgspec.structs.replace(given.sampling, thinking_token_budget=num_tokens)
    return msgspec.structs.replace(given, sampling=sampling)


def test_a_budget_masks_no_token_before_it_and_none_once_all_are_allowed() -> None:
    one, grammar = scheduler(), FreeingGrammar()
    one.add_request(with_budget("a", 2, grammar))
    for token_id in (7, 8):
        plan = one.schedule()
        assert plan is not None
        assert [start.mask_start for start in plan.starts] in ([2], [])
        assert one.masked_step() is None
        one.update(StepOutput(plan.step, [token_id]))
    plan = one.schedule()
    assert plan is not None
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
    one.add_request(with_budget("a", 1, FreeingGrammar()))
    run_step(one, 7)
    one.schedule()
    assert make_masks(one).masks is not None
    # The ranks are replaced.
    one.reset()
    plan = one.schedule()
    assert plan is not None
    assert [start.mask_start for start in plan.starts] == [None]
    assert one.masked_step() is None


def test_the_masks_of_a_plan_are_those_of_the_tokens_that_it_samples() -> None:
    one, grammar = scheduler(), LastTokenGrammar()
    one.add_request(with_budget("a", 1, grammar))
    one.add_request(with_budget("b", 1, grammar))
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
