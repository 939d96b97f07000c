"""Starts with the prompt of another row."""

from typing import Any

import pytest
import torch

from pagedray.batch import SequencePlan, SequenceStart, StepPlan, pack_token_ids
from pagedray.sampling_params import SamplingParams
from workers.runner.input_batch import InputBatch, StepInputs
from workers.runner.model_runner import Prompts
from workers.runner.token_table import TokenTable


def make_start(row: int, token_ids: list[int], *, donor_row: int = -1) -> SequenceStart:
    return SequenceStart(
        row, pack_token_ids(token_ids), 3, [], SamplingParams(), 0, row, donor_row=donor_row
    )


def test_start_with_a_donor_has_its_prompt() -> None:
    prompts = Prompts()
    prompts.complete_starts([make_start(0, [1, 2, 3, 4])])
    (start,) = prompts.complete_starts([make_start(1, [], donor_row=0)])
    assert (start.row, start.token_ids, start.donor_row) == (1, pack_token_ids([1, 2, 3]), 0)
    # A fork may be a donor too.
    (start,) = prompts.complete_starts([make_start(2, [], donor_row=1)])
    assert start.token_ids == pack_token_ids([1, 2, 3])


def test_row_of_a_donor_may_be_taken_by_a_later_start_of_the_plan() -> None:
    prompts = Prompts()
    prompts.complete_starts([make_start(0, [1, 2, 3])])
    starts = [
        make_start(1, [], donor_row=0),
        make_start(0, [7, 8, 9]),
        make_start(2, [], donor_row=0),
    ]
    completed = prompts.complete_starts(starts)
    assert [start.token_ids for start in completed] == list(
        map(pack_token_ids, ([1, 2, 3], [7, 8, 9], [7, 8, 9]))
    )


def test_starts_of_one_donor_share_its_tokens() -> None:
    prompts = Prompts()
    prompts.complete_starts([make_start(0, [1, 2, 3])])
    first, last = prompts.complete_starts([make_start(row, [], donor_row=0) for row in (1, 2)])
    assert first.token_ids is last.token_ids


@pytest.mark.parametrize("num_prompt_tokens", [1, 4, 5, 8, 11])
def test_a_fork_has_the_tokens_and_leading_blocks_of_its_donor(num_prompt_tokens: int) -> None:
    device = torch.device("cpu")
    table = TokenTable(max_num_rows=3, max_model_len=40, max_num_tokens=64, device=device)
    batch = InputBatch(table, max_num_rows=3, max_model_len=40, block_size=4, replays_decodes=False)
    prompt, last = list(range(100, 100 + num_prompt_tokens)), num_prompt_tokens - 1
    prompts, blocks = Prompts(), [7, 3, 5][: last // 4 + 1]

    def run(step: int, starts: list[SequenceStart], chunk: SequencePlan) -> StepInputs:
        batch.apply_plan(StepPlan(step, [chunk], prompts.complete_starts(starts)))
        return batch.prepare_inputs(StepPlan(step, [chunk]))

    def start(row: int, block_ids: list[int], **fields: Any) -> SequenceStart:  # Any: its fields
        token_ids = b"" if fields else pack_token_ids(prompt)
        return SequenceStart(
            row, token_ids, num_prompt_tokens, block_ids, SamplingParams(), 0, row, **fields
        )

    run(0, [start(0, blocks)], SequencePlan(0, 0, num_prompt_tokens, True))
    # The donor's row is taken by a later start of the plan.
    starts = [start(1, [9], donor_row=0), start(2, [8], donor_row=1), start(0, [2] * len(blocks))]
    for row, block in ((1, 9), (2, 8)):
        inputs = run(row, starts if row == 1 else [], SequencePlan(row, last, 1, True))
        assert inputs.token_ids.tolist() == [prompt[last]]
        assert inputs.attention.block_tables.tolist() == [[*blocks[:-1], block]]
        assert inputs.attention.slot_mapping.tolist() == [4 * block + last % 4]
        assert table.tokens(row, 0, num_prompt_tokens).tolist() == prompt
