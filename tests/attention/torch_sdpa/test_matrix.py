"""Every feature of the torch_sdpa backend, alone and together, against the dense reference."""

from dataclasses import replace

import pytest
import torch

from attention.abstract import AttentionParams, AttentionType
from attention.cpu.torch_sdpa import TorchSDPABackend
from attention.fp8 import from_fp8, pair_table, to_fp8
from attention.params import KV_CACHE_DTYPES
from tests.attention.rig import Rig, check_chunks, params_of
from tests.slow_params import some_slow

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
SOME_DTYPES = pytest.mark.parametrize(
    "dtype", some_slow([torch.float32, torch.bfloat16], slow=[torch.float32])
)
TYPES = pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])


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


@SOME_DTYPES
@pytest.mark.parametrize("feature", ENCODER_FEATURES)
def test_every_feature_of_an_encoder_alone(feature: str, dtype: torch.dtype) -> None:
    layers = layers_of(FEATURES[feature], AttentionType.ENCODER_ONLY)
    run_encoder(Rig(*layers, dtype=dtype, num_blocks=250))


@SOME_DTYPES
@pytest.mark.parametrize("feature", ENCODER_FEATURES)
def test_every_feature_of_an_encoder_beside_a_decoder(feature: str, dtype: torch.dtype) -> None:
    layers = layers_of(FEATURES[feature], AttentionType.ENCODER, AttentionType.DECODER)
    run_everything(Rig(*layers, dtype=dtype, num_blocks=200))


@SOME_DTYPES
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


@TYPES
def test_too_large_numbers_become_the_largest(name: str) -> None:
    dtype = KV_CACHE_DTYPES[name]
    assert dtype is not None
    most = torch.finfo(dtype).max
    numbers = torch.tensor([1e30, -1e30, 3.0, float("inf"), float("nan")])
    result = from_fp8(to_fp8(numbers, dtype, 2.0), dtype, torch.float32)
    assert result[:4].tolist() == [most, -most, 1.5, most]
    assert result[4].isnan()


@TYPES
@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_byte_survives_the_models_dtype(name: str, model_dtype: torch.dtype) -> None:
    dtype = KV_CACHE_DTYPES[name]
    assert dtype is not None
    numbers = torch.arange(256, dtype=torch.uint8)
    is_finite = numbers.view(dtype).float().isfinite()
    numbers = numbers[is_finite]
    assert torch.equal(to_fp8(from_fp8(numbers, dtype, model_dtype), dtype, 1.0), numbers)


@TYPES
@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_table_of_pairs_equals_the_conversion_of_torch(name: str, model_dtype: torch.dtype) -> None:
    dtype = KV_CACHE_DTYPES[name]
    assert dtype is not None
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    pairs = pair_table(dtype, model_dtype).index_select(0, numbers.view(torch.uint16).int())
    expected = numbers.view(dtype).to(model_dtype)
    assert torch.equal(pairs.view(model_dtype).nan_to_num(7), expected.nan_to_num(7))


@TYPES
def test_numbers_are_rounded_once(name: str) -> None:
    dtype = KV_CACHE_DTYPES[name]
    assert dtype is not None
    numbers = torch.randn(5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = (numbers.double() / 0.037).float().to(dtype).view(torch.uint8)
    assert torch.equal(to_fp8(numbers, dtype, 0.037), expected)


@TYPES
def test_overflow_of_a_layer_stays_finite(name: str) -> None:
    rig = Rig(params_of(fp8=name))
    rig.magnitude = 1e6
    a = rig.sequence()
    outputs = [*rig.step(prefills=[(a, 9)]), *rig.step(decodes=[a])]
    assert all(output.isfinite().all() for output in outputs)


@TYPES
@pytest.mark.parametrize("chunks", [(23,), (1, 22), (4, 4, 15), (1,) * 23])
def test_chunked_prompt_equals_the_whole_in_an_fp8_cache(
    chunks: tuple[int, ...], name: str
) -> None:
    rig = Rig(params_of(fp8=name), params_of(fp8=name, sliding_window=6))
    check_chunks(rig, chunks)


def test_layers_with_other_scales_share_a_plan() -> None:
    first = params_of(fp8="fp8_e4m3")
    rig = Rig(first, first.plan_key)
    a = rig.sequence()
    rig.step(prefills=[(a, 6)])
    rig.step(decodes=[a])
    metadata = rig.builder.build(rig.batch([], [a]))
    assert metadata.layer_plan(0) is metadata.layer_plan(1)


def test_bytes_of_a_sequence_move_and_fork() -> None:
    rig = Rig(params_of(fp8="fp8_e5m2"))
    assert rig.cache.dtype == torch.uint8
    parent = rig.sequence()
    rig.step(prefills=[(parent, 10)])
    child = rig.fork(parent)
    rig.step(decodes=[parent, child])
    host = torch.zeros_like(rig.cache[:3])
    TorchSDPABackend.swap_blocks(rig.cache, host, list(zip(child.blocks, range(3), strict=True)))
    own = rig.free.pop()
    TorchSDPABackend.swap_blocks(host, rig.cache, [(2, own)])
    child.blocks[2] = own
    rig.step(decodes=[parent, child])


def test_profile_run_rounds_as_a_cache_would() -> None:
    rig = Rig(params_of(fp8="fp8_e4m3"))
    batch = rig.batch([(rig.sequence(), 9)], [])
    parts = rig.tokens(9)[0].split([64, 32, 32], 1)
    layer, metadata = rig.layers[0], rig.builder.build(batch)
    alone = layer(*parts, rig.cache.new_empty(0), metadata)
    assert (rig.cache == rig.nan).all()
    # The rounding to fp8 changes results by percents.
    torch.testing.assert_close(layer(*parts, rig.cache, metadata), alone)


@TYPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(10, 2, 24), (4, 4, 64), (5, 1, 128), (6, 2, 20)])
def test_decodes_over_ragged_rows_equal_the_dense_reference(
    heads: tuple[int, int, int], dtype: torch.dtype, name: str
) -> None:
    layers = (
        params_of(*heads, fp8=name),
        params_of(*heads, fp8=name, sliding_window=7, soft_cap=2.0, has_alibi=True),
    )
    rig = Rig(*layers, dtype=dtype, block_size=16)
    sequences = [rig.sequence() for _ in range(3)]
    rig.step(prefills=list(zip(sequences, (40, 15, 1), strict=True)))
    for _ in range(3):
        rig.step(decodes=sequences, num_padding=1)
