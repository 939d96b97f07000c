"""Every feature of the torch_sdpa backend, alone and together, against the dense reference."""

from dataclasses import replace

import pytest
import torch

from attention.abstract import AttentionParams, AttentionType
from tests.attention.rig import Rig, params_of

pytestmark = pytest.mark.usefixtures("both_decodes")

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
    "3 per KV head": params_of(6, 2),
    "5 per KV head": params_of(5, 1, soft_cap=2.0),
    "7 per KV head": params_of(7, 1, has_alibi=True),
    "8 per KV head": params_of(16, 2, sliding_window=6),
    "head size 24": params_of(4, 2, 24, sliding_window=9),
    "head size 64": params_of(4, 2, 64),
    "head size 80": params_of(4, 2, 80),
    "head size 96": params_of(4, 2, 96, soft_cap=2.0),
    "head size 128": params_of(4, 2, 128, has_alibi=True),
    "head size 192": params_of(4, 2, 192),
    "head size 256": params_of(4, 2, 256, sliding_window=6),
    "sinks": params_of(has_sinks=True),
    "window+sinks": params_of(6, 2, sliding_window=6, has_sinks=True),
    "all+sinks": params_of(
        sliding_window=6, soft_cap=2.0, has_alibi=True, scale=0.3, has_sinks=True
    ),
    "e5m2+sinks": params_of(8, 2, fp8="fp8_e5m2", has_sinks=True),
    "e4m3": params_of(fp8="fp8_e4m3"),
    "e5m2": params_of(fp8="fp8_e5m2"),
    "e4m3+all": params_of(sliding_window=6, soft_cap=2.0, has_alibi=True, fp8="fp8_e4m3"),
    "e5m2+window+mqa": params_of(4, 1, sliding_window=6, fp8="fp8_e5m2"),
}
# Cross attention knows no positions, and an encoder alone has no cache.
CROSS_FEATURES = {
    name: params
    for name, params in FEATURES.items()
    if params.sliding_window is None and params.alibi_slopes is None
}
ENCODER_FEATURES = {
    name: params for name, params in FEATURES.items() if params.kv_cache_dtype == "auto"
}


def run_everything(rig: Rig) -> None:
    """Run prompts, chunks, hits, decodes and mixed steps."""
    a, b, c, d, e = (rig.sequence(n) for n in (5, 9, 1, 140, 6))
    rig.step(prefills=[(a, 9), (b, 9), (c, 1)])
    rig.step(decodes=[a, b, c], num_padding=2)
    rig.step(prefills=[(d, 5), (c, 7), (a, 1)], decodes=[b], num_padding=1)
    rig.step(prefills=[(d, 13), (e, 150)], decodes=[c, a])
    rig.step(decodes=[e, d, c, b, a], num_padding=3)
    rig.step(prefills=[(b, 70)], decodes=[e, d])
    rig.step(decodes=[b, e])


def run_encoder(rig: Rig) -> None:
    """Run steps of a model that has an encoder alone."""
    for lengths in ((9, 9, 1), (5, 6, 7), (150, 3), (280,)):
        rig.step(prefills=[(rig.sequence(), n) for n in lengths], num_padding=len(lengths) - 1)


def layers_of(params: AttentionParams, *kinds: AttentionType) -> list[AttentionParams]:
    """Return layers that differ in their type."""
    return [replace(params, attention_type=kind) for kind in kinds]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_equals_the_dense_reference(feature: str, dtype: torch.dtype) -> None:
    run_everything(Rig(FEATURES[feature], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", ENCODER_FEATURES)
def test_every_feature_of_an_encoder_alone(feature: str, dtype: torch.dtype) -> None:
    layers = layers_of(FEATURES[feature], AttentionType.ENCODER_ONLY)
    run_encoder(Rig(*layers, dtype=dtype, num_blocks=250))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", ENCODER_FEATURES)
def test_every_feature_of_an_encoder_beside_a_decoder(feature: str, dtype: torch.dtype) -> None:
    layers = layers_of(FEATURES[feature], AttentionType.ENCODER, AttentionType.DECODER)
    run_everything(Rig(*layers, dtype=dtype, num_blocks=200))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature", CROSS_FEATURES)
def test_every_feature_of_cross_attention(feature: str, dtype: torch.dtype) -> None:
    kinds = AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = layers_of(FEATURES[feature], *kinds, *kinds[1:])
    run_everything(Rig(*layers, dtype=dtype, num_blocks=200))


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 64])
@pytest.mark.parametrize("feature", ["plain", "all", "e4m3"])
def test_every_block_size_equals_the_dense_reference(feature: str, block_size: int) -> None:
    run_everything(Rig(FEATURES[feature], block_size=block_size, num_blocks=400 // block_size + 9))


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 64])
@pytest.mark.parametrize("fp8", ["auto", "fp8_e5m2"])
def test_every_block_size_of_cross_attention(fp8: str, block_size: int) -> None:
    kinds = AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = layers_of(params_of(fp8=fp8), *kinds)
    run_everything(Rig(*layers, block_size=block_size, num_blocks=560 // block_size + 19))
