"""ALiBi slopes against those of transformers, and how ranks share them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from tests.workers.reference import save_checkpoint
from workers.models.families.alibi import alibi_slopes
from workers.models.families.registry import read_model_config
from workers.models.self_attention import attention_params
from workers.parallel.group import SoloGroup

NUMS_OF_HEADS = [1, 2, 3, 5, 6, 8, 12, 14, 16, 20, 31, 40, 112]


@pytest.mark.parametrize("num_heads", NUMS_OF_HEADS)
def test_slopes_are_those_of_bloom(num_heads: int) -> None:
    bias = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), bias[:, 0, 1])


@pytest.mark.parametrize("bias_max", [4, 8, 16])
@pytest.mark.parametrize("num_heads", NUMS_OF_HEADS)
def test_slopes_are_those_of_mpt(num_heads: int, bias_max: int) -> None:
    bias = build_mpt_alibi_tensor(num_heads, 2, bias_max)
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads, bias_max)), -bias[:, 0, 0])


def test_ranks_have_the_slopes_of_their_own_heads(tmp_path: Path) -> None:
    save_checkpoint("bloom-6-heads", tmp_path)
    config = read_model_config(tmp_path)
    parts = []
    for rank in range(2):
        group = SoloGroup()
        group.rank, group.size = rank, 2
        parts.append(attention_params(config, 0, group).alibi_slopes)
    assert parts == [alibi_slopes(6)[:3], alibi_slopes(6)[3:]]
