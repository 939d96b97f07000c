"""The torch_sdpa backend on a GPU, by the same path as on a CPU."""

import pytest
import torch

from attention.abstract import AttentionType
from attention.cpu.torch_sdpa import TorchSDPABackend
from tests.attention.rig import Rig, params_of
from tests.attention.test_torch_sdpa_matrix import (
    CROSS_FEATURES,
    ENCODER_FEATURES,
    FEATURES,
    layers_of,
    run_encoder,
    run_everything,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_equals_the_dense_reference_on_a_gpu(
    feature: str, dtype: torch.dtype
) -> None:
    run_everything(Rig(FEATURES[feature], dtype=dtype, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feature", ENCODER_FEATURES)
def test_every_feature_of_an_encoder_on_a_gpu(feature: str, dtype: torch.dtype) -> None:
    layers = layers_of(ENCODER_FEATURES[feature], AttentionType.ENCODER_ONLY)
    run_encoder(Rig(*layers, dtype=dtype, num_blocks=250, device="cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feature", CROSS_FEATURES)
def test_every_feature_of_cross_attention_on_a_gpu(feature: str, dtype: torch.dtype) -> None:
    kinds = AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = layers_of(CROSS_FEATURES[feature], *kinds)
    run_everything(Rig(*layers, dtype=dtype, num_blocks=200, device="cuda"))


def test_layers_interleave_on_a_gpu() -> None:
    layers = params_of(sliding_window=5), params_of(), params_of(has_alibi=True, soft_cap=2.0)
    run_everything(Rig(*layers, dtype=torch.bfloat16, device="cuda"))


def test_sequence_survives_a_swap_through_pinned_memory() -> None:
    rig = Rig(params_of(), params_of(), device="cuda")
    sequence = rig.sequence()
    rig.step(prefills=[(sequence, 11)])
    host = torch.zeros_like(rig.cache[:3], device="cpu", pin_memory=True)
    pairs = list(zip(sequence.blocks, [2, 0, 1], strict=True))
    TorchSDPABackend.swap_blocks(rig.cache, host, pairs)
    torch.cuda.synchronize()
    rig.release(sequence)
    sequence.blocks = [rig.free.pop(0) for _ in pairs]
    pairs = list(zip([2, 0, 1], sequence.blocks, strict=True))
    TorchSDPABackend.swap_blocks(host, rig.cache, pairs)
    rig.step(decodes=[sequence])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_planning_and_running_a_decode_does_not_wait_for_the_gpu() -> None:
    rig = Rig(params_of(), params_of(sliding_window=6), device="cuda")
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 9), (b, 5)])
    parts = rig.tokens(2)[0].cuda().split([64, 32, 32], 1)
    batch = rig.batch([], [a, b])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            metadata = rig.builder.build(batch)
            for layer in rig.layers:
                layer(*parts, rig.cache, metadata)
    finally:
        torch.cuda.set_sync_debug_mode("default")
