"""Bad words: whatever happens to a row, its output is that of a plain loop over all words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pagedray.batch import SequenceStart, pack_token_ids
from pagedray.sampling_params import SamplingParams
from workers.sampler import Sampler

VOCAB_SIZE = 9
NUM_ROWS = 5
PROMPT = [1, 2, 3, 1]
GREEDY = SamplingParams(temperature=0.0)


def logits_of(request: int, position: int) -> torch.Tensor:
    """Return the scores of a toy model."""
    generator = torch.Generator().manual_seed(1000 * request + position)
    return torch.randn(VOCAB_SIZE, generator=generator)


def is_forbidden(output: Sequence[int], token_id: int, words: Sequence[Sequence[int]]) -> bool:
    return any([*output, token_id][-len(word) :] == list(word) for word in words)


def plain_output(request: int, words: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    output: list[int] = []
    for position in range(len(PROMPT), len(PROMPT) + num_tokens):
        scores = logits_of(request, position).tolist()
        left = [i for i in range(VOCAB_SIZE) if not is_forbidden(output, i, words)]
        output.append(max(left, key=lambda token_id: scores[token_id]))
    return output


def started(
    sampler: Sampler, row: int, output: Sequence[int], words: Sequence[tuple[int, ...]]
) -> None:
    start = SequenceStart(
        row,
        pack_token_ids([*PROMPT, *output]),
        len(PROMPT),
        [],
        GREEDY,
        7,
        0,
        bad_token_ids=tuple(words),
    )
    sampler.start(start)


def make_sampler() -> Sampler:
    return Sampler(max_num_rows=NUM_ROWS, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))


def test_outputs_are_those_of_a_plain_loop_through_preemptions_and_changing_batches() -> None:
    random = np.random.default_rng(3)
    words = [
        [tuple(random.integers(0, VOCAB_SIZE, size=size).tolist()) for size in sizes]
        # The last one's rows have no words.
        for sizes in ((1, 2, 2, 2, 3, 3), (1, 1, 1), (2,) * 30, (4, 3, 2, 1), ())
    ]
    sampler = make_sampler()
    outputs: list[list[int]] = [[] for _ in words]
    rows: dict[int, int] = {}
    for _ in range(400):
        if random.random() < 0.2:
            # Preempt all, and start again in other rows.
            rows = {}
        for request in random.permutation(len(words)).tolist():
            if request not in rows and random.random() < 0.7:
                rows[request] = min(set(range(NUM_ROWS)) - set(rows.values()))
                started(sampler, rows[request], outputs[request], words[request])
        batch = [request for request in rows if random.random() < 0.8]
        if not batch:
            continue
        positions = [len(PROMPT) + len(outputs[request]) for request in batch]
        logits = torch.stack(
            [logits_of(one, position) for one, position in zip(batch, positions, strict=True)]
        )
        sampled = sampler.sample(logits, [rows[request] for request in batch], positions)
        for request, token_id in zip(batch, sampled.token_ids.tolist(), strict=True):
            outputs[request].append(token_id)
    assert min(map(len, outputs)) > 100
    for request, output in enumerate(outputs):
        assert output == plain_output(request, words[request], len(output))


def test_the_prompt_does_not_begin_a_word() -> None:
    sampler = make_sampler()
    started(sampler, 0, [], [(3, 1, 5)])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 5] = 1.0
    assert sampler.sample(logits, [0], [4]).token_ids.tolist() == [5]


def test_a_row_with_nan_at_the_end_of_a_word_fails() -> None:
    sampler = make_sampler()
    started(sampler, 0, [], [(5,), (5,)])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 5] = torch.nan
    assert sampler.sample(logits, [0], [4]).token_ids.tolist() == [-1]


@pytest.mark.parametrize("word", [(VOCAB_SIZE,), (5, VOCAB_SIZE), (VOCAB_SIZE, 5)])
def test_words_with_tokens_beyond_the_vocabulary_have_no_effect(word: tuple[int, ...]) -> None:
    sampler = make_sampler()
    started(sampler, 0, [], [word])
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 5] = 1.0
    for position in (4, 5):
        assert sampler.sample(logits.clone(), [0], [position]).token_ids.tolist() == [5]
