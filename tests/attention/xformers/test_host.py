"""What the xFormers backend decides on the host, without the library or a GPU."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attention.abstract import AttentionParams, AttentionSpec, AttentionType
from attention.gpu.layer_kernels import LayerSet
from attention.gpu.xformers_unsupported import unsupported_by_decode, unsupported_by_prefill
from attention.selector import XFormersBackend, XFormersMetadataBuilder, select_backend
from tests.attention.rig import params_of

PLAIN = params_of(8, 2, 128)
SPEC = AttentionSpec(
    layers=(PLAIN,), dtype=torch.bfloat16, device=torch.device("cpu"), block_size=16
)


def test_every_reason_for_a_rejection_is_given() -> None:
    reasons = " ".join(XFormersBackend.check(replace(SPEC, dtype=torch.float32)))
    for part in ("device is cpu", "dtype is torch.float32, but must be bfloat16 or float16"):
        assert part in reasons


def test_absent_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attention.gpu.backend.find_spec", lambda name: None)
    reasons = XFormersBackend.check(SPEC)
    assert "the package xformers is not installed" in reasons
    assert "the package triton is not installed" in reasons


def test_old_gpu_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    reasons = XFormersBackend.check(replace(SPEC, device=torch.device("cuda")))
    assert "the GPU has compute capability 7.5, but must have 8.0 or later" in reasons


def test_rejection_does_not_import_the_library() -> None:
    before = set(sys.modules)
    with pytest.raises(ValueError, match=r"'xformers' does not support .*: .*device is cpu"):
        select_backend("xformers", SPEC)
    assert not any(name.startswith("xformers") for name in set(sys.modules) - before)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (PLAIN, None),
        (replace(PLAIN, sliding_window=5), None),
        (params_of(8, 2, 80), None),
        (params_of(8, 2, 20), "a head size of 20"),
        (params_of(8, 2, 264), "a head size of 264"),
        (replace(PLAIN, soft_cap=2.0), "a soft cap"),
        (params_of(8, 2, 128, has_alibi=True), "ALiBi"),
        (replace(PLAIN, has_sinks=True), "attention sinks"),
        (replace(PLAIN, kv_cache_dtype="fp8_e4m3"), None),
        (replace(PLAIN, attention_type=AttentionType.ENCODER), None),
        (
            replace(PLAIN, attention_type=AttentionType.ENCODER, sliding_window=5),
            "a window on both sides",
        ),
    ],
)
def test_prefills_are_shared_for_a_reason(params: AttentionParams, reason: str | None) -> None:
    assert unsupported_by_prefill(params) == reason


@pytest.mark.parametrize(
    ("params", "block_size", "reason"),
    [
        (PLAIN, 16, None),
        (replace(PLAIN, sliding_window=5), 32, None),
        (params_of(8, 2, 64), 48, None),
        (PLAIN, 8, "a block size of 8"),
        (params_of(8, 2, 80), 16, "a head size of 80"),
        (replace(PLAIN, soft_cap=2.0), 16, "a soft cap"),
        (params_of(8, 2, 128, has_alibi=True), 16, "ALiBi"),
        (replace(PLAIN, has_sinks=True), 16, "attention sinks"),
        (replace(PLAIN, kv_cache_dtype="fp8_e5m2"), 16, "an fp8 cache"),
        (replace(PLAIN, attention_type=AttentionType.ENCODER_DECODER), 16, None),
    ],
)
def test_decodes_are_shared_for_a_reason(
    params: AttentionParams, block_size: int, reason: str | None
) -> None:
    spec = replace(SPEC, layers=(params,), block_size=block_size)
    assert unsupported_by_decode(params, spec) == reason


class FakeKernels(SimpleNamespace):
    """Stands for the kernels of layers, which need the library."""

    def __init__(self, layers: LayerSet) -> None:
        provider = "xformers" if layers.params.soft_cap is None else "shared"
        super().__init__(
            params=layers.params,
            providers=dict.fromkeys(("prefill", "prefill_ragged", "decode"), provider),
        )


def test_builder_names_its_providers_and_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(XFormersMetadataBuilder, "_make_kernels", staticmethod(FakeKernels))
    encoder = replace(PLAIN, soft_cap=2.0, attention_type=AttentionType.ENCODER)
    layers = PLAIN, replace(PLAIN, soft_cap=2.0), replace(PLAIN, k_scale=0.5), encoder
    builder = XFormersBackend.make_metadata_builder(replace(SPEC, layers=layers))
    assert builder.provider_sentences() == [
        "xformers kernels compute prefill, prefill_ragged, decode of layers [0, 2].",
        "shared kernels compute prefill, prefill_ragged, decode of layers [1]: "
        "xFormers does not support a soft cap.",
        "shared kernels compute prefill_ragged of layers [3]: "
        "xFormers does not support a soft cap.",
    ]
