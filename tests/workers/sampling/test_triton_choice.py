"""The definition of a choice in float64, and how close the sum of a token is to the highest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from workers.sampling.choice import Choice, Draws
from workers.sampling.device_choice import TorchChoice, TritonChoice, Uploader, upload_draws
from workers.sampling.noise import noise
from workers.sampling.numpy_choice import NumpyChoice

NUM_ROWS = 6
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass(frozen=True, slots=True, eq=False)
class RankedRow:
    """A row of scores, likeliest first."""

    ids: np.ndarray
    scores: np.ndarray
    _sums: dict[float, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def of(cls, scores: torch.Tensor) -> RankedRow:
        values = scores.double().cpu().numpy()
        ids = np.argsort(-values, kind="stable")
        return cls(ids, values[ids])

    def sums(self, temperature: float, top_k: int, min_p: float) -> np.ndarray:
        """Return the running sums of the weights that top_k and min_p keep."""
        if temperature not in self._sums:
            weights = np.exp((self.scores - self.scores[0]) / temperature)
            self._sums[temperature] = -weights, weights.cumsum()
        negative, sums = self._sums[temperature]
        return sums[: min(top_k, int(negative.searchsorted(-min_p, side="right")))]


def likely_tokens(row: RankedRow, draws: Draws, index: int, *, tolerance: float) -> set[int]:
    """Return the tokens that a draw may give if shares and sums are right to a tolerance."""
    temperature, min_p = float(draws.temperature[index]), float(draws.min_p[index])
    top_k, top_p = int(draws.top_k[index]), float(draws.top_p[index])
    sums = row.sums(temperature, top_k, min_p)
    keys = torch.from_numpy(draws.key[index : index + 1])
    numbers = noise(keys, torch.from_numpy(row.ids[: len(sums)]))[0].double().numpy()
    numbers += row.scores[: len(sums)] / temperature
    found: set[int] = set()
    for shift in (-tolerance, 0.0, tolerance) if top_p < 1.0 else (0.0,):
        num_kept = len(sums)
        if top_p < 1.0:
            num_kept = min(int(sums.searchsorted((top_p + shift) * sums[-1])) + 1, len(sums))
        kept = numbers[:num_kept]
        highest = kept.max()
        slack = 1e-5 + 1e-6 * abs(highest)
        found.update(row.ids[:num_kept][kept >= highest - slack].tolist())
    return found


@pytest.fixture
def device() -> torch.device:
    return DEVICE


def make_scores(
    num_rows: int, vocab_size: int, *, seed: int, scale: float, is_coarse: bool
) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    scores = (rng.standard_normal((num_rows, vocab_size)) * scale).astype(np.float32)
    if is_coarse:
        # Many scores are equal, also where a filter ends.
        scores = np.round(scores * 4).astype(np.float32) / np.float32(4)
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    scores[:, rng.integers(vocab_size)] = 0.0
    return torch.from_numpy(scores)


def make_draws(num_rows: int, vocab_size: int, seed: int) -> Draws:
    rng = np.random.default_rng(seed)
    return Draws(
        temperature=rng.choice([0.3, 1.0, 2.5, 100.0], num_rows),
        top_k=np.minimum(rng.choice([vocab_size, vocab_size, 1, 3, 50], num_rows), vocab_size),
        top_p=rng.choice([1.0, 0.999, 0.9, 0.3, 0.01], num_rows),
        min_p=rng.choice([0.0, 0.0, 0.001, 0.2, 1.0], num_rows),
        key=rng.integers(-(2**63), 2**63 - 1, num_rows),
    )


def few_choice(capacity: int) -> TritonChoice:
    """Return a choice that guesses from few tokens, and hence often needs another pass."""
    return TritonChoice(Uploader(DEVICE), capacity=capacity, sample_size=32)


SCORES = (
    (1, 1.0, False),
    (129, 4.0, True),
    (300, 1.0, False),
    (1500, 30.0, True),
    (1500, 0.01, False),
)


@pytest.mark.parametrize(
    ("capacity", "vocab_size", "scale", "is_coarse"),
    [
        *((4, *case) for case in (SCORES[0], SCORES[3])),
        # Scores that are close to each other are also in the test of equal scores.
        *(pytest.param(4, *case, marks=pytest.mark.slow) for case in (*SCORES[1:3], SCORES[4])),
        # Every token of a row fits.
        (4096, *SCORES[1]),
        *(pytest.param(4096, *case, marks=pytest.mark.slow) for case in (SCORES[0], *SCORES[2:])),
    ],
)
def test_tokens_are_those_of_the_cpu(
    vocab_size: int, scale: float, is_coarse: bool, capacity: int, device: torch.device
) -> None:
    scores = make_scores(NUM_ROWS, vocab_size, seed=vocab_size, scale=scale, is_coarse=is_coarse)
    draws, indices = make_draws(NUM_ROWS - 1, vocab_size, seed=1), np.arange(1, NUM_ROWS)
    ours, theirs, moved = few_choice(capacity), NumpyChoice(), scores.to(device)
    assert ours.greedy(moved, indices).tolist() == theirs.greedy(scores, indices).tolist()
    expected = theirs.unfiltered(scores, indices, draws)
    assert ours.unfiltered(moved, indices, draws).tolist() == expected.tolist()
    # The sums are equal, too.
    expected = theirs.drawn_maxima(scores, indices, draws, 7)
    assert ours.drawn_maxima(moved, indices, draws, 7).tolist() == expected.tolist()
    expected = theirs.filtered(scores, indices, draws)
    assert ours.filtered(moved, indices, draws).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "choice",
    [NumpyChoice(), TorchChoice(), TritonChoice(Uploader(DEVICE))],
    ids=["numpy", "torch", "triton"],
)
@pytest.mark.parametrize("sizes", [(300,), (129, 171), (100, 0, 200)], ids=str)
def test_the_token_of_a_row_is_among_the_local_maxima_of_all_parts(
    sizes: tuple[int, ...], choice: Choice, device: torch.device
) -> None:
    scores = make_scores(8, 300, seed=5, scale=1.0, is_coarse=True)
    scores[0, 200], scores[1, 7], scores[2] = math.nan, math.inf, -math.inf
    # Both zeros are the same score.
    scores[3] = -1.0
    scores[3, 250], scores[3, 140] = 0.0, -0.0
    # Processors make NaN with this sign.
    scores[4, 250] = -math.nan
    rows, draws = np.arange(8), make_draws(8, 300, seed=2)
    expected = NumpyChoice().greedy(scores, rows)
    expected_draws = NumpyChoice().unfiltered(scores, rows, draws)
    parts = [
        (part, int(end) - size)
        for part, end, size in zip(
            scores.to(device).split(sizes, 1), np.cumsum(sizes), sizes, strict=True
        )
    ]
    local_maxima = [choice.local_maxima(*part) for part in parts]
    found = choice.tokens_of(torch.stack(local_maxima, dim=1))
    assert found.tolist() == expected.tolist()
    assert found[:5].tolist() == [-1, -1, -1, 140, -1]
    drawn_maxima = [choice.drawn_maxima(part, rows, draws, first_id) for part, first_id in parts]
    found = choice.tokens_of(torch.stack(drawn_maxima, dim=1))
    assert found.tolist() == expected_draws.tolist()


@pytest.mark.parametrize("broken", [math.nan, -math.nan, math.inf])
def test_a_broken_row_gives_minus_one(broken: float, device: torch.device) -> None:
    scores = make_scores(3, 100, seed=0, scale=1.0, is_coarse=False)
    scores[0, 70] = broken
    scores[1] = -math.inf
    draws, indices, choice = make_draws(3, 100, seed=0), np.arange(3), few_choice(64)
    scores = scores.to(device)
    for token_ids in (
        choice.greedy(scores, indices),
        choice.unfiltered(scores, indices, draws),
        choice.filtered(scores, indices, draws),
    ):
        assert token_ids[:2].tolist() == [-1, -1]
        assert token_ids[2] >= 0


def tied_scores(kind: str, num_rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    """Return bfloat16 scores of which many are equal; the last two rows are broken."""
    rng = np.random.default_rng(seed)
    values = {
        "all equal": np.full((num_rows, vocab_size), 1.5),
        "two values": rng.choice([0.0, -1.0], (num_rows, vocab_size)),
        "both zeros": rng.choice([0.0, -0.0], (num_rows, vocab_size)),
        "narrow": 3.0 + rng.standard_normal((num_rows, vocab_size)) * 1e-2,
        "coarse": np.round(rng.standard_normal((num_rows, vocab_size)) * 4.0),
    }[kind]
    scores = torch.from_numpy(values.astype(np.float32)).bfloat16()
    scores[0, rng.random(vocab_size) < 0.5] = -math.inf
    scores[0, rng.integers(vocab_size)] = 0.0
    scores[-2, rng.integers(vocab_size)] = math.nan
    scores[-1, rng.integers(vocab_size)] = math.inf
    return scores


@pytest.mark.parametrize("kind", ["all equal", "two values", "both zeros", "narrow", "coarse"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capacity", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_equal_scores_are_kept_by_id(
    kind: str, seed: int, capacity: int, device: torch.device
) -> None:
    num_rows, vocab_size = 6, 500 + 129 * seed
    scores, indices = tied_scores(kind, num_rows, vocab_size, seed), np.arange(num_rows)
    draws = make_draws(num_rows, vocab_size, seed=seed + 10)
    found = few_choice(capacity).filtered(scores.to(device), indices, draws)
    # Sums of the CPU's reference are float32, and many equal weights meet top_p exactly.
    for index, row in enumerate(scores[:-2]):
        allowed = likely_tokens(RankedRow.of(row), draws, index, tolerance=1e-7)
        assert int(found[index]) in allowed
    assert found[-2:].tolist() == [-1, -1]


def test_top_k_alone_keeps_the_lowest_ids_of_equal_scores(device: torch.device) -> None:
    num_rows, vocab_size = 6, 500
    scores = tied_scores("all equal", num_rows + 2, vocab_size, seed=3)[:num_rows]
    draws, indices = make_draws(num_rows, vocab_size, seed=3), np.arange(num_rows)
    draws.top_k[:], draws.top_p[:], draws.min_p[:] = [1, 2, 100, 240, 260, 499], 1.0, 0.0
    expected = NumpyChoice().filtered(scores, indices, draws)
    found = few_choice(8).filtered(scores.to(device), indices, draws)
    assert found.tolist() == expected.tolist()


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ["flat", "peaked", "narrow", "coarse"])
def test_draws_differ_only_within_rounding(shape: str, dtype: torch.dtype) -> None:
    num_rows, vocab_size, num_calls = 256, 128256, 2
    generator = torch.Generator("cuda").manual_seed(1)
    row_scores = torch.randn(8, vocab_size, device="cuda", generator=generator)
    if shape == "peaked":
        row_scores = row_scores.sign() * row_scores.abs().pow(1.5) * 2.0
    if shape == "narrow":
        row_scores = row_scores * 0.01
    if shape == "coarse":
        row_scores = (row_scores * 2.0).round()
    row_scores = row_scores.to(dtype)
    rows = [RankedRow.of(row) for row in row_scores]
    indices, choice = np.arange(num_rows) % len(rows), TritonChoice(Uploader(DEVICE))
    for call in range(num_calls):
        draws = make_draws(num_rows, vocab_size, seed=call)
        found = choice.filtered(row_scores, indices, draws).tolist()
        for index in range(num_rows):
            row = rows[indices[index]]
            assert found[index] in likely_tokens(row, draws, index, tolerance=1e-6)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.3, 1.3, 4.0])
@pytest.mark.parametrize("capacity", [64, 4096])
def test_tokens_of_a_large_vocabulary_are_those_of_the_cpu(
    dtype: torch.dtype, scale: float, capacity: int
) -> None:
    num_rows, vocab_size = 128, 128256
    scores = make_scores(num_rows, vocab_size, seed=3, scale=scale, is_coarse=False).to(dtype)
    indices, moved = np.arange(num_rows), scores.cuda()
    ours, theirs = TritonChoice(Uploader(DEVICE), capacity=capacity), NumpyChoice()
    draws = make_draws(num_rows, vocab_size, seed=4)
    assert ours.greedy(moved, indices).tolist() == theirs.greedy(scores, indices).tolist()
    found, expected = ours.filtered(moved, indices, draws), theirs.filtered(scores, indices, draws)
    # The CPU sums float32 weights where top_p alone limits a row, so that rounding may decide.
    assert (found.cpu() != expected).sum() <= 1
    found = ours.drawn_maxima(moved, indices, draws, 7)
    assert found.tolist() == theirs.drawn_maxima(scores, indices, draws, 7).tolist()


@pytest.mark.gpu
@GPU
def test_tokens_depend_on_no_other_row() -> None:
    num_rows, vocab_size = 64, 128256
    scores = make_scores(num_rows, vocab_size, seed=5, scale=2.0, is_coarse=False).bfloat16().cuda()
    draws, choice = make_draws(num_rows, vocab_size, seed=6), TritonChoice(Uploader(DEVICE))
    together = choice.filtered(scores, np.arange(num_rows), draws)
    for row in range(0, num_rows, 7):
        alone = draws.of_rows(slice(row, row + 1))
        assert choice.filtered(scores, np.array([row]), alone).tolist() == [int(together[row])]


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_kernels_see_one_alignment(num_rows: int) -> None:
    draws = make_draws(num_rows, 50, seed=0)
    indices, parameters = upload_draws(Uploader(DEVICE), np.arange(num_rows), draws)
    assert (parameters.data_ptr() - indices.data_ptr()) % 16 == 0
    assert indices.tolist() == list(range(num_rows))
    assert parameters[1].tolist() == draws.top_k.tolist()
    assert parameters[4].view(torch.int64).tolist() == draws.key.tolist()
