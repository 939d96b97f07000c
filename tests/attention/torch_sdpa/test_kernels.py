"""Which parts of a step torch and the GPU kernels of torch_sdpa run, interpreted on a CPU."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from attention.abstract import AttentionParams, AttentionSpec, AttentionType
from attention.gpu.metadata import TorchSDPAGpuMetadataBuilder
from attention.selector import TorchSDPAGpuBackend, select_backend
from tests.attention.rig import Rig, params_of

pytest.importorskip("triton")


class OnAnyDevice(TorchSDPAGpuBackend):
    """The backend, also where there is no GPU."""

    @classmethod
    def _problems(cls, spec: AttentionSpec) -> Iterable[str]:  # type: ignore[override]  # none
        return ()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Return the shapes of queries that went to torch so far."""
    shapes: list[torch.Size] = []

    def counted(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:  # Any: torch's
        shapes.append(query.shape)
        return scaled_dot_product_attention(query, *rest, **options)

    name = "attention.gpu.shared_kernels.scaled_dot_product_attention"
    monkeypatch.setattr(name, counted)
    return shapes


def rig_of(*layers: AttentionParams, dtype: torch.dtype = torch.bfloat16) -> Rig:
    """Return a rig of the backend as it is on a GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Rig(*layers, backend=OnAnyDevice, dtype=dtype, block_size=16, device=device)


def test_prompts_of_equal_length_go_to_torch_in_one_call(calls: list[torch.Size]) -> None:
    rig = rig_of(params_of())
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 9), (b, 9)], num_padding=1)
    assert calls == [(2, 4, 9, 16)]


def test_uneven_prompts_chunks_and_decodes_go_to_the_kernels(calls: list[torch.Size]) -> None:
    rig = rig_of(params_of())
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 9), (b, 4)])
    rig.step(prefills=[(a, 5)], decodes=[b], num_padding=2)
    rig.step(decodes=[a, b])
    assert calls == []


def test_window_that_cuts_a_prompt_goes_to_the_kernels(calls: list[torch.Size]) -> None:
    rig = rig_of(params_of(sliding_window=6))
    rig.step(prefills=[(rig.sequence(), 6), (rig.sequence(), 6)])
    assert len(calls) == 1
    rig.step(prefills=[(rig.sequence(), 7), (rig.sequence(), 7)])
    assert len(calls) == 1


def test_even_encoders_go_to_torch(calls: list[torch.Size]) -> None:
    rig = rig_of(replace(params_of(), attention_type=AttentionType.ENCODER_ONLY))
    rig.step(prefills=[(rig.sequence(), 7), (rig.sequence(), 7)], num_padding=1)
    rig.step(prefills=[(rig.sequence(), 7), (rig.sequence(), 2)])
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("params", "dtype", "provider"),
    [
        (params_of(), torch.bfloat16, "torch"),
        (params_of(), torch.float32, "shared"),
        (params_of(2, 2), torch.float32, "torch"),
        (params_of(soft_cap=2.0), torch.bfloat16, "shared"),
        (params_of(has_alibi=True), torch.bfloat16, "shared"),
        (params_of(4, 2, 264), torch.bfloat16, "shared"),
    ],
)
def test_providers_are_named(params: AttentionParams, dtype: torch.dtype, provider: str) -> None:
    spec = AttentionSpec(layers=(params,), dtype=dtype, device=torch.device("cpu"), block_size=16)
    (kernels,) = TorchSDPAGpuMetadataBuilder(spec).kernels
    assert kernels.providers == {
        "prefill": "shared",
        "prefill_ragged": provider,
        "decode": "shared",
    }


def test_selector_takes_it_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    spec = AttentionSpec(
        layers=(params_of(),), dtype=torch.float32, device=torch.device("cuda"), block_size=16
    )
    assert select_backend("torch_sdpa", spec) is TorchSDPAGpuBackend
    assert TorchSDPAGpuBackend.supports_graph_capture
