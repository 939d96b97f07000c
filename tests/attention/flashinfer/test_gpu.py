"""What FlashInfer alone has on a GPU: kernels for Hopper, and fp8 caches of other heads."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from attention.abstract import AttentionParams, AttentionType
from attention.selector import FlashInferBackend, HybridBackend, select_backend
from tests.attention.gpu_steps import FEATURES, NEEDS_GPU, gpu_rig, heads_of, run_steps
from tests.attention.rig import Rig, params_of

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs FlashInfer"),
]

HOPPER_FEATURES = ("plain", "scale", "window", "cap", "window+cap")


@pytest.fixture
def only_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small prompts, too, go to the kernels for Hopper."""
    from attention.gpu.flashinfer_kernels import FlashInferPrefill

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(FlashInferPrefill, "fewest_tiles", 0.0)


def rig_of(*layers: AttentionParams, dtype: torch.dtype, block_size: int = 16) -> Rig:
    """Return a rig of this backend."""
    return gpu_rig(*layers, backend=FlashInferBackend, dtype=dtype, block_size=block_size)


@pytest.mark.parametrize("fp8", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("head_size", [64, 80, 256])
def test_every_fp8_cache_with_other_heads(head_size: int, fp8: str) -> None:
    run_steps(rig_of(params_of(6, 2, head_size, fp8=fp8), dtype=torch.bfloat16))


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


def test_auto_selects_this_library_for_prompts() -> None:
    assert select_backend("auto", rig_of(FEATURES["plain"], dtype=torch.float16).spec) is (
        HybridBackend
    )
