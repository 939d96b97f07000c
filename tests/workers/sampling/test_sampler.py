"""Sampling: greedy choices, filters, draws, and steps that change nothing else."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagedray.sampling_params import SamplingParams
from tests.workers.sampling.sampler_rig import (
    CPU,
    EVERYTHING,
    GREEDY,
    MIXED,
    NUM_ROWS,
    VOCAB_SIZE,
    Reference,
    assert_fits,
    draw_many,
    exact_noise,
    make_logits,
    make_sampler,
    make_start,
    run_alone,
    sample_one,
)
from workers.sampler import Sampler
from workers.sampling.choice import Choice, Draws, IntArray
from workers.sampling.device_choice import TorchChoice
from workers.sampling.edits import num_mask_bytes
from workers.sampling.noise import generator_start, noise_keys
from workers.sampling.numpy_choice import NumpyChoice

FILTERS = [
    SamplingParams(),
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.05),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.02, temperature=1.3),
]
FILTER_NAMES = ["none", "temperature", "top_k", "top_p", "min_p", "all"]


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


@pytest.mark.parametrize("sampling", FILTERS, ids=FILTER_NAMES)
@pytest.mark.parametrize("num_draws", [10_000, pytest.param(102_400, marks=pytest.mark.slow)])
def test_draws_follow_the_filtered_distribution(
    choice: Choice, num_draws: int, sampling: SamplingParams
) -> None:
    sampler = make_sampler(choice)
    sampler.start(make_start(sampling))
    logits = make_logits(seed=1)[0]
    drawn = draw_many(sampler, logits, num_draws)
    assert_fits(drawn, Reference.of(logits.numpy(), sampling).probabilities)


@settings(max_examples=50)
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
    keys = noise_keys(np.array([generator_start(seed, 0)] * 8, dtype=np.uint64), np.arange(8))
    # Where rounding may decide, either token will do.
    nearby = [
        replace(sampling, top_p=min(top_p * factor, 1.0)) for factor in (1 - 1e-6, 1.0, 1 + 1e-6)
    ]
    expected = [
        set().union(
            *(Reference.of(row, near).tokens(noise, 1e-5 + 1e-6 * scale) for near in nearby)
        )
        for row, key in zip(logits, keys.tolist(), strict=True)
        for noise in [exact_noise(key, range(vocab_size))]
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
        super().__init__()
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


@pytest.mark.parametrize("num_rows_at_once", [1, 3, 8])
def test_rows_sampled_in_parts_get_what_they_get_at_once(num_rows_at_once: int) -> None:
    num_rows = len(MIXED)
    rows, logits = list(range(num_rows)), make_logits(num_rows)
    mask = bytes(num_mask_bytes(VOCAB_SIZE) - 1) + b"\xff"
    found = []
    for max_score_bytes in (2**26, 4 * VOCAB_SIZE * num_rows_at_once):
        choice = RecordingChoice()
        sampler = Sampler(
            max_num_rows=num_rows,
            vocab_size=VOCAB_SIZE,
            device=CPU,
            choice=choice,
            max_score_bytes=max_score_bytes,
        )
        for row, sampling in enumerate(MIXED):
            start = make_start(sampling, row=row, output=[row, 5])
            # Every third row samples under a mask.
            sampler.start(replace(start, mask_start=0 if row % 3 == 0 else None))
        masks = b"".join(
            (b"\xff" * (4 * index) + mask)[: num_mask_bytes(VOCAB_SIZE)] for index in (1, 2, 3)
        )
        sampled = [
            sampler.sample(logits.clone(), rows, [5] * num_rows, masks, released=[1]),
            # Penalties count the first tokens, and one row is no longer masked.
            sampler.sample(logits.clone(), rows, [6] * num_rows, masks[: 2 * len(masks) // 3]),
        ]
        found.append([(one.token_ids.tolist(), one.logprobs) for one in sampled])
        assert (len(choice.calls) > 8) == (max_score_bytes < 2**26 and num_rows_at_once < num_rows)
    assert found[0] == found[1]
    assert sum(report is not None for report in found[1][0][1]) == 2
