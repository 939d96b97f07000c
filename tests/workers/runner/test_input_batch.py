"""A rank takes decodes as arrays as it takes chunks of one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from pagedray.batch import Decodes, SequencePlan, SequenceStart, StepPlan, pack_token_ids
from pagedray.sampling_params import SamplingParams
from workers.runner.input_batch import InputBatch
from workers.runner.token_table import TokenTable

PROMPTS = {3: [11, 12, 13], 0: [21, 22], 2: [31, 32, 33, 34]}


def inputs_of(plans: Sequence[StepPlan]) -> list[dict[str, Any]]:  # Any: fields of StepInputs
    """Return the inputs of steps after the prompts of rows 3, 0 and 2; each samples 40 + row."""
    table = TokenTable(
        max_num_rows=4, max_model_len=16, max_num_tokens=16, device=torch.device("cpu")
    )
    batch = InputBatch(table, max_num_rows=4, max_model_len=16, block_size=2, replays_decodes=True)
    starts = [
        SequenceStart(
            row, pack_token_ids(prompt), len(prompt), [2 * row, 2 * row + 1], SamplingParams(), 0, 0
        )
        for row, prompt in PROMPTS.items()
    ]
    chunks = [SequencePlan(row, 0, len(prompt), True) for row, prompt in PROMPTS.items()]
    found = []
    for plan in (StepPlan(0, chunks, starts), *plans):
        batch.apply_plan(plan)
        inputs = batch.prepare_inputs(plan)
        batch.append_sampled(inputs, torch.tensor([40 + row for row in inputs.sampled_rows]))
        found.append(asdict(inputs))
    return found[1:]


def test_decodes_give_the_inputs_of_chunks_of_one_token() -> None:
    start = SequenceStart(1, pack_token_ids([51, 52, 53]), 3, [8, 9], SamplingParams(), 0, 0)
    chunk = SequencePlan(1, 0, 3, True)
    plans = [
        StepPlan(1, [], decodes=Decodes.pack([3, 0, 2], [3, 2, 4], [2], [10])),
        StepPlan(2, [chunk], [start], Decodes.pack([3, 2], [4, 5], [3], [11])),
        StepPlan(3, [], decodes=Decodes.pack([0, 3, 2, 1], [3, 5, 6, 3], [2], [12])),
    ]
    fast = inputs_of(plans)
    plain = inputs_of([StepPlan(plan.step, plan.sequences, plan.starts) for plan in plans])
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs)
    last = fast[-1]
    assert last["token_ids"].tolist() == [40, 43, 42, 41]
    assert last["sampled_rows"].tolist() == [0, 3, 2, 1]
    assert last["sampled_positions"].tolist() == [4, 6, 7, 4]
    assert last["attention"]["block_tables"].tolist() == [
        [0, 1, 0, 0],
        [6, 7, 11, 0],
        [4, 5, 10, 12],
        [8, 9, 0, 0],
    ]
