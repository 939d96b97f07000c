"""A mask has the last word, and only for its own row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedray.batch import SequenceStart, pack_token_ids
from pagedray.sampling_params import SamplingParams
from workers.sampler import Sampler
from workers.sampling.edits import apply_masks, num_mask_bytes

VOCAB_SIZE = 77


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
    assert sampler.is_greedy([0], [2])
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
