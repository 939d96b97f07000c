"""A mask has the last word, and only for its own row."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pagedray.batch import SequenceStart, pack_token_ids
from pagedray.sampling_params import SamplingParams
from workers.sampler import Sampler
from workers.sampling.edits import apply_masks, num_mask_bytes

VOCAB_SIZE = 77
VOCAB_SIZE_OF_BAD_WORDS = 9
NUM_ROWS = 5
PROMPT = [1, 2, 3, 1]
GREEDY = SamplingParams(temperature=0.0)


def mask_of(*token_ids: int) -> bytes:
    words = np.zeros(num_mask_bytes(VOCAB_SIZE) // 4, dtype=np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words.tobytes()


def started(sampler: Sampler, row: int, *, mask_start: int | None, **sampling: object) -> None:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]  # any field
    sampler.start(SequenceStart(row, pack_token_ids([5]), 1, [], params, 9, 0, (3,), mask_start))


def sampler_of(*, mask_start: int | None = 0, **sampling: object) -> Sampler:
    sampler = Sampler(max_num_rows=4, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    started(sampler, 0, mask_start=mask_start, **sampling)
    return sampler


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_only_allowed_tokens_are_sampled(temperature: float) -> None:
    sampler = sampler_of(temperature=temperature)
    generator = torch.Generator().manual_seed(0)
    for position in range(1, 200):
        allowed = {position % VOCAB_SIZE, position * 7 % VOCAB_SIZE, 76}
        logits = 20 * torch.randn(1, VOCAB_SIZE, generator=generator)
        token_ids = sampler.sample(logits, [0], [position], mask_of(*allowed)).token_ids
        assert int(token_ids[0]) in allowed


def test_nothing_brings_a_forbidden_token_back() -> None:
    sampler = sampler_of(
        temperature=0.0, logit_bias={4: 100.0}, presence_penalty=-2.0, repetition_penalty=0.01
    )
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 5] = 1000.0
    assert int(sampler.sample(logits, [0], [1], mask_of(60)).token_ids[0]) == 60


def test_min_tokens_is_left_to_the_mask() -> None:
    sampler = sampler_of(temperature=0.0, min_tokens=10, max_tokens=20)
    logits = torch.zeros(1, VOCAB_SIZE)
    assert int(sampler.sample(logits, [0], [1], mask_of(3)).token_ids[0]) == 3


def test_logprobs_are_those_of_the_raw_logits() -> None:
    sampler = sampler_of(temperature=0.0, logprobs=1)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 8] = 3.0
    expected = torch.log_softmax(logits[0], dim=0)
    (report,) = sampler.sample(logits, [0], [1], mask_of(60)).logprobs
    assert report is not None
    assert report.chosen == pytest.approx(float(expected[60]))
    assert report.token_ids == [8]


def test_a_neighbor_keeps_its_token_and_a_broken_row_stays_broken() -> None:
    sampler = sampler_of(temperature=0.0)
    started(sampler, 1, mask_start=None, temperature=0.0)
    started(sampler, 2, mask_start=0, temperature=0.0)
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 9] = 5.0
    logits[2, 9] = torch.nan
    masks = mask_of(70) + mask_of(71)
    assert sampler.has_masked([0, 1, 2], [1, 1, 1])
    assert not sampler.has_masked([1], [1])
    assert sampler.sample(logits, [0, 1, 2], [1, 1, 1], masks).token_ids.tolist() == [70, 9, -1]


def test_masks_begin_later_and_end() -> None:
    sampler = sampler_of(mask_start=2, temperature=0.0)
    started(sampler, 1, mask_start=0, temperature=0.0)
    likeliest = torch.zeros(2, VOCAB_SIZE)
    likeliest[:, 9] = 5.0
    assert [sampler.has_masked([0], [position]) for position in (1, 2, 3, 4)] == [
        False, False, True, True,
    ]  # fmt: skip
    assert not sampler.needs_whole([0], [2])
    found = sampler.sample(likeliest.clone(), [0, 1], [2, 2], mask_of(70))
    assert found.token_ids.tolist() == [9, 70]
    found = sampler.sample(likeliest.clone(), [0, 1], [3, 3], mask_of(71) + mask_of(72), [0])
    assert found.token_ids.tolist() == [71, 72]
    assert not sampler.has_masked([0], [4])
    # The first mask is that of the second row, as the first one has none.
    found = sampler.sample(likeliest.clone(), [0, 1], [4, 4], mask_of(73), [0])
    assert found.token_ids.tolist() == [9, 73]
    assert not sampler.has_masked([0, 1], [5, 5])
    # The next sequence of the row has masks again.
    started(sampler, 0, mask_start=0, temperature=0.0)
    assert sampler.has_masked([0], [1])


def test_min_tokens_holds_before_the_masks_begin() -> None:
    sampler = sampler_of(mask_start=2, temperature=0.0, min_tokens=10, max_tokens=20)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 3] = 5.0
    assert int(sampler.sample(logits.clone(), [0], [2]).token_ids[0]) != 3
    # From here on, the mask decides whether the sequence may end.
    assert int(sampler.sample(logits.clone(), [0], [3], mask_of(3)).token_ids[0]) == 3


def test_masks_of_bfloat16_logits() -> None:
    sampler = sampler_of(temperature=0.0)
    logits = torch.ones(1, VOCAB_SIZE + 3, dtype=torch.bfloat16)
    assert int(sampler.sample(logits, [0], [1], mask_of(76)).token_ids[0]) == 76


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_forbids_what_the_cpu_does() -> None:
    generator = np.random.default_rng(0)
    masks = generator.integers(0, 256, (3, num_mask_bytes(VOCAB_SIZE)), dtype=np.uint8).tobytes()
    scores = torch.randn(5, VOCAB_SIZE)
    on_gpu = scores.cuda()
    apply_masks(scores, np.array([0, 2, 3]), masks)
    apply_masks(on_gpu, np.array([0, 2, 3]), masks)
    assert torch.equal(scores, on_gpu.cpu())


def logits_of(request: int, position: int) -> torch.Tensor:
    """Return the scores of a toy model."""
    generator = torch.Generator().manual_seed(1000 * request + position)
    return torch.randn(VOCAB_SIZE_OF_BAD_WORDS, generator=generator)


def is_forbidden(output: Sequence[int], token_id: int, words: Sequence[Sequence[int]]) -> bool:
    return any([*output, token_id][-len(word) :] == list(word) for word in words)


def plain_output(request: int, words: Sequence[Sequence[int]], num_tokens: int) -> list[int]:
    output: list[int] = []
    for position in range(len(PROMPT), len(PROMPT) + num_tokens):
        scores = logits_of(request, position).tolist()
        left = [i for i in range(VOCAB_SIZE_OF_BAD_WORDS) if not is_forbidden(output, i, words)]
        output.append(max(left, key=lambda token_id: scores[token_id]))
    return output


def started_of_bad_words(
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
    return Sampler(
        max_num_rows=NUM_ROWS, vocab_size=VOCAB_SIZE_OF_BAD_WORDS, device=torch.device("cpu")
    )


def test_outputs_are_those_of_a_plain_loop_through_preemptions_and_changing_batches() -> None:
    random = np.random.default_rng(3)
    words = [
        [tuple(random.integers(0, VOCAB_SIZE_OF_BAD_WORDS, size=size).tolist()) for size in sizes]
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
                started_of_bad_words(sampler, rows[request], outputs[request], words[request])
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
    started_of_bad_words(sampler, 0, [], [(3, 1, 5)])
    logits = torch.zeros(1, VOCAB_SIZE_OF_BAD_WORDS)
    logits[0, 5] = 1.0
    assert sampler.sample(logits, [0], [4]).token_ids.tolist() == [5]


def test_a_row_with_nan_at_the_end_of_a_word_fails() -> None:
    sampler = make_sampler()
    started_of_bad_words(sampler, 0, [], [(5,), (5,)])
    logits = torch.zeros(1, VOCAB_SIZE_OF_BAD_WORDS)
    logits[0, 5] = torch.nan
    assert sampler.sample(logits, [0], [4]).token_ids.tolist() == [-1]


@pytest.mark.parametrize(
    "word", [(VOCAB_SIZE_OF_BAD_WORDS,), (5, VOCAB_SIZE_OF_BAD_WORDS), (VOCAB_SIZE_OF_BAD_WORDS, 5)]
)
def test_words_with_tokens_beyond_the_vocabulary_have_no_effect(word: tuple[int, ...]) -> None:
    sampler = make_sampler()
    started_of_bad_words(sampler, 0, [], [word])
    logits = torch.zeros(1, VOCAB_SIZE_OF_BAD_WORDS)
    logits[0, 5] = 1.0
    for position in (4, 5):
        assert sampler.sample(logits.clone(), [0], [position]).token_ids.tolist() == [5]
