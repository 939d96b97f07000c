"""Penalties, biases, min_tokens and allowed tokens, as Transformers defines them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
)

from pagedray.sampling_params import SamplingParams
from tests.workers.sampling.sampler_rig import (
    GREEDY,
    VOCAB_SIZE,
    make_logits,
    make_start,
    sample_one,
)
from workers.sampler import Sampler
from workers.sampling.edits import penalize, penalize_seen


def test_repetition_penalty_is_that_of_transformers(sampler: Sampler) -> None:
    logits = make_logits(seed=2)[0]
    prompt, output = [4, 9, 9, int(logits.argmax())], [11, int(logits.argsort()[-2])]
    processor = RepetitionPenaltyLogitsProcessor(penalty=3.0)
    expected = processor(torch.tensor([[*prompt, *output]]), logits[None].clone())
    sampling = SamplingParams(temperature=0.0, repetition_penalty=3.0, logprobs=None)
    sampler.start(make_start(sampling, prompt=prompt, output=output))
    scores = logits[None].clone()
    token_id = int(sampler.sample(scores, [0], [6]).token_ids[0])
    assert token_id == int(expected.argmax()) != int(logits.argmax())
    # float32 logits are edited in place, so the scores can be seen.
    torch.testing.assert_close(scores, expected)


def test_presence_and_frequency_count_the_continuation_only(sampler: Sampler) -> None:
    logits = make_logits(seed=2)[0]
    sampling = SamplingParams(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    sampler.start(make_start(sampling, prompt=[1, 1, 2], output=[2, 5, 5, 5]))
    expected = logits.clone()
    expected[2] -= 0.75
    expected[5] -= 1.25
    scores = logits[None].clone()
    sampler.sample(scores, [0], [7])
    torch.testing.assert_close(scores[0], expected)


def test_sampled_tokens_count_at_once(sampler: Sampler) -> None:
    logits = torch.full((VOCAB_SIZE,), -100.0)
    logits[[3, 8]] = torch.tensor([3.0, 1.0])
    sampling = SamplingParams(temperature=0.0, frequency_penalty=1.5)
    sampler.start(make_start(sampling))
    tokens = [sample_one(sampler, logits, position=3 + i) for i in range(5)]
    # 3.0 | 1.5 | 0.0 against 1.0, then 0.0 against -0.5.
    assert tokens == [3, 3, 8, 3, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logit_bias_is_added(sampler: Sampler, dtype: torch.dtype) -> None:
    logits = make_logits().to(dtype)
    likeliest = int(logits.argmax())
    biases = {likeliest: -100.0, 12: 90.5, 13: 90.0}
    sampler.start(make_start(SamplingParams(temperature=0.0, logit_bias=biases)))
    assert sample_one(sampler, logits[0]) in (12, 13)
    expected = logits[0].float()
    for token_id, bias in biases.items():
        expected[token_id] += bias
    assert sample_one(sampler, logits[0]) == int(expected.argmax())


def test_penalizing_what_was_seen_is_penalizing_all() -> None:
    rng = np.random.default_rng(3)
    counts = torch.from_numpy(rng.integers(0, 3, size=(4, VOCAB_SIZE), dtype=np.int32))
    is_seen = (counts > 0) | torch.from_numpy(rng.random((4, VOCAB_SIZE)) < 0.3)
    strengths = np.array([[1.3, 0.5, 0.25], [1.0, -0.5, 0.0], [0.7, 0.0, 1.0]], dtype=np.float32)
    indices, slots = np.array([4, 0, 2]), np.array([1, 3, 0])
    expected = make_logits(5)
    expected[2, :50] = -torch.inf
    scores = expected.clone()
    penalize(expected, indices, is_seen, counts, slots, strengths)
    penalize_seen(scores, indices, is_seen, counts, slots, strengths)
    torch.testing.assert_close(scores, expected)
    assert (expected != make_logits(5)).any(dim=1).tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("kernel", [penalize, penalize_seen])
def test_drafts_are_penalized_as_counted_tokens_are(kernel: Callable[..., None]) -> None:
    counts = torch.zeros(3, VOCAB_SIZE, dtype=torch.int32)
    counts[1, 7] = 2
    is_seen = counts > 0
    strengths = np.array([[1.3, 0.5, 0.25], [1.0, -0.5, 0.0], [0.7, 0.0, 1.0]], dtype=np.float32)
    indices, slots = np.array([4, 0, 2]), np.array([1, 2, 0])
    contexts = np.array([[7, 7, 9], [3, -1, -1], [7, 60, 7]])
    scores, expected = make_logits(5), make_logits(5)
    kernel(scores, indices, is_seen, counts, slots, strengths, contexts)
    for slot, context in zip(slots, contexts, strict=True):
        for token_id in context[context >= 0]:
            counts[slot, token_id] += 1
            is_seen[slot, token_id] = True
    penalize_seen(expected, indices, is_seen, counts, slots, strengths)
    torch.testing.assert_close(scores, expected)


@pytest.mark.parametrize("strength", [0.01, 100.0])
def test_an_absurd_penalty_breaks_its_own_row_only(sampler: Sampler, strength: float) -> None:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=strength)
    sampler.start(make_start(sampling, row=0, prompt=range(50)))
    sampler.start(make_start(GREEDY, row=1))
    logits = make_logits(2)
    # Divided by a hundredth, it is not a float anymore.
    logits[0, 7] = 3e37
    expected = int(logits[1].argmax())
    tokens = sampler.sample(logits, [0, 1], [50, 3]).token_ids.tolist()
    assert tokens[1] == expected
    assert (tokens[0] == -1) == (strength < 1.0)


def test_bias_comes_before_penalties(sampler: Sampler) -> None:
    sampling = SamplingParams(temperature=0.0, logit_bias={4: 10.0}, repetition_penalty=2.0)
    sampler.start(make_start(sampling, prompt=[4]))
    scores = torch.zeros(1, VOCAB_SIZE)
    sampler.sample(scores, [0], [1])
    assert scores[0, 4] == 5.0


def test_min_tokens_forbids_every_end_until_it_is_reached(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[7, 8, 9]] = torch.tensor([9.0, 8.0, 7.0])
    sampling = SamplingParams(
        temperature=0.0, min_tokens=2, stop_token_ids=[8], logit_bias={7: 50.0}
    )
    sampler.start(make_start(sampling, prompt=[1, 2, 3], eos=(7,)))
    assert [sample_one(sampler, logits, position=p) for p in (3, 4, 5)] == [9, 9, 7]


def test_min_tokens_counts_what_was_sampled_before_a_resume(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[7] = 9.0
    sampling = SamplingParams(temperature=0.0, min_tokens=2)
    sampler.start(make_start(sampling, prompt=[1, 2, 3], output=[5], eos=(7,)))
    assert [sample_one(sampler, logits, position=p) for p in (4, 5)] == [0, 7]


def test_only_allowed_tokens_are_sampled(sampler: Sampler) -> None:
    logits = make_logits(3)
    expected = logits.double()
    allowed = [4, 250, 11, VOCAB_SIZE + 3]
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=allowed, logit_bias={250: 2.0})
    sampler.start(make_start(sampling, row=0))
    sampler.start(make_start(GREEDY, row=1))
    drawn = SamplingParams(temperature=5.0, allowed_token_ids=allowed)
    sampler.start(make_start(drawn, row=2))
    found = sampler.sample(logits, [0, 1, 2], [3, 3, 3]).token_ids.tolist()
    expected[0, 250] += 2.0
    assert found[0] == max(allowed[:3], key=lambda token_id: float(expected[0, token_id]))
    assert found[1] == int(expected[1].argmax())
    others = {
        sampler.sample(make_logits(3), [2], [position]).token_ids.tolist()[0]
        for position in range(3, 60)
    }
    assert others == {4, 11, 250}


def test_a_row_with_nan_among_forbidden_tokens_fails(sampler: Sampler) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 9] = torch.nan
    sampler.start(make_start(SamplingParams(temperature=0.0, allowed_token_ids=[4])))
    assert sampler.sample(logits, [0], [3]).token_ids.tolist() == [-1]


def test_min_tokens_and_allowed_tokens_hold_together(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[[7, 8, 9]] = torch.tensor([9.0, 8.0, 7.0])
    sampling = SamplingParams(temperature=0.0, min_tokens=1, allowed_token_ids=[7, 9])
    sampler.start(make_start(sampling, prompt=[1, 2, 3], eos=(7,)))
    assert [sample_one(sampler, logits, position=p) for p in (3, 4)] == [9, 7]


def test_ignored_eos_is_an_ordinary_token(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB_SIZE)
    logits[7] = 9.0
    sampling = SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True)
    sampler.start(make_start(sampling, eos=(7,)))
    assert sample_one(sampler, logits) == 7


def test_ids_beyond_the_vocabulary_touch_nothing(sampler: Sampler) -> None:
    beyond = [VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 5, 2**31 - 1]
    sampling = SamplingParams(
        temperature=0.0,
        logit_bias=dict.fromkeys(beyond, 100.0),
        stop_token_ids=beyond,
        min_tokens=1,
        repetition_penalty=2.0,
    )
    sampler.start(make_start(sampling, row=0, prompt=beyond, eos=(VOCAB_SIZE, 2**31)))
    sampler.start(make_start(GREEDY, row=1))
    logits = make_logits(2)
    logits[0, VOCAB_SIZE - 1] = 50.0
    expected = [int(logits[0, : VOCAB_SIZE - 1].argmax()), int(logits[1].argmax())]
    assert sampler.sample(logits, [0, 1], [4, 3]).token_ids.tolist() == expected
