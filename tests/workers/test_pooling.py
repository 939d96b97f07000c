"""Pooling of hidden states into vectors."""

import pytest
import torch

from pagedray.batch import Pooling
from workers.embedding_worker import pooled

HIDDEN = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
LENGTHS = [3, 1, 5]
PARTS = HIDDEN[:9].split(LENGTHS)
EXPECTED: dict[Pooling, torch.Tensor] = {
    "mean": torch.stack([part.mean(0) for part in PARTS]),
    "cls": torch.stack([part[0] for part in PARTS]),
    "last": torch.stack([part[-1] for part in PARTS]),
}


@pytest.mark.parametrize("pooling", EXPECTED)
def test_vectors_are_of_the_tokens_that_pooling_names(pooling: Pooling) -> None:
    vectors = pooled(HIDDEN, torch.tensor(LENGTHS), pooling, normalize=False)
    assert torch.allclose(vectors, EXPECTED[pooling], atol=1e-6)


@pytest.mark.parametrize("pooling", EXPECTED)
def test_normalized_vectors_have_length_one(pooling: Pooling) -> None:
    vectors = pooled(HIDDEN.bfloat16(), torch.tensor(LENGTHS), pooling, normalize=True)
    assert vectors.dtype == torch.float32
    assert torch.allclose(vectors.norm(dim=1), torch.ones(3))
    expected = torch.nn.functional.normalize(EXPECTED[pooling], dim=1)
    assert torch.allclose(vectors, expected, atol=1e-2)
