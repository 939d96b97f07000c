"""The torch_sdpa backend on a GPU, with the features that the CPU's tests combine."""

import pytest
import torch

from attention.abstract import AttentionType
from attention.selector import TorchSDPAGpuBackend
from tests.attention.gpu_steps import NEEDS_GPU
from tests.attention.rig import Rig, params_of
from tests.attention.torch_sdpa.test_matrix import (
    CROSS_FEATURES,
    ENCODER_FEATURES,
    FEATURES,
    layers_of,
    run_encoder,
    run_everything,
)

pytestmark = NEEDS_GPU

# The test of all backends on a GPU runs the other features in every dtype.
COMBINED = ("all", "e4m3+all", "e5m2+window+mqa", "7 per KV head", "head size 24")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("feature", COMBINED)
def test_every_feature_equals_the_dense_reference_on_a_gpu(
    feature: str, dtype: torch.dtype
) -> None:
    run_everything(Rig(FEATURES[feature], backend=TorchSDPAGpuBackend, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("feature", [name for name in COMBINED if name in ENCODER_FEATURES])
def test_every_feature_of_an_encoder_on_a_gpu(feature: str) -> None:
    layers = layers_of(ENCODER_FEATURES[feature], AttentionType.ENCODER_ONLY)
    rig = Rig(
        *layers,
        backend=TorchSDPAGpuBackend,
        dtype=torch.bfloat16,
        num_blocks=250,
        device="cuda",
    )
    run_encoder(rig)


@pytest.mark.parametrize("feature", ["mqa", "5 per KV head", "e5m2"])
def test_every_feature_of_cross_attention_on_a_gpu(feature: str) -> None:
    kinds = AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = layers_of(CROSS_FEATURES[feature], *kinds)
    rig = Rig(
        *layers,
        backend=TorchSDPAGpuBackend,
        dtype=torch.bfloat16,
        num_blocks=200,
        device="cuda",
    )
    run_everything(rig)


def test_layers_interleave_on_a_gpu() -> None:
    layers = params_of(sliding_window=5), params_of(), params_of(has_alibi=True, soft_cap=2.0)
    run_everything(Rig(*layers, backend=TorchSDPAGpuBackend, dtype=torch.bfloat16, device="cuda"))
