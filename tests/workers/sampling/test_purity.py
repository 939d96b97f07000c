"""Tokens of a row depend on nothing but that row."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedray.sampling_params import SamplingParams
from tests.workers.sampling.sampler_rig import (
    EVERYTHING,
    MIXED,
    NUM_ROWS,
    VOCAB_SIZE,
    draw_many,
    make_logits,
    make_sampler,
    make_start,
    run_alone,
    sample_one,
)
from workers.sampler import Sampler
from workers.sampling.choice import Choice
from workers.sampling.device_choice import TorchChoice
from workers.sampling.numpy_choice import NumpyChoice


@settings(max_examples=12)
@given(data=st.data())
def test_tokens_depend_on_neither_batch_nor_row_nor_preemption(data: st.DataObject) -> None:
    choice = data.draw(st.sampled_from([NumpyChoice(), TorchChoice()]))
    num_steps = 8
    logits = [make_logits(num_steps, seed=i) for i in range(len(MIXED))]
    expected = [run_alone(choice, MIXED[i], logits[i]) for i in range(len(MIXED))]
    sampler = make_sampler(choice)
    rows: dict[int, int] = {}
    outputs: list[list[int]] = [[] for _ in MIXED]
    for _ in range(60):
        waiting = [i for i, output in enumerate(outputs) if len(output) < num_steps]
        if not waiting:
            break
        batch = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        for i in batch:
            if i not in rows or data.draw(st.integers(0, 4)) == 0:
                # Preempted: it comes back in any row that is free.
                rows.pop(i, None)
                free = [row for row in range(NUM_ROWS) if row not in rows.values()]
                rows[i] = data.draw(st.sampled_from(free))
                start = make_start(MIXED[i], row=rows[i], output=outputs[i], eos=(2,))
                sampler.start(start)
        step_logits = torch.stack([logits[i][len(outputs[i])] for i in batch])
        positions = [3 + len(outputs[i]) for i in batch]
        sampled = sampler.sample(step_logits, [rows[i] for i in batch], positions)
        for i, token_id in zip(batch, sampled.token_ids.tolist(), strict=True):
            outputs[i].append(token_id)
    for output, tokens in zip(outputs, expected, strict=True):
        assert output == tokens[: len(output)]


@pytest.mark.parametrize("later", MIXED, ids=range(len(MIXED)))
def test_a_reused_row_keeps_nothing(choice: Choice, later: SamplingParams) -> None:
    logits = make_logits(6, seed=4)
    used = make_sampler(choice)
    used.start(make_start(EVERYTHING, prompt=[1, 2, 5, 77], output=[7], seed=99, index=3, eos=(2,)))
    for i, row in enumerate(make_logits(6, seed=5)):
        sample_one(used, row, position=5 + i)
    used.start(make_start(later, eos=(2,)))
    fresh = make_sampler(choice)
    fresh.start(make_start(later, eos=(2,)))
    for i, row in enumerate(logits):
        again = used.sample(row[None].clone(), [0], [3 + i])
        first = fresh.sample(row[None].clone(), [0], [3 + i])
        assert again.token_ids.tolist() == first.token_ids.tolist()
        assert again.logprobs == first.logprobs


def test_penalties_follow_their_rows_while_rows_come_and_go(sampler: Sampler) -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    outputs: dict[int, list[int]] = {}
    rng = np.random.default_rng(0)
    for step in range(200):
        row = int(rng.integers(NUM_ROWS))
        outputs[row] = rng.integers(VOCAB_SIZE, size=20).tolist()
        sampler.start(make_start(sampling, row=row, output=outputs[row]))
        rows = list(outputs)
        scores = torch.zeros(len(rows), VOCAB_SIZE)
        tokens = sampler.sample(scores, rows, [23 + step] * len(rows)).token_ids.tolist()
        for i, row in enumerate(rows):
            counts = Counter(outputs[row])
            assert scores[i].tolist() == [-2.0 * counts[t] for t in range(VOCAB_SIZE)]
            outputs[row].append(tokens[i])


def test_sequences_of_a_request_differ(sampler: Sampler) -> None:
    for index in range(NUM_ROWS):
        sampler.start(make_start(SamplingParams(n=NUM_ROWS), row=index, index=index))
    logits = make_logits(scale=0.5).expand(NUM_ROWS, -1)
    tokens = [
        tuple(sampler.sample(logits.clone(), range(NUM_ROWS), [p] * NUM_ROWS).token_ids.tolist())
        for p in range(4)
    ]
    assert len(set(zip(*tokens, strict=True))) == NUM_ROWS


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_a_seed_repeats_and_another_differs(choice: Choice, seed: int) -> None:
    def tokens(seed: int) -> list[int]:
        sampler = make_sampler(choice)
        sampler.start(make_start(SamplingParams(), seed=seed))
        return draw_many(sampler, make_logits(scale=0.5)[0], 8)

    assert tokens(seed) == tokens(seed)
    assert tokens(seed) != tokens(seed ^ 1)
