"""torch_sdpa as it is on a GPU: every cell against the dense reference, graphs, no waiting."""

from dataclasses import replace

import pytest
import torch

from attention.abstract import AttentionParams, AttentionType
from attention.sdpa_gpu_backend import TorchSDPAGpuBackend
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
from tests.attention.rig import Rig

pytestmark = NEEDS_GPU

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.fixture(autouse=True)
def _each_way_of_decodes() -> None:
    """Replace the fixture that runs each test twice: there is one way."""


def rig_of(*layers: AttentionParams, dtype: torch.dtype, block_size: int = 16) -> Rig:
    """Return a rig of this backend with room for all steps."""
    return Rig(
        *layers,
        backend=TorchSDPAGpuBackend,
        dtype=dtype,
        block_size=block_size,
        num_blocks=1600 // block_size + 20,
        device="cuda",
    )


@DTYPES
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_equals_the_dense_reference(feature: str, dtype: torch.dtype) -> None:
    run_steps(rig_of(FEATURES[feature], dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_head_size(head_size: int, dtype: torch.dtype) -> None:
    block_size = BLOCK_SIZES[HEAD_SIZES.index(head_size) % len(BLOCK_SIZES)]
    layers = [heads_of("3", head_size, name) for name in ("plain", "window+cap", "alibi")]
    run_steps(rig_of(*layers, dtype=dtype, block_size=block_size))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_of_heads(group: str, dtype: torch.dtype) -> None:
    layers = [heads_of(group, 64, name) for name in ("plain", "window", "alibi")]
    run_steps(rig_of(*layers, dtype=dtype, block_size=32))


@pytest.mark.parametrize("feature", ["plain", "window", "e5m2"])
@pytest.mark.parametrize("block_size", [8, *BLOCK_SIZES, 128])
def test_every_block_size(block_size: int, feature: str) -> None:
    run_steps(rig_of(FEATURES[feature], dtype=torch.bfloat16, block_size=block_size))


@DTYPES
@pytest.mark.parametrize("feature", ["plain", "scale", "cap", "e4m3"])
def test_encoder_and_cross_attention(feature: str, dtype: torch.dtype) -> None:
    kinds = AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = [replace(FEATURES[feature], attention_type=kind) for kind in kinds]
    run_steps(rig_of(*layers, dtype=dtype))


@pytest.mark.parametrize("feature", ["plain", "window", "alibi"])
def test_encoder_alone(feature: str) -> None:
    layer = replace(FEATURES[feature], attention_type=AttentionType.ENCODER_ONLY)
    rig = rig_of(layer, dtype=torch.bfloat16)
    for lengths in ((64, 64), (9, 9, 1), (150, 3, 64)):
        rig.step(prefills=[(rig.sequence(), n) for n in lengths], num_padding=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("feature", ["plain", "window+cap", "alibi", "e4m3"])
def test_replays_equal_eager_steps(feature: str, dtype: torch.dtype) -> None:
    layers = FEATURES[feature], FEATURES[feature]
    check_replays(TorchSDPAGpuBackend, *layers, dtype=dtype, block_size=16)


def test_replays_of_cross_attention_equal_eager_steps() -> None:
    kinds = AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = [replace(FEATURES["plain"], attention_type=kind) for kind in kinds]
    check_replays(TorchSDPAGpuBackend, *layers, dtype=torch.bfloat16, block_size=16)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_waits_for_nothing() -> None:
    layers = FEATURES["plain"], FEATURES["window"], FEATURES["cap"]
    check_waits_for_nothing(TorchSDPAGpuBackend, *layers, dtype=torch.bfloat16)
