"""Moves of whole blocks."""

import pytest
import torch

from attention.abstract import AttentionBackend
from attention.cpu.torch_sdpa import TorchSDPABackend
from attention.selector import TorchSDPAGpuBackend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = TorchSDPABackend.get_kv_cache_shape(
    num_blocks=6, num_layers=3, block_size=4, num_kv_heads=2, head_size=8
)


def numbered_cache() -> torch.Tensor:
    """Return a cache that holds the id of each block everywhere in it."""
    return torch.arange(6.0)[:, None, None, None, None, None].expand(SHAPE).clone()


@pytest.fixture(params=[TorchSDPABackend, TorchSDPAGpuBackend], ids=["cpu", "gpu"])
def backend(request: pytest.FixtureRequest) -> type[AttentionBackend]:
    """Return a backend of each kind; that of GPUs copies by a kernel, interpreted on a CPU."""
    if request.param is TorchSDPAGpuBackend:
        pytest.importorskip("triton")
    chosen: type[AttentionBackend] = request.param
    return chosen


def ids(cache: torch.Tensor) -> list[int]:
    """Return the number that each block holds throughout."""
    flat = cache.flatten(1)
    assert (flat == flat[:, :1]).all()
    return [int(number) for number in flat[:, 0]]


def test_shape_is_block_major() -> None:
    assert SHAPE == (6, 3, 2, 4, 2, 8)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], [0, 1, 2, 3, 4, 5]),
        ([(0, 4)], [0, 1, 2, 3, 0, 5]),
        ([(1, 3), (1, 4), (1, 5)], [0, 1, 2, 1, 1, 1]),
        ([(0, 3), (1, 4), (2, 5)], [0, 1, 2, 0, 1, 2]),
        ([(1, 2), (0, 5), (4, 3)], [0, 1, 1, 4, 4, 0]),
        ([(0, 1), (1, 0)], [1, 0, 2, 3, 4, 5]),
        ([(0, 1), (1, 2), (2, 3)], [0, 0, 1, 2, 4, 5]),
        ([(2, 3), (1, 2), (0, 1)], [0, 0, 1, 2, 4, 5]),
        ([(3, 3)], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_copies_happen_at_once(
    backend: type[AttentionBackend], pairs: list[tuple[int, int]], expected: list[int]
) -> None:
    cache = numbered_cache().to(DEVICE)
    backend.copy_blocks(cache, pairs)
    assert ids(cache) == expected


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], [9, 9, 9, 9]),
        ([(5, 0)], [5, 9, 9, 9]),
        ([(2, 1), (3, 2), (4, 3)], [9, 2, 3, 4]),
        ([(4, 0), (3, 1), (3, 2)], [4, 3, 3, 9]),
    ],
)
def test_swap_moves_every_layer(pairs: list[tuple[int, int]], expected: list[int]) -> None:
    host = torch.full((4, *SHAPE[1:]), 9.0)
    TorchSDPABackend.swap_blocks(numbered_cache(), host, pairs)
    assert ids(host) == expected


@pytest.mark.parametrize(
    "pairs",
    [
        [(0, 6)],
        [(6, 0)],
        [(-1, 0)],
        [(0, -1)],
        [(0, 2), (1, 2)],
        [(0, 3), (2, 7)],
        [(9, 3), (2, 1)],
    ],
)
def test_bad_pairs_are_rejected(
    backend: type[AttentionBackend], pairs: list[tuple[int, int]]
) -> None:
    cache = numbered_cache()
    with pytest.raises(ValueError, match=r"outside|repeated"):
        backend.copy_blocks(cache, pairs)
    with pytest.raises(ValueError, match=r"outside|repeated"):
        AttentionBackend.swap_blocks(cache, cache.clone(), pairs)
    assert ids(cache) == list(range(6))


def test_caches_of_different_blocks_are_rejected() -> None:
    with pytest.raises(ValueError, match="Blocks differ"):
        TorchSDPABackend.swap_blocks(numbered_cache(), torch.zeros(6, 3, 2, 4, 2, 4), [(0, 0)])


def test_scattered_blocks_are_copied_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = pytest.importorskip("attention.kernels.triton.copy_blocks")
    launch, launched = kernel.copy_blocks, []

    def counted(cache: torch.Tensor, pairs: torch.Tensor) -> None:
        launched.append(len(pairs))
        launch(cache, pairs)

    monkeypatch.setattr(kernel, "copy_blocks", counted)
    cache = numbered_cache().to(DEVICE)
    TorchSDPAGpuBackend.copy_blocks(cache, [(0, 3), (1, 4)])
    assert launched == []
    TorchSDPAGpuBackend.copy_blocks(cache, [(0, 2), (0, 5)])
    assert launched == [2]
    assert ids(cache) == [0, 1, 0, 0, 1, 0]
