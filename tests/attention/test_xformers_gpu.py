"""The xFormers backend on a GPU: every cell against the dense reference, graphs, no waiting."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from attention.abstract import AttentionParams, AttentionType
from attention.xformers_backend import XFormersBackend
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

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(find_spec("xformers") is None, reason="needs xFormers"),
]

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _each_way_of_decodes() -> None:
    """Replace the fixture that runs each test twice: there is one way."""


def rig_of(*layers: AttentionParams, dtype: torch.dtype, block_size: int = 16) -> Rig:
    """Return a rig of this backend with room for all steps."""
    return Rig(
        *layers,
        backend=XFormersBackend,
        dtype=dtype,
        block_size=block_size,
        num_blocks=1600 // block_size + 20,
        device="cuda",
    )


@DTYPES
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_equals_the_dense_reference(feature: str, dtype: torch.dtype) -> None:
    run_steps(rig_of(FEATURES[feature], dtype=dtype))


@pytest.mark.parametrize("feature", ["plain", "window", "alibi", "e4m3"])
@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_every_head_size(head_size: int, feature: str) -> None:
    block_size = BLOCK_SIZES[HEAD_SIZES.index(head_size) % len(BLOCK_SIZES)]
    run_steps(
        rig_of(heads_of("3", head_size, feature), dtype=torch.bfloat16, block_size=block_size)
    )


@pytest.mark.parametrize("feature", ["plain", "window", "cap"])
@pytest.mark.parametrize("group", GROUPS)
def test_every_group_of_heads(group: str, feature: str) -> None:
    run_steps(rig_of(heads_of(group, 64, feature), dtype=torch.float16, block_size=32))


@pytest.mark.parametrize("feature", ["plain", "window", "e5m2"])
@pytest.mark.parametrize("block_size", [8, *BLOCK_SIZES, 128])
def test_every_block_size(block_size: int, feature: str) -> None:
    run_steps(rig_of(FEATURES[feature], dtype=torch.bfloat16, block_size=block_size))


@pytest.mark.parametrize("feature", ["plain", "scale", "cap", "e4m3"])
def test_encoder_and_cross_attention(feature: str) -> None:
    kinds = AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = [replace(FEATURES[feature], attention_type=kind) for kind in kinds]
    run_steps(rig_of(*layers, dtype=torch.bfloat16))


@pytest.mark.parametrize("feature", ["window", "alibi"])
def test_encoder_with_positions(feature: str) -> None:
    layer = replace(FEATURES[feature], attention_type=AttentionType.ENCODER_ONLY)
    rig = rig_of(layer, dtype=torch.bfloat16)
    for lengths in ((9, 9, 1), (150, 3, 64)):
        rig.step(prefills=[(rig.sequence(), n) for n in lengths], num_padding=2)


def test_layers_with_and_without_window_take_turns() -> None:
    layers = [FEATURES[name] for name in ("window", "plain", "window+cap", "plain")]
    run_steps(rig_of(*layers, dtype=torch.bfloat16))


def test_ragged_ends_of_rows_do_not_let_poison_in() -> None:
    rig = rig_of(FEATURES["plain"], FEATURES["window"], dtype=torch.bfloat16, block_size=64)
    sequences = [rig.sequence() for _ in range(7)]
    rig.step(prefills=[(s, 1 + 11 * i) for i, s in enumerate(sequences)])
    for _ in range(9):
        rig.step(decodes=sequences)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("feature", ["plain", "window", "cap", "alibi"])
def test_replays_equal_eager_steps(feature: str, block_size: int) -> None:
    layers = FEATURES[feature], FEATURES["plain"]
    check_replays(XFormersBackend, *layers, dtype=torch.bfloat16, block_size=block_size)


def test_replays_of_cross_attention_equal_eager_steps() -> None:
    kinds = AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = [replace(FEATURES["plain"], attention_type=kind) for kind in kinds]
    check_replays(XFormersBackend, *layers, dtype=torch.bfloat16, block_size=16)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_waits_for_nothing() -> None:
    layers = FEATURES["plain"], FEATURES["window"], FEATURES["cap"]
    check_waits_for_nothing(XFormersBackend, *layers, dtype=torch.bfloat16)
