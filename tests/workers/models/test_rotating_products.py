"""Products of many rows that rotate queries and keys themselves, against transformers."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from attention.kernels.arguments import Rotary
from tests.workers.models.two_ranks import on_two_ranks
from tests.workers.reference import NUM_TOKENS, loaded_model, reference_logits, run, save_checkpoint
from workers.layers import linear_choice
from workers.layers.linear_kernel import DenseLinear
from workers.models import fused_layers
from workers.parallel.group import ParallelGroup, SoloGroup

# A bias, two embeddings, scaled ones, pairs of adjacent elements, one projection in the file.
ROTATED = [
    "llama-6-heads-3-kv",
    "llama-6-heads-2-kv-biases",
    "llama-yarn",
    "gemma2-capped",
    "cohere2-biases-untied",
    "phi3-window",
]
NOT_ROTATED = {
    "a norm comes in between": "qwen3-biases-one-kv-head",
    "a part of each head is rotated": "glm-half-heads",
    "queries grow": "ministral3-growing-queries",
    "there is no rotary embedding": "bloom-6-heads",
}


class RotatingLinear(DenseLinear):
    """Rotates heads by complex numbers; counts the rows of each product that does."""

    num_rows: ClassVar[list[int]] = []
    least_rows: ClassVar[int] = 0

    def rotates(self, num_rows: int, head_size: int, num_rotated: int) -> bool:
        return num_rows >= self.least_rows

    def write_rotated(
        self, x: torch.Tensor, rotary: Rotary, num_rotated: int, out: torch.Tensor
    ) -> None:
        self.num_rows.append(len(x))
        self.write(x, out)
        heads = out[:, :num_rotated].unflatten(1, (-1, rotary.table.shape[1]))
        angles = rotary.table[rotary.positions].unsqueeze(1)
        turned = torch.complex(*heads.chunk(2, 2)) * torch.complex(*angles.chunk(2, 2))
        heads.copy_(torch.cat((turned.real, turned.imag), 2))


@pytest.fixture(autouse=True)
def products_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_choice, "linear_kernel_class", lambda dtype, device: RotatingLinear)
    monkeypatch.setattr(RotatingLinear, "num_rows", [])


@pytest.mark.parametrize("name", ROTATED)
def test_heads_are_rotated_by_their_product(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    group = SoloGroup()
    model = loaded_model(tmp_path, group)
    # A prompt in two steps, and its next token.
    steps = (9, NUM_TOKENS - 10, 1)
    logits = run(model, group, steps)
    torch.testing.assert_close(logits, reference_logits(tmp_path)[-1:], rtol=1e-4, atol=1e-4)
    per_step = model.config.num_layers
    assert RotatingLinear.num_rows == [size for size in steps for _ in range(per_step)]


@pytest.mark.parametrize("name", NOT_ROTATED.values(), ids=NOT_ROTATED)
def test_heads_are_not_rotated_if(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    group = SoloGroup()
    logits = run(loaded_model(tmp_path, group), group)
    torch.testing.assert_close(logits, reference_logits(tmp_path), rtol=1e-4, atol=1e-4)
    assert RotatingLinear.num_rows == []


@pytest.mark.parametrize(("least_rows", "rotates"), [(11, True), (12, False)])
def test_halves_rotate_if_that_is_faster_for_both(
    least_rows: int, rotates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The halves have 12 and 11 tokens."""
    monkeypatch.setattr(fused_layers, "_MIN_TOKENS", 2)
    monkeypatch.setattr(fused_layers, "_TILE_ROWS", 4)
    monkeypatch.setattr(RotatingLinear, "least_rows", least_rows)
    save_checkpoint("llama-6-heads-2-kv-biases", tmp_path)

    def logits(group: ParallelGroup) -> torch.Tensor:
        group.overlaps_sums = True
        return run(loaded_model(tmp_path, group), group)

    expected = reference_logits(tmp_path)
    for found in on_two_ranks(logits):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # Three layers on two ranks.
    assert sorted(RotatingLinear.num_rows) == ([11] * 6 + [12] * 6 if rotates else [])
