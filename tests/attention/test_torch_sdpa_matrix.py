"""Every feature of the torch_sdpa backend, alone and together, against the dense reference."""

import pytest
import torch

from attention.abstract import AttentionParams
from tests.attention.rig import Rig, params_of

FEATURES: dict[str, AttentionParams] = {
    "plain": params_of(),
    "scale": params_of(scale=0.3),
    "window": params_of(sliding_window=6),
    "alibi": params_of(has_alibi=True),
    "cap": params_of(soft_cap=2.0),
    "window+cap": params_of(sliding_window=6, soft_cap=2.0),
    "window+alibi": params_of(sliding_window=6, has_alibi=True),
    "all": params_of(sliding_window=6, soft_cap=2.0, has_alibi=True, scale=0.3),
    "mha": params_of(3, 3),
    "mqa": params_of(4, 1),
    "group of 3": params_of(6, 2),
    "group of 7": params_of(7, 1, has_alibi=True),
    "head size 80": params_of(4, 2, 80),
    "head size 24": params_of(4, 2, 24, sliding_window=9),
}


def run_everything(rig: Rig) -> None:
    """Run prompts, chunks, hits, decodes and mixed steps."""
    a, b, c, d, e = (rig.sequence() for _ in range(5))
    rig.step(prefills=[(a, 9), (b, 9), (c, 1)])
    rig.step(decodes=[a, b, c], num_padding=2)
    rig.step(prefills=[(d, 5), (c, 7), (a, 1)], decodes=[b], num_padding=1)
    rig.step(prefills=[(d, 13), (e, 150)], decodes=[c, a])
    rig.step(decodes=[e, d, c, b, a], num_padding=3)
    rig.step(prefills=[(b, 70)], decodes=[e, d])
    rig.step(decodes=[b, e])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_equals_the_dense_reference(feature: str, dtype: torch.dtype) -> None:
    run_everything(Rig(FEATURES[feature], dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize("feature", ["plain", "all"])
def test_every_block_size_equals_the_dense_reference(feature: str, block_size: int) -> None:
    run_everything(Rig(FEATURES[feature], block_size=block_size, num_blocks=400 // block_size + 9))
