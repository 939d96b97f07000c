"""The inputs of random plans have the tokens, slots and logits that a model of the rows says."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from pagedray.batch import Decodes, SequencePlan, SequenceStart, StepPlan, pack_token_ids
from pagedray.sampling_params import SamplingParams
from workers.runner.input_batch import InputBatch, StepInputs
from workers.runner.token_table import TokenTable

NUM_ROWS, MAX_LEN = 6, 40
Place = tuple[int, int]
"""A row and a position."""


@dataclass
class Row:
    """What a sequence has, as the scheduler knows it."""

    token_ids: list[int]
    num_prompt_tokens: int
    block_ids: list[int]
    num_computed: int
    num_prompt_logprobs: int | None
    rng: random.Random = field(repr=False)

    def chunk(self, row: int, block_size: int, block_ids: list[int]) -> SequencePlan:
        """Compute some of the known tokens, in new blocks of the pool `block_ids`."""
        num_left = len(self.token_ids) - self.num_computed
        num_tokens = self.rng.randint(1, num_left)
        end = self.num_computed + num_tokens
        num_new = max(0, -(-end // block_size) - len(self.block_ids))
        added = [block_ids.pop() for _ in range(num_new)]
        self.block_ids += added
        is_sampled = num_tokens == num_left
        return SequencePlan(row, self.num_computed, num_tokens, is_sampled, tuple(added))


class Rows:
    """Sequences that start, some preempted before, compute chunks, sample and end."""

    def __init__(self, rng: random.Random, block_size: int) -> None:
        self.by_row: dict[int, Row] = {}
        self._rng = rng
        self._block_size = block_size
        self._block_ids = list(range(2000))
        rng.shuffle(self._block_ids)

    def plan(self, step: int) -> StepPlan:
        rng = self._rng
        starts = [
            self._start(row)
            for row in range(NUM_ROWS)
            if row not in self.by_row and rng.random() < 0.5
        ]
        chunks = [
            one.chunk(row, self._block_size, self._block_ids)
            for row, one in self.by_row.items()
            if rng.random() < 0.8
        ]
        decodes = [
            one for one in chunks if one.num_tokens == 1 and one.is_sampled and rng.random() < 0.7
        ]
        others = [one for one in chunks if one not in decodes]
        others.sort(key=lambda one: one.num_tokens == 1)
        growing = [one for one in decodes if one.new_block_ids]
        packed = Decodes.pack(
            [one.row for one in decodes],
            [one.first_position for one in decodes],
            [one.row for one in growing],
            [one.new_block_ids[0] for one in growing],
        )
        return StepPlan(step, others, starts, packed)

    def _start(self, row: int) -> SequenceStart:
        rng, block_size = self._rng, self._block_size
        num_prompt_tokens, num_generated = rng.randint(1, 12), rng.choice((0, 0, 1, 5))
        token_ids = [rng.randrange(999) for _ in range(num_prompt_tokens + num_generated)]
        number, index = rng.choice((None, 0, 2)), rng.choice((0, 0, 1))
        # A prompt that is described is computed, and at least one token always is.
        num_cached = 0 if number is not None else rng.randint(0, (len(token_ids) - 1) // block_size)
        block_ids = [self._block_ids.pop() for _ in range(num_cached)]
        described = number if index == 0 else None
        self.by_row[row] = Row(
            token_ids, num_prompt_tokens, block_ids, num_cached * block_size, described, rng
        )
        sampling = SamplingParams(prompt_logprobs=number)
        return SequenceStart(
            row, pack_token_ids(token_ids), num_prompt_tokens, block_ids[:], sampling, 0, index
        )

    def note_step(self, plan: StepPlan, sampled: list[int]) -> None:
        """Take what a plan computed and sampled; some sequences end."""
        token_ids = iter(sampled)
        for one in plan.sequences:
            row = self.by_row[one.row]
            row.num_computed += one.num_tokens
            if one.is_sampled:
                row.token_ids.append(next(token_ids))
                if len(row.token_ids) == MAX_LEN or self._rng.random() < 0.1:
                    del self.by_row[one.row]


def check_inputs(
    inputs: StepInputs, plan: StepPlan, rows: dict[int, Row], block_size: int, *, replays: bool
) -> None:
    """Check all inputs against the rows."""
    attention = inputs.attention
    ends = attention.query_lens.cumsum()
    token_of: dict[Place, int] = {}
    """The index of each token of the step."""
    by_first_block = {one.block_ids[0]: row for row, one in rows.items() if one.block_ids}
    for number, (end, length) in enumerate(zip(ends, attention.query_lens, strict=True)):
        blocks = attention.block_tables[number]
        row = by_first_block[int(blocks[0])]
        known = rows[row]
        assert (length > 1) == (number < attention.num_prefills)
        for at in range(end - length, end):
            position = int(inputs.positions[at])
            assert position == attention.seq_lens[number] - (end - at)
            block = known.block_ids[position // block_size]
            assert blocks[position // block_size] == block
            assert attention.slot_mapping[at] == block * block_size + position % block_size
            assert inputs.token_ids[at] == known.token_ids[position]
            # A generated token is alone, as it was at first.
            assert not replays or length == 1 or position < known.num_prompt_tokens
            token_of[row, position] = at
    computed = [(one.row, range(one.first_position, one.first_position + one.num_tokens))
                for one in plan.sequences]  # fmt: skip
    assert len(token_of) == ends[-1]
    assert set(token_of) == {(row, position) for row, part in computed for position in part}
    sampled = [(one.row, one.first_position + one.num_tokens)
               for one in plan.sequences if one.is_sampled]  # fmt: skip
    assert list(zip(inputs.sampled_rows, inputs.sampled_positions, strict=True)) == sampled
    needed = [token_of[row, position - 1] for row, position in sampled]
    described = {}
    for row, part in computed:
        one = rows[row]
        before = [position for position in part if position + 1 < one.num_prompt_tokens]
        if one.num_prompt_logprobs is not None and before:
            described[row] = (before, [one.token_ids[position + 1] for position in before])
    assert {one.row for one in inputs.prompt_chunks} == set(described)
    for chunk in inputs.prompt_chunks:
        before, token_ids = described[chunk.row]
        assert chunk.first_position == before[0] + 1
        assert chunk.token_ids.tolist() == token_ids
        assert chunk.num_likeliest == rows[chunk.row].num_prompt_logprobs
        needed += [token_of[chunk.row, position] for position in before]
    indices = inputs.logits_indices
    assert needed == (list(range(ends[-1])) if indices is None else indices.tolist())
    if (flags := inputs.sampled_sequences) is None:
        assert replays or indices is None or inputs.prompt_chunks
    else:
        assert (ends[flags] - 1).tolist() == needed
        decodes = attention.last_tokens(flags)
        assert decodes.num_decodes == len(needed)
        assert decodes.seq_lens.tolist() == [int(inputs.positions[at]) + 1 for at in needed]
        assert (decodes.block_tables == attention.block_tables[flags]).all()
        assert (decodes.slot_mapping == -1).all()


@pytest.mark.parametrize("replays", [True, False])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_inputs_of_random_plans(block_size: int, replays: bool) -> None:
    for seed in range(20):
        rng = random.Random(f"{block_size} {replays} {seed}")
        table = TokenTable(
            max_num_rows=NUM_ROWS,
            max_model_len=MAX_LEN,
            max_num_tokens=NUM_ROWS * MAX_LEN,
            device=torch.device("cpu"),
        )
        batch = InputBatch(
            table,
            max_num_rows=NUM_ROWS,
            max_model_len=MAX_LEN,
            block_size=block_size,
            replays_decodes=replays,
        )
        rows = Rows(rng, block_size)
        for step in range(25):
            plan = rows.plan(step)
            batch.apply_plan(plan)
            if not plan.num_tokens:
                continue
            inputs = batch.prepare_inputs(plan)
            check_inputs(inputs, plan, rows.by_row, block_size, replays=replays)
            sampled = [rng.randrange(999) for _ in inputs.sampled_rows]
            batch.append_sampled(inputs, torch.tensor(sampled, dtype=torch.int64))
            rows.note_step(plan, sampled)
