"""The sampler against a float64 reference, Transformers' processors and the laws it states."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagedray.batch import SequenceStart, TokenLogprobs, pack_token_ids
from pagedray.request import SamplingParams
from workers.sampler import Sampler
from workers.sampling.choice import Choice, Draws
from workers.sampling.masks import num_mask_bytes
from workers.sampling.numpy_choice import NumpyChoice
from workers.sampling.penalties import penalize, penalize_seen
from workers.sampling.randomness import finalize, generator_start, uniforms
from workers.sampling.torch_choice import TorchChoice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from workers.sampling.arrays import IntArray

CPU = torch.device("cpu")
VOCAB_SIZE = 300
NUM_ROWS = 16
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=[NumpyChoice, TorchChoice])
def choice(request: pytest.FixtureRequest) -> Choice:
    made: Choice = request.param()
    return made


@pytest.fixture
def sampler(choice: Choice) -> Sampler:
    return make_sampler(choice)


def make_sampler(choice: Choice | None = None, vocab_size: int = VOCAB_SIZE) -> Sampler:
    return Sampler(max_num_rows=NUM_ROWS, vocab_size=vocab_size, device=CPU, choice=choice)


def make_start(
    sampling: SamplingParams,
    *,
    row: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    output: Sequence[int] = (),
    seed: int = 7,
    index: int = 0,
    eos: tuple[int, ...] = (),
) -> SequenceStart:
    return SequenceStart(
        row=row,
        token_ids=pack_token_ids([*prompt, *output]),
        num_prompt_tokens=len(prompt),
        block_ids=[],
        sampling=sampling,
        seed=seed,
        index=index,
        eos_token_ids=eos,
    )


def make_logits(
    num_rows: int = 1, *, vocab_size: int = VOCAB_SIZE, seed: int = 0, scale: float = 3.0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def sample_one(sampler: Sampler, logits: Tensor, *, row: int = 0, position: int = 3) -> int:
    """Return the token sampled for one row of logits `[vocab_size]`."""
    return int(sampler.sample(logits.clone().unsqueeze(0), [row], [position]).token_ids[0])


def draw_many(sampler: Sampler, logits: Tensor, num_draws: int) -> list[int]:
    """Return draws of row 0 from the same logits `[vocab_size]` at successive positions."""
    batch = min(num_draws, 2000)
    drawn: list[int] = []
    for first in range(0, num_draws, batch):
        positions = range(first, first + batch)
        repeated = logits.expand(batch, -1).clone()
        drawn += sampler.sample(repeated, [0] * batch, list(positions)).token_ids.tolist()
    return drawn


@dataclass(frozen=True)
class Reference:
    """The definition in plain float64: every token's probability, and the inverse of their sum."""

    probabilities: np.ndarray
    order: np.ndarray

    @classmethod
    def of(cls, logits: np.ndarray, sampling: SamplingParams) -> Reference:
        scores = logits.astype(np.float64)
        ordered = np.array(sorted(range(len(scores)), key=lambda i: (-scores[i], i)))
        weights = np.exp((scores - scores.max()) / sampling.temperature)
        kept = ordered[weights[ordered] >= sampling.min_p]
        if sampling.top_k:
            kept = kept[: sampling.top_k]
        if sampling.top_p < 1.0:
            mass = weights[kept] / weights[kept].sum()
            before = np.concatenate(([0.0], np.cumsum(mass)[:-1]))
            kept = kept[before < sampling.top_p]
        probabilities = np.zeros(len(scores))
        probabilities[kept] = weights[kept] / weights[kept].sum()
        is_cut = 0 < sampling.top_k < len(scores)
        is_filtered = is_cut or sampling.top_p < 1.0 or sampling.min_p > 0.0
        return cls(probabilities, ordered if is_filtered else np.arange(len(scores)))

    def tokens(self, uniform: float, slack: float) -> set[int]:
        """Return the token at `uniform`, and any other within `slack` of it."""
        sums = np.cumsum(self.probabilities[self.order])
        ends = [min(max(uniform + d, 0.0), 1.0) for d in (-slack, 0.0, slack)]
        found = np.minimum(np.searchsorted(sums, ends, side="right"), len(sums) - 1)
        ids = self.order[found[0] : found[-1] + 1]
        return {int(i) for i in ids if self.probabilities[i] > 0.0}


def assert_fits(drawn: Sequence[int], probabilities: np.ndarray) -> None:
    """Fail if the draws are from another distribution: chi-square, 5 standard deviations."""
    counts = np.bincount(drawn, minlength=len(probabilities))
    assert not counts[probabilities == 0.0].any()
    expected = probabilities * len(drawn)
    # Rare tokens are taken together, so that the statistic is near its limit law.
    is_common = expected >= 10
    observed_cells = [*counts[is_common], counts[~is_common].sum()]
    expected_cells = [*expected[is_common], expected[~is_common].sum()]
    cells = [(o, e) for o, e in zip(observed_cells, expected_cells, strict=True) if e > 1e-9]
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    freedom = max(len(cells) - 1, 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5


# Random numbers


def test_finalizer_gives_the_published_outputs_of_splitmix64() -> None:
    gamma = 0x9E3779B97F4A7C15
    words = np.array([(1234567 + k * gamma) % 2**64 for k in (1, 2, 3)], dtype=np.uint64)
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert finalize(words).tolist() == expected


def test_uniforms_are_even_and_below_one() -> None:
    starts = np.full(100_000, generator_start(1, 0), dtype=np.uint64)
    numbers = uniforms(starts, np.arange(100_000))
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert_fits((numbers * 50).astype(int).tolist(), np.full(50, 1 / 50))
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_neighbouring_seeds_indices_and_positions_are_independent() -> None:
    for starts in (
        [generator_start(seed, 0) for seed in range(-10_000, 10_000)],
        [generator_start(5, index) for index in range(20_000)],
    ):
        numbers = uniforms(np.array(starts, dtype=np.uint64), np.zeros(20_000, dtype=np.int64))
        assert len(set(numbers.tolist())) == 20_000
        assert_fits((numbers * 50).astype(int).tolist(), np.full(50, 1 / 50))


# Greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 8])
def test_greedy_is_argmax(sampler: Sampler, dtype: torch.dtype, num_rows: int) -> None:
    for row in range(num_rows):
        sampler.start(make_start(GREEDY, row=row))
    logits = make_logits(num_rows).to(dtype)
    expected = logits.float().numpy().argmax(-1).tolist()
    sampled = sampler.sample(logits, list(range(num_rows)), [3] * num_rows)
    assert sampled.token_ids.dtype == torch.int64
    assert sampled.token_ids.tolist() == expected
    assert sampled.logprobs == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_of_equal_tokens(sampler: Sampler, dtype: torch.dtype) -> None:
    sampler.start(make_start(GREEDY))
    logits = torch.full((VOCAB_SIZE,), -5.0, dtype=dtype)
    logits[[17, 40, 299]] = -1.0
    assert sample_one(sampler, logits) == 17
    zeros = torch.full((VOCAB_SIZE,), -5.0, dtype=dtype)
    zeros[9], zeros[10] = -0.0, 0.0
    assert sample_one(sampler, zeros) == 9


def test_logits_beyond_the_vocabulary_are_ignored(sampler: Sampler) -> None:
    plain = SamplingParams(temperature=1.0)
    sampler.start(make_start(GREEDY, row=0))
    sampler.start(make_start(plain, row=1))
    sampler.start(make_start(SamplingParams(top_k=5, top_p=0.9, logprobs=2), row=2))
    logits = make_logits(3)
    wide = torch.cat((logits, torch.full((3, 20), 1e9)), dim=1)
    expected = sampler.sample(logits.clone(), [0, 1, 2], [3, 3, 3])
    sampled = sampler.sample(wide, [0, 1, 2], [3, 3, 3])
    assert sampled.token_ids.tolist() == expected.token_ids.tolist()
    assert sampled.logprobs == expected.logprobs


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=100.0, top_k=1),
        SamplingParams(temperature=100.0, top_p=1e-9),
        SamplingParams(temperature=100.0, min_p=1.0, top_k=1),
    ],
    ids=["top_k", "top_p", "both"],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_narrowest_filter_equals_greedy(
    sampler: Sampler, sampling: SamplingParams, is_tied: bool
) -> None:
    logits = make_logits(seed=3)[0]
    if is_tied:
        logits = (logits / 4).round()
    sampler.start(make_start(sampling))
    assert {sample_one(sampler, logits, position=p) for p in range(50)} == {int(logits.argmax())}


# Distribution and exact choice

FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.02, temperature=1.3),
]
FILTER_NAMES = ["none", "temperature", "top_k", "top_p", "min_p", "all"]


@pytest.mark.parametrize("sampling", FILTERS, ids=FILTER_NAMES)
def test_draws_follow_the_filtered_distribution(sampler: Sampler, sampling: SamplingParams) -> None:
    sampler.start(make_start(sampling))
    logits = make_logits(seed=1)[0]
    drawn = draw_many(sampler, logits, 20_000)
    assert_fits(drawn, Reference.of(logits.numpy(), sampling).probabilities)


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    vocab_size=st.sampled_from([1, 2, 127, 128, 129, 300, 1500]),
    scale=st.sampled_from([0.01, 1.0, 4.0, 30.0]),
    is_coarse=st.booleans(),
    temperature=st.sampled_from([0.3, 1.0, 2.5, 100.0]),
    top_k=st.sampled_from([0, 1, 3, 50, 1400, 5000]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 0.01]),
    min_p=st.sampled_from([0.0, 0.001, 0.2, 1.0]),
)
def test_both_choices_match_the_reference(
    seed: int,
    vocab_size: int,
    scale: float,
    is_coarse: bool,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((8, vocab_size)) * scale).astype(np.float32)
    if is_coarse:
        # As with bfloat16, many scores are equal, also where a filter ends.
        logits = np.round(logits * 4).astype(np.float32) / np.float32(4)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, rng.integers(vocab_size)] = 0.0
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    uniform = uniforms(np.array([generator_start(seed, 0)] * 8, dtype=np.uint64), np.arange(8))
    # Where rounding may decide, either token will do.
    nearby = [
        replace(sampling, top_p=min(top_p * factor, 1.0)) for factor in (1 - 1e-6, 1.0, 1 + 1e-6)
    ]
    expected = [
        set().union(*(Reference.of(row, near).tokens(u, 2e-5) for near in nearby))
        for row, u in zip(logits, uniform, strict=True)
    ]
    for choice in (NumpyChoice(), TorchChoice()):
        sampler = make_sampler(choice, vocab_size)
        sampler.start(make_start(sampling, seed=seed))
        sampled = sampler.sample(torch.from_numpy(logits.copy()), [0] * 8, list(range(8)))
        for token_id, allowed in zip(sampled.token_ids.tolist(), expected, strict=True):
            assert token_id in allowed


def test_both_choices_agree_on_a_large_vocabulary() -> None:
    logits = make_logits(12, vocab_size=32_000, seed=5)
    kinds = [GREEDY, *FILTERS, SamplingParams(top_k=900), SamplingParams(top_k=2000)]
    kinds += [SamplingParams(top_p=0.999), SamplingParams(top_p=0.9, temperature=3.0)]
    kinds += [SamplingParams(top_p=0.5, min_p=0.001)]
    tokens = []
    for choice in (NumpyChoice(), TorchChoice()):
        sampler = make_sampler(choice, 32_000)
        for row, sampling in enumerate(kinds):
            sampler.start(make_start(sampling, row=row, seed=row))
        tokens.append(sampler.sample(logits.clone(), list(range(12)), [9] * 12).token_ids.tolist())
    assert tokens[0] == tokens[1]


def test_extreme_uniforms_never_choose_a_token_without_weight(choice: Choice) -> None:
    logits = torch.full((1, 400), -torch.inf)
    logits[0, [130, 131, 260]] = torch.tensor([1.0, 2.0, 1.0])
    for uniform in (0.0, 2.0**-53, 1 - 2.0**-53):
        draws = Draws(
            temperature=np.array([1.0]),
            top_k=np.array([400]),
            top_p=np.array([1.0]),
            min_p=np.array([0.0]),
            uniform=np.array([uniform]),
        )
        first = uniform < 0.5
        unfiltered = choice.unfiltered(logits, np.arange(1), draws)
        filtered = choice.filtered(logits, np.arange(1), draws)
        assert unfiltered.tolist() == [130 if first else 260]
        assert filtered.tolist() == [131 if first else 260]


@pytest.mark.parametrize("sampling", FILTERS, ids=FILTER_NAMES)
def test_minus_infinity_is_never_chosen(sampler: Sampler, sampling: SamplingParams) -> None:
    sampler.start(make_start(sampling))
    logits = torch.full((VOCAB_SIZE,), -torch.inf)
    logits[[5, 250]] = 0.0
    assert set(draw_many(sampler, logits, 200)) == {5, 250}


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_the_lowest_temperatures_take_the_likeliest(sampler: Sampler, temperature: float) -> None:
    logits = make_logits()[0]
    sampler.start(make_start(SamplingParams(temperature=temperature), row=0))
    sampler.start(make_start(SamplingParams(temperature=temperature, top_p=0.9), row=1))
    for row in (0, 1):
        assert sample_one(sampler, logits, row=row) == int(logits.argmax())


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (SamplingParams(temperature=1.5, top_k=9), TopKLogitsWarper(top_k=9)),
        (SamplingParams(temperature=1.5, top_p=0.7), TopPLogitsWarper(top_p=0.7)),
        (SamplingParams(temperature=1.5, min_p=0.03), MinPLogitsWarper(min_p=0.03)),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_filters_keep_what_transformers_keeps(
    sampler: Sampler, sampling: SamplingParams, warper: TopKLogitsWarper
) -> None:
    # A near flat row, so that every kept token is drawn.
    logits = make_logits(seed=8, scale=2.0)[:, :60]
    logits = torch.cat((logits, torch.full((1, VOCAB_SIZE - 60), -50.0)), dim=1)
    warmed = TemperatureLogitsWarper(1.5)(torch.tensor([[0]]), logits)
    kept = warper(torch.tensor([[0]]), warmed)
    expected = torch.softmax(kept.double(), dim=-1)[0].numpy()
    sampler.start(make_start(sampling))
    drawn = draw_many(sampler, logits[0], 10_000)
    assert set(drawn) == set(np.flatnonzero(expected > 1e-4).tolist())
    assert_fits(drawn, expected)


# Penalties, bias, min_tokens


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


@pytest.mark.parametrize("strength", [0.01, 100.0])
def test_an_absurd_penalty_breaks_its_own_row_only(sampler: Sampler, strength: float) -> None:
    sampling = SamplingParams(temperature=0.0, repetition_penalty=strength)
    sampler.start(make_start(sampling, row=0, prompt=range(50)))
    sampler.start(make_start(GREEDY, row=1))
    logits = make_logits(2)
    # Divided by a hundredth, it is no float any more.
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


# Purity

EVERYTHING = SamplingParams(
    max_tokens=100,
    temperature=1.2,
    top_k=80,
    top_p=0.97,
    min_p=0.001,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.3,
    logit_bias={5: 4.0, 6: -4.0},
    min_tokens=4,
    stop_token_ids=[8, 9],
    logprobs=5,
)
MIXED = [
    GREEDY,
    SamplingParams(),
    EVERYTHING,
    SamplingParams(top_k=5),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.0, logit_bias={3: 8.0}, min_tokens=2),
    SamplingParams(min_p=0.1, presence_penalty=-1.0),
]


def run_alone(choice: Choice | None, sampling: SamplingParams, logits: Tensor) -> list[int]:
    """Return the tokens of a sequence by itself; `logits` is `[num_steps, vocab_size]`."""
    sampler = make_sampler(choice)
    sampler.start(make_start(sampling, eos=(2,)))
    return [sample_one(sampler, row, position=3 + i) for i, row in enumerate(logits)]


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


# Broken rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("broken", ["nan", "-nan", "inf", "all -inf"])
@pytest.mark.parametrize("token_id", [0, 8, VOCAB_SIZE - 1])
def test_a_broken_row_gives_minus_one_and_disturbs_no_other(
    sampler: Sampler, dtype: torch.dtype, broken: str, token_id: int
) -> None:
    logits = make_logits(2 * len(MIXED), seed=6).to(dtype)
    rows, positions = list(range(2 * len(MIXED))), [3] * (2 * len(MIXED))
    kinds = [kind for kind in MIXED for _ in range(2)]
    values = {"nan": math.nan, "-nan": -math.nan, "inf": math.inf, "all -inf": -math.inf}
    for row, sampling in enumerate(kinds):
        sampler.start(make_start(sampling, row=row))
    expected = sampler.sample(logits.clone(), rows, positions)
    for row, sampling in enumerate(kinds):
        sampler.start(make_start(sampling, row=row))
    # Every other row breaks, one of each kind.
    logits[::2, slice(None) if broken == "all -inf" else token_id] = values[broken]
    sampled = sampler.sample(logits, rows, positions)
    assert sampled.token_ids[::2].tolist() == [-1] * len(MIXED)
    assert sampled.token_ids[1::2].tolist() == expected.token_ids[1::2].tolist()
    assert sampled.logprobs[1::2] == expected.logprobs[1::2]
    assert sampled.logprobs[::2] == [None] * len(MIXED)


def test_forbidding_every_token_gives_minus_one(choice: Choice) -> None:
    sampler = make_sampler(choice, vocab_size=2)
    sampler.start(make_start(SamplingParams(min_tokens=1, stop_token_ids=[1]), eos=(0,)))
    assert sample_one(sampler, torch.zeros(2)) == -1


def test_a_broken_step_counts_no_token(sampler: Sampler) -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0)
    sampler.start(make_start(sampling))
    sample_one(sampler, torch.full((VOCAB_SIZE,), math.nan))
    scores = torch.zeros(1, VOCAB_SIZE)
    sampler.sample(scores, [0], [4])
    assert not scores.any()


def test_a_mask_that_allows_nothing_gives_minus_one_and_counts_no_token(sampler: Sampler) -> None:
    sampling = SamplingParams(temperature=0.0, frequency_penalty=2.0, logprobs=1)
    sampler.start(replace(make_start(sampling), is_masked=True))
    size = num_mask_bytes(VOCAB_SIZE)
    sampled = sampler.sample(make_logits(), [0], [3], b"\x00" * size)
    assert (sampled.token_ids.tolist(), sampled.logprobs) == ([-1], [None])
    scores = torch.zeros(1, VOCAB_SIZE)
    sampler.sample(scores, [0], [3], b"\xff" * size)
    assert not scores.any()


# Log-probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(sampler: Sampler, dtype: torch.dtype) -> None:
    logits = make_logits(3, seed=9).to(dtype)
    expected = torch.log_softmax(logits.double(), dim=-1)
    sampler.start(make_start(EVERYTHING, row=0))
    sampler.start(make_start(GREEDY, row=1))
    sampler.start(make_start(SamplingParams(temperature=0.5, logprobs=0), row=2))
    sampled = sampler.sample(logits, [0, 1, 2], [3, 3, 3])
    full, none, only_chosen = sampled.logprobs
    assert none is None
    assert isinstance(full, TokenLogprobs)
    assert isinstance(only_chosen, TokenLogprobs)
    likeliest = expected[0].sort(descending=True, stable=True)
    assert full.token_ids == likeliest.indices[:5].tolist()
    assert full.logprobs == pytest.approx(likeliest.values[:5].tolist(), abs=1e-5)
    chosen = sampled.token_ids.tolist()
    assert full.chosen == pytest.approx(float(expected[0, chosen[0]]), abs=1e-5)
    assert only_chosen.chosen == pytest.approx(float(expected[2, chosen[2]]), abs=1e-5)
    assert only_chosen.token_ids == []
    assert only_chosen.logprobs == []


@pytest.mark.parametrize("num_tokens", [1, 20, VOCAB_SIZE])
def test_top_tokens_break_ties_by_the_lower_id(choice: Choice, num_tokens: int) -> None:
    scores = (make_logits(5, seed=1) / 2).round()
    expected = scores.sort(dim=-1, descending=True, stable=True).indices[:, :num_tokens]
    assert choice.top_tokens(scores, num_tokens).tolist() == expected.tolist()


def test_ranks_take_both_zeros_for_one_score(choice: Choice) -> None:
    scores = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]])
    assert choice.top_tokens(scores, 5).tolist() == [[1, 2, 3, 4, 0]]


# Surroundings


def test_inference_mode_may_come_and_go(sampler: Sampler) -> None:
    logits = make_logits(4)
    expected = run_alone(None, EVERYTHING, logits)
    tokens: list[int] = []
    for i, row in enumerate(logits):
        with torch.inference_mode(mode=i % 2 == 0):
            sampler.start(make_start(EVERYTHING, row=i, output=tokens, eos=(2,)))
        with torch.inference_mode(mode=i < 2):
            tokens.append(sample_one(sampler, row, row=i, position=3 + i))
    assert tokens == expected


def test_a_step_without_rows_samples_nothing(sampler: Sampler) -> None:
    sampled = sampler.sample(torch.zeros(0, VOCAB_SIZE), [], [])
    assert sampled.token_ids.tolist() == []
    assert sampled.logprobs == []


class RecordingChoice(NumpyChoice):
    """Remembers which ways of choosing were taken, and from which dtypes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, torch.dtype]] = []

    def greedy(self, scores: Tensor, indices: IntArray) -> Tensor:
        self.calls.append(("greedy", scores.dtype))
        return super().greedy(scores, indices)

    def unfiltered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        self.calls.append(("unfiltered", scores.dtype))
        return super().unfiltered(scores, indices, draws)

    def filtered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        self.calls.append(("filtered", scores.dtype))
        return super().filtered(scores, indices, draws)


def test_warm_up_chooses_in_every_way_from_both_dtypes() -> None:
    choice = RecordingChoice()
    make_sampler(choice=choice).warm_up(torch.bfloat16)
    ways = ("greedy", "unfiltered", "filtered")
    dtypes = (torch.bfloat16, torch.float32)
    assert choice.calls == [(way, dtype) for dtype in dtypes for way in ways]
