"""Noise of draws: a distribution, independent of its neighbors, and the same bits everywhere."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from attention.kernels.cpu.draw import Draw
from attention.kernels.triton.choice.scores import noise_bounds, noise_of
from tests.workers.sampling.sampler_rig import exact_gumbel, exact_noise
from workers.sampling.choice import Choice, Draws
from workers.sampling.device_choice import TorchChoice
from workers.sampling.noise import finalize, generator_start, gumbel, noise, noise_keys
from workers.sampling.numpy_choice import NumpyChoice

PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423]
"""The first outputs of SplitMix64 that starts at 1234567."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_NUMBERS = {"ids": 102_400, "positions": 102_400, "indices": 20_480, "seeds": 20_480}


def test_finalizer_gives_the_published_outputs_of_splitmix64() -> None:
    gamma = 0x9E3779B97F4A7C15
    words = np.array([(1234567 + k * gamma) % 2**64 for k in (1, 2, 3)], dtype=np.uint64)
    assert finalize(words).tolist() == PUBLISHED


def test_keys_are_the_published_outputs_by_position() -> None:
    keys = noise_keys(np.full(3, 1234567, dtype=np.uint64), np.array([3, 1, 2]))
    assert [key % 2**64 for key in keys.tolist()] == [PUBLISHED[place] for place in (2, 0, 1)]


def test_noise_is_that_of_the_definition() -> None:
    keys = [0, -1, 2**63 - 1, -(2**63), 12345]
    ids = [0, 1, 2, 127, 65_535, 128_255, 2**31 - 1]
    found = noise(torch.tensor(keys), torch.tensor(ids))
    assert found.dtype == torch.float32
    for key, row in zip(keys, found, strict=True):
        assert row.numpy() == pytest.approx(exact_noise(key, ids), abs=2e-6)


def test_noise_of_all_bits_is_exact_and_falls_with_them() -> None:
    edges = [0, 1, 2, 2**29 - 1, 2**29, 2**29 + 1, 2**30, 2**31 - 2, 2**31 - 1]
    words = np.unique([*edges, *np.geomspace(1, 2**31 - 1, 5000).astype(np.int64)])
    found = gumbel(torch.from_numpy(words)).double().numpy()
    # float32 has this many digits.
    assert found == pytest.approx(exact_gumbel(words), rel=3e-7, abs=4e-7)
    assert (np.diff(found) <= 1e-6).all()
    assert 22.1 < found.max() < 22.2
    assert -3.2 < found.min() < -3.0


def shares_of(kind: str) -> np.ndarray:
    """Return what should be uniform numbers, of neighbors in seeds, indices, positions or ids."""
    number = NUM_NUMBERS[kind]
    ids, positions = torch.zeros(1, dtype=torch.int64), np.zeros(1, dtype=np.int64)
    starts = [generator_start(5, 0)]
    if kind == "ids":
        ids = torch.arange(number)
    elif kind == "positions":
        positions = np.arange(number)
        starts *= number
    elif kind == "indices":
        starts = [generator_start(5, index) for index in range(number)]
    else:
        starts = [generator_start(seed, 0) for seed in range(-number // 2, number // 2)]
    keys = noise_keys(np.array(starts, dtype=np.uint64), positions)
    found = noise(torch.from_numpy(keys), ids).double().flatten().numpy()
    assert len(found) == number
    shares: np.ndarray = np.exp(-np.exp(-found))
    return shares


@pytest.mark.parametrize("kind", ["ids", "positions", "indices", "seeds"])
def test_noise_is_gumbel_noise_that_neighbors_do_not_share(kind: str) -> None:
    shares = shares_of(kind)
    num_cells = 16
    for distance in (1, 2, 3, 16, 64, 128, 4096):
        # Pairs are taken once, so that they are independent.
        pairs = (shares * num_cells).astype(int)
        first = pairs[: len(pairs) // (2 * distance) * 2 * distance].reshape(-1, 2, distance)
        cells = np.bincount((first[:, 0] * num_cells + first[:, 1]).ravel(), minlength=num_cells**2)
        mean = cells.sum() / num_cells**2
        statistic = ((cells - mean) ** 2 / mean).sum()
        freedom = num_cells**2 - 1
        # Five standard deviations, on either side.
        assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5
    # The few largest numbers decide which token is drawn.
    expected = len(shares) / 512
    assert abs((shares > 1 - 1 / 512).sum() - expected) < 5 * expected**0.5


def random_scores(size: int, dtype: torch.dtype, rng: np.random.Generator) -> torch.Tensor:
    """Return eight rows of scores, with many equal in some, that are parts of longer rows."""
    scales = np.array([0.0, 0.01, 1.0, 1.0, 4.0, 4.0, 30.0, 1e30])[:, None]
    scores = rng.standard_normal((8, size + 3)) * scales
    scores[5] = scores[5].round()
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    return torch.from_numpy(scores.astype(np.float32)).to(dtype)[:, :size]


def random_draws(num_rows: int, rng: np.random.Generator) -> Draws:
    return Draws(
        temperature=rng.choice([1e-5, 0.1, 0.3, 1.0, 2.5, 100.0], num_rows),
        top_k=np.zeros(num_rows, dtype=np.int64),
        top_p=np.ones(num_rows),
        min_p=np.zeros(num_rows),
        key=rng.integers(-(2**63), 2**63 - 1, num_rows),
    )


def kernel() -> Draw:
    made = Draw.make()
    if made is None:
        pytest.skip("needs a C compiler")
    return made


def kernel_maxima(scores: torch.Tensor, rows: np.ndarray, draws: Draws, first: int) -> list[int]:
    return kernel()(scores, rows, draws.scale, draws.key, first).tolist()


def plain_maxima(scores: torch.Tensor, rows: np.ndarray, draws: Draws, first: int) -> list[int]:
    return Choice.drawn_maxima(TorchChoice(), scores, rows, draws, first).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 15, 127, 128, 129, 5000])
def test_the_kernel_in_c_finds_the_same_sums(size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(size)
    for _ in range(20):
        scores, draws = random_scores(size, dtype, rng), random_draws(6, rng)
        rows, first = rng.integers(0, 8, 6), int(rng.choice([0, 1, 64_128, 2**31 - 5001]))
        expected = plain_maxima(scores, rows, draws, first)
        assert kernel_maxima(scores, rows, draws, first) == expected


@pytest.mark.parametrize("size", [1, 127, 129, 3000])
def test_the_kernel_in_c_draws_from_tokens_in_any_order(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(20):
        scores, draws = random_scores(2 * size, torch.float32, rng), random_draws(1, rng)
        ids = rng.permutation(2 * size)[:size]
        # Sums are equal where noise is lost in scores.
        scores[3] = 1e30
        for row in range(8):
            kept = torch.full((1, 2 * size), -torch.inf)
            kept[0, ids] = scores[row, ids]
            expected = TorchChoice().unfiltered(kept, np.zeros(1, dtype=np.int64), draws)
            chosen = scores[row, ids].numpy(), ids.astype(np.uint32)
            found = kernel().token(*chosen, float(draws.scale[0]), int(draws.key[0]))
            assert found == int(expected)


def test_tokens_are_the_same_without_the_kernel_in_c() -> None:
    rng = np.random.default_rng(0)
    scores, draws, rows = random_scores(300, torch.float32, rng), random_draws(8, rng), np.arange(8)
    draws.top_k[:], draws.top_p[:] = [300, 300, 1, 5, 200, 300, 300, 9], 0.9
    plain = NumpyChoice()
    plain._draw = None
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        moved = scores[:7].to(dtype)
        some = rows[:7], draws.of_rows(slice(7))
        assert torch.equal(plain.filtered(moved, *some), NumpyChoice().filtered(moved, *some))
        assert torch.equal(plain.unfiltered(moved, *some), NumpyChoice().unfiltered(moved, *some))


@pytest.mark.parametrize("place", [0, 127, 128, 299])
def test_the_kernel_in_c_finds_what_breaks_a_row(place: int) -> None:
    scores = torch.zeros(6, 300)
    scores[0, place], scores[1, place], scores[2] = np.nan, np.inf, -np.inf
    # Over a temperature of 1e-5, this is too large for a float32.
    scores[3, place], scores[4] = 1e35, -3e38
    draws = random_draws(6, np.random.default_rng(0))
    draws.temperature[:] = 1e-5
    found = torch.tensor(kernel_maxima(scores, np.arange(6), draws, 0))
    tokens = TorchChoice().tokens_of(found.unsqueeze(1))
    assert tokens[:5].tolist() == [-1, -1, -1, -1, -1]
    assert tokens[5] >= 0


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def noise_kernel(
    keys: tl.tensor, ids: tl.tensor, out: tl.tensor, bounds: tl.tensor, size: tl.constexpr
) -> None:
    row, places = tl.program_id(0), tl.arange(0, size)
    key = tl.load(keys + row)
    loaded = tl.load(ids + places)
    tl.store(out + row * size + places, noise_of(loaded, key))
    tl.store(bounds + row * size + places, noise_bounds(loaded, key))


def test_triton_computes_the_same_bits_and_bounds_them() -> None:
    size = 4096
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    ids = torch.randint(0, 2**31 - 1, (size,), generator=generator, dtype=torch.int32)
    out = torch.empty(len(keys), size, device=DEVICE)
    bounds = torch.empty_like(out)
    noise_kernel[(len(keys),)](
        keys.to(DEVICE), ids.to(DEVICE), out, bounds, size, enable_fp_fusion=False
    )
    assert torch.equal(out.cpu(), noise(keys, ids.long()))
    assert (bounds >= out).all()
    # Looser bounds would take the noise of more tokens.
    assert (bounds - out)[out > 4.0].max() < 0.1
