"""Measures how long steps and copies take, by what rank 0 reports with its outputs."""

from cluster.scheduling.costs.pace import StepPace
from cluster.scheduling.costs.step_times import StepTimes
from cluster.scheduling.costs.swap_costs import SwapCosts
from pagedray.batch import StepOutput, StepPlan

__all__ = ["CostMeter"]

_STEPS_PER_MEASUREMENT = 32
"""Steps without prompts are similar: one in this many is measured."""


class CostMeter:
    """Records durations, from which costs are computed."""

    __slots__ = ("_pace", "_step_times", "_swap_costs")

    def __init__(self, step_times: StepTimes, swap_costs: SwapCosts, pace: StepPace | None) -> None:
        self._step_times = step_times
        self._swap_costs = swap_costs
        self._pace = pace

    def note_output(self, plan: StepPlan, output: StepOutput) -> None:
        """Note how long the copies and tokens of a plan took."""
        if output.num_swapped:
            self._swap_costs.note_swaps(output.num_swapped, output.swap_s)
        # Sequences of several tokens come first.
        has_prompt = plan.chunks and plan.chunks[0].num_tokens > 1
        if not output.forward_s or not (has_prompt or plan.step % _STEPS_PER_MEASUREMENT == 0):
            return
        num_tokens = plan.num_tokens
        num_pairs = plan.decodes.num_pairs + sum(chunk.num_pairs for chunk in plan.chunks)
        if self._pace is not None and has_prompt:
            self._pace.note_step(
                num_tokens=num_tokens,
                num_pairs=num_pairs,
                num_prompt_tokens=sum(one.num_tokens for one in plan.chunks if one.num_tokens > 1),
                seconds=output.forward_s,
            )
        self._step_times.note_step(
            num_tokens=num_tokens, num_pairs=num_pairs, seconds=output.forward_s
        )
