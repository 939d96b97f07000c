"""What the FlashInfer and hybrid backends plan and run, with a fake of the library, on a CPU."""

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attention.abstract import AttentionParams, AttentionType
from attention.gpu.backend import GpuBackend
from attention.params import KV_CACHE_DTYPES
from attention.selector import FlashInferBackend, HybridBackend
from tests.attention.flashinfer.fake_flashinfer import (
    FakeMemory,
    FakeScratch,
    FakeWrapper,
    fake_modules,
)
from tests.attention.gpu_steps import check_graph_inputs
from tests.attention.rig import Rig, params_of

pytest.importorskip("triton")

MODULES = ("attention.gpu.flashinfer_kernels",)
BACKENDS = FlashInferBackend, HybridBackend
over_backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
FEATURES: dict[str, AttentionParams] = {
    "plain": params_of(4, 2, 64),
    "scale": params_of(4, 2, 64, scale=0.3),
    "window+cap": params_of(4, 2, 64, sliding_window=6, soft_cap=2.0),
    "alibi": params_of(4, 2, 64, has_alibi=True),
    "head size 80": params_of(4, 2, 80, sliding_window=6),
}


@pytest.fixture(autouse=True)
def _fake_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the fake in the library's place, with a Hopper GPU of 8 multiprocessors."""
    if torch.cuda.is_available():
        pytest.skip("the real library is tested instead")
    for name, module in fake_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in MODULES:
        sys.modules.pop(name, None)
    properties = SimpleNamespace(multi_processor_count=8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for name in MODULES[:2]:
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "PlanMemory", FakeMemory)
        monkeypatch.setattr(module, "SharedScratch", FakeScratch)
    for backend in BACKENDS:
        monkeypatch.setattr(backend, "check", lambda spec: ())
    monkeypatch.setattr(FakeWrapper, "plans", [])
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def rig_of(*layers: AttentionParams, backend: type[GpuBackend] = FlashInferBackend) -> Rig:
    """Return a rig whose model dtype is one that the library has."""
    return Rig(*layers, backend=backend, dtype=torch.bfloat16)


def run_steps(rig: Rig) -> None:
    """Run prompts, chunks, decodes and mixed steps; the rig checks each."""
    a, b, c = rig.sequence(7), rig.sequence(2), rig.sequence(5)
    rig.step(prefills=[(a, 9), (b, 2)])
    rig.step(decodes=[a, b], num_padding=2)
    rig.step(prefills=[(c, 5), (a, 3)], decodes=[b], num_padding=1)
    rig.step(prefills=[(c, 7)], decodes=[b, a])
    rig.step(decodes=[c, b, a])


def planned() -> list[str]:
    """Return which wrappers were planned since the last call, and with which kernels."""
    plans = list(FakeWrapper.plans)
    FakeWrapper.plans.clear()
    return [plan.removeprefix("Batch").replace("KVCacheWrapper", "") for plan in plans]


@over_backends
@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_equals_the_dense_reference(feature: str, backend: type[GpuBackend]) -> None:
    run_steps(rig_of(FEATURES[feature], backend=backend))


@pytest.mark.parametrize("fp8", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_cache_equals_the_dense_reference(fp8: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Numbers that need no rounding, because Triton's interpreter does not round to nearest.
    rig = rig_of(replace(params_of(4, 2, 64, fp8=fp8), k_scale=0.5, v_scale=2.0))
    exact, dtype = Rig.random, KV_CACHE_DTYPES[fp8]
    monkeypatch.setattr(Rig, "random", lambda *a: (2 * exact(*a)).to(dtype).to(torch.bfloat16))
    run_steps(rig)
    assert "PrefillWithRagged fa2" not in planned()


@over_backends
def test_layers_of_all_kinds_alternate(backend: type[GpuBackend]) -> None:
    kinds = AttentionType.ENCODER, AttentionType.DECODER, AttentionType.ENCODER_DECODER
    layers = [replace(FEATURES["plain"], attention_type=kind) for kind in kinds]
    layers += [FEATURES["window+cap"], FEATURES["alibi"], FEATURES["plain"]]
    run_steps(rig_of(*layers, backend=backend))


def test_a_step_plans_what_it_runs() -> None:
    rig = rig_of(FEATURES["plain"], FEATURES["plain"])
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 9)])
    assert planned() == ["PrefillWithRagged fa2"]
    rig.step(prefills=[(a, 2)], decodes=[])
    assert planned() == ["PrefillWithPaged fa2"]
    rig.step(prefills=[(b, 300)], decodes=[a])
    assert planned() == ["PrefillWithRagged fa3", "DecodeWithPaged fa2"]
    rig.step(decodes=[a, b])
    assert planned() == ["DecodeWithPaged fa2"]


def test_hybrid_plans_prompts_alone() -> None:
    rig = rig_of(FEATURES["plain"], FEATURES["plain"], backend=HybridBackend)
    a, b = rig.sequence(), rig.sequence()
    rig.step(prefills=[(a, 9)])
    assert planned() == ["PrefillWithRagged fa2"]
    rig.step(prefills=[(b, 300)], decodes=[a])
    assert planned() == ["PrefillWithRagged fa3"]
    rig.step(prefills=[(a, 2)], decodes=[b])
    assert planned() == ["PrefillWithPaged fa2"]
    rig.step(decodes=[a, b])
    assert planned() == []


def test_kernels_name_their_providers() -> None:
    builder = rig_of(FEATURES["plain"], FEATURES["alibi"]).builder
    assert [kernels.providers["decode"] for kernels in builder.kernels] == ["flashinfer", "shared"]


def test_hybrid_names_its_providers_and_the_reasons() -> None:
    layers = FEATURES["plain"], FEATURES["alibi"], params_of(4, 2, 64, has_sinks=True)
    builder = rig_of(*layers, backend=HybridBackend).builder
    assert builder.provider_sentences() == [
        "flashinfer kernels compute prefill, prefill_ragged of layers [0].",
        "shared kernels compute decode of layers [0]: they read the cache faster than FlashInfer.",
        "shared kernels compute prefill, prefill_ragged, decode of layers [1]: "
        "FlashInfer does not support ALiBi slopes.",
        "shared kernels compute prefill, prefill_ragged, decode of layers [2]: "
        "FlashInfer's kernels do not support attention sinks.",
    ]


def test_profile_run_attends_among_its_tokens() -> None:
    rig = rig_of(FEATURES["plain"])
    batch = rig.batch([(rig.sequence(), 5), (rig.sequence(), 3)], [])
    query, key, value = rig.tokens(8)[0].split([256, 128, 128], 1)
    expected = rig.layers[0](query, key, value, rig.cache, rig.builder.build(batch))
    profile = rig.builder.build(replace(batch, block_tables=batch.block_tables[:, :0]))
    out = rig.layers[0](query, key, value, torch.empty(0, dtype=torch.bfloat16), profile)
    assert torch.equal(out, expected)


@over_backends
def test_replays_follow_each_step(backend: type[GpuBackend]) -> None:
    layers = FEATURES["plain"], FEATURES["window+cap"], FEATURES["plain"]
    rig = rig_of(*layers, backend=backend)
    check_graph_inputs(rig, backend)
