"""The FlashInfer backend on a GPU: every cell against the dense reference, graphs, no waiting."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import cast

import pytest
import torch

from attention.abstract import AttentionBatch, AttentionParams, AttentionType
from attention.flashinfer_backend import FlashInferBackend
from attention.selector import select_backend
from tests.attention.gpu_steps import (
    BLOCK_SIZES,
    FEATURES,
    GROUPS,
    HEAD_SIZES,
    NEEDS_GPU,
    check_replays,
    check_waits_for_nothing,
    heads_of,
    run_steps,
)
from tests.attention.rig import Rig, params_of

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
HOPPER_FEATURES = ("plain", "scale", "window", "cap", "window+cap")


@pytest.fixture(autouse=True)
def _each_way_of_decodes() -> None:
    """Replace the fixture that runs each test twice: there is one way."""


@pytest.fixture
def only_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small prompts, too, go to the kernels for Hopper."""
    from attention.flashinfer_prefill import FlashInferPrefill

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(FlashInferPrefill, "fewest_tiles", 0.0)


def rig_of(*layers: AttentionParams, dtype: torch.dtype, block_size: int = 16) -> Rig:
    """Return a rig of this backend with room for all steps."""
    return Rig(
        *layers,
        backend=FlashInferBackend,
        dtype=dtype,
        block_size=block_size,
        num_blocks=1600 // block_size + 20,
        device="cuda",
    )


@DTYPES
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_equals_the_dense_reference(feature: str, dtype: torch.dtype) -> None:
    run_steps(rig_of(FEATURES[feature], dtype=dtype))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_head_size(head_size: int) -> None:
    block_size = BLOCK_SIZES[HEAD_SIZES.index(head_size) % len(BLOCK_SIZES)]
    layers = [heads_of("3", head_size, name) for name in ("plain", "alibi")]
    run_steps(rig_of(*layers, dtype=torch.bfloat16, block_size=block_size))


@pytest.mark.parametrize("fp8", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("head_size", [64, 80, 256])
def test_every_fp8_cache_with_other_heads(head_size: int, fp8: str) -> None:
    run_steps(rig_of(params_of(6, 2, head_size, fp8=fp8), dtype=torch.bfloat16))


@pytest.mark.parametrize("feature", ["plain", "window", "alibi", "e4m3"])
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_of_heads(group: str, feature: str) -> None:
    run_steps(rig_of(heads_of(group, 128, feature), dtype=torch.bfloat16, block_size=32))


@pytest.mark.parametrize("feature", ["plain", "window", "window+cap", "e5m2"])
@pytest.mark.parametrize("block_size", [8, *BLOCK_SIZES, 128])
def test_every_block_size(block_size: int, feature: str) -> None:
    run_steps(rig_of(FEATURES[feature], dtype=torch.bfloat16, block_size=block_size))


@pytest.mark.usefixtures("only_hopper")
@pytest.mark.parametrize("feature", HOPPER_FEATURES)
def test_kernels_for_hopper_equal_the_dense_reference(feature: str) -> None:
    run_steps(rig_of(FEATURES[feature], dtype=torch.bfloat16))


@pytest.mark.usefixtures("only_hopper")
@pytest.mark.parametrize(("head_size", "dtype"), [(64, torch.bfloat16), (128, torch.float16)])
def test_kernels_for_hopper_with_other_heads(head_size: int, dtype: torch.dtype) -> None:
    run_steps(rig_of(heads_of("5", head_size, "plain"), dtype=dtype, block_size=64))


@pytest.mark.usefixtures("only_hopper")
def test_kernels_for_hopper_serve_encoders() -> None:
    kinds = AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = [replace(FEATURES["plain"], attention_type=kind) for kind in kinds]
    run_steps(rig_of(*layers, dtype=torch.bfloat16))


@pytest.mark.parametrize("feature", ["plain", "scale", "cap", "e4m3"])
def test_encoder_and_cross_attention(feature: str) -> None:
    kinds = AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = [replace(FEATURES[feature], attention_type=kind) for kind in kinds]
    run_steps(rig_of(*layers, dtype=torch.bfloat16))


@pytest.mark.parametrize("feature", ["plain", "window", "alibi"])
def test_encoder_alone(feature: str) -> None:
    layer = replace(FEATURES[feature], attention_type=AttentionType.ENCODER_ONLY)
    rig = rig_of(layer, dtype=torch.bfloat16)
    for lengths in ((64, 64), (9, 9, 1), (150, 3, 64)):
        rig.step(prefills=[(rig.sequence(), n) for n in lengths], num_padding=2)


def test_auto_is_this_backend() -> None:
    assert select_backend("auto", rig_of(FEATURES["plain"], dtype=torch.float16).spec) is (
        FlashInferBackend
    )


def test_layers_with_and_without_window_take_turns() -> None:
    layers = [FEATURES[name] for name in ("window", "plain", "window+cap", "plain", "alibi")]
    run_steps(rig_of(*layers, dtype=torch.bfloat16))


def test_large_prompts_and_small_ones_take_turns() -> None:
    rig = rig_of(params_of(32, 8, 128), dtype=torch.bfloat16, block_size=64)
    a, b = rig.sequence(), rig.sequence()
    for _ in range(2):
        rig.step(prefills=[(a, 400), (b, 200)])
        rig.step(prefills=[(a, 5)], decodes=[b])


@pytest.mark.parametrize("feature", ["plain", "e4m3"])
def test_prompts_of_a_profile_run_attend_among_themselves(feature: str) -> None:
    rig = rig_of(FEATURES["plain"], dtype=torch.bfloat16)
    batch = rig.batch([(rig.sequence(), 40), (rig.sequence(), 9)], [])
    inputs = rig.tokens(49)[0].cuda().split([1024, 256, 256], 1)
    expected = _run(rig, batch, inputs)
    profiled = rig_of(FEATURES[feature], dtype=torch.bfloat16)
    profiled.cache = torch.empty(0, dtype=profiled.cache.dtype, device="cuda")
    no_tables = replace(batch, block_tables=batch.block_tables[:, :0])
    assert torch.equal(_run(profiled, no_tables, inputs), expected)


def test_sequence_survives_a_swap_to_other_blocks() -> None:
    rig = rig_of(FEATURES["plain"], FEATURES["window"], dtype=torch.bfloat16)
    sequence = rig.sequence()
    rig.step(prefills=[(sequence, 45)])
    host = torch.zeros_like(rig.cache[:3], device="cpu", pin_memory=True)
    order = [2, 0, 1]
    FlashInferBackend.swap_blocks(rig.cache, host, list(zip(sequence.blocks, order, strict=True)))
    torch.cuda.synchronize()
    rig.release(sequence)
    sequence.blocks = [rig.free.pop(0) for _ in order]
    FlashInferBackend.swap_blocks(host, rig.cache, list(zip(order, sequence.blocks, strict=True)))
    rig.step(decodes=[sequence])


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("feature", ["plain", "window", "window+cap", "alibi"])
def test_replays_equal_eager_steps(feature: str, block_size: int) -> None:
    layers = FEATURES[feature], FEATURES["plain"]
    check_replays(FlashInferBackend, *layers, dtype=torch.bfloat16, block_size=block_size)


@pytest.mark.parametrize("feature", ["e4m3", "e5m2"])
def test_replays_over_an_fp8_cache_equal_eager_steps(feature: str) -> None:
    layers = FEATURES[feature], FEATURES[feature]
    check_replays(FlashInferBackend, *layers, dtype=torch.bfloat16, block_size=16)


def test_replays_of_cross_attention_equal_eager_steps() -> None:
    kinds = AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = [replace(FEATURES["plain"], attention_type=kind) for kind in kinds]
    check_replays(FlashInferBackend, *layers, dtype=torch.bfloat16, block_size=16)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_waits_for_nothing() -> None:
    layers = FEATURES["plain"], FEATURES["window"], FEATURES["cap"], FEATURES["alibi"]
    check_waits_for_nothing(FlashInferBackend, *layers, dtype=torch.bfloat16)


def test_plans_far_ahead_of_the_gpu_do_not_mix() -> None:
    rig = rig_of(FEATURES["plain"], dtype=torch.bfloat16)
    sequences = [rig.sequence() for _ in range(3)]
    rig.step(prefills=[(s, 30 + 40 * i) for i, s in enumerate(sequences)])
    inputs = rig.tokens(1)[0].cuda().split([1024, 256, 256], 1)
    batches = [rig.batch([], [s]) for s in sequences]
    expected = [_run(rig, batch, inputs) for batch in batches]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # The host plans all steps while the GPU is busy.
    ahead = [_run(rig, batch, inputs) for batch in batches]
    for out, reference in zip(ahead, expected, strict=True):
        assert torch.equal(out, reference)


def _run(rig: Rig, batch: AttentionBatch, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    query, key, value = inputs
    return cast(
        "torch.Tensor", rig.layers[0](query, key, value, rig.cache, rig.builder.build(batch))
    )
