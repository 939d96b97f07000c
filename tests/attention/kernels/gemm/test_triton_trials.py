"""A kernel that does not compile is replaced, and named once in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from attention.kernels.arguments import DeferredRMSNorm
from attention.kernels.triton.gemm import trials
from attention.kernels.triton.gemm.trials import TRIALS, failed_trials
from tests.attention.kernels.kernel_device import DEVICE
from workers.layers.hopper_linear import HopperLinear
from workers.layers.linear_choice import replaced_kernels

ON = torch.device(DEVICE)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    """Let all kernels fail to compile; counts how often each is tried."""
    tried: dict[str, list[int]] = {name: [] for name in TRIALS}

    def fail(name: str) -> None:
        tried[name].append(1)
        raise RuntimeError(f"PassManager::run failed in {name}\nmany lines")

    monkeypatch.setattr(
        trials, "TRIALS", {name: lambda _, name=name: fail(name) for name in TRIALS}
    )
    failed_trials.cache_clear()
    yield tried
    failed_trials.cache_clear()


def test_kernels_compile(caplog: pytest.LogCaptureFixture) -> None:
    failed_trials.cache_clear()
    assert failed_trials(ON) == frozenset()
    assert caplog.messages == []


def test_failures_are_logged_once(
    failing: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert [failed_trials(ON) for _ in range(3)] == [frozenset(TRIALS)] * 3
    assert caplog.messages == [
        f"The kernel of {name}.py does not compile; another, which is slower, takes its place: "
        f"PassManager::run failed in {name}"
        for name in TRIALS
    ]
    assert failing == {name: [1] for name in TRIALS}


def test_a_gpu_without_memory_says_nothing_about_kernels(
    failing: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    with monkeypatch.context() as patch:
        patch.setitem(trials.TRIALS, "skinny", fail)
        with pytest.raises(torch.OutOfMemoryError):
            failed_trials(ON)
    assert failed_trials(ON) == frozenset(TRIALS)
    assert failing["skinny"] == [1]


def linear() -> HopperLinear:
    torch.manual_seed(0)
    kernel = HopperLinear.empty(256, 256, has_bias=False, dtype=torch.float16, device=ON)
    kernel.weight.copy_(torch.randn(256, 256) / 16)
    return kernel


@pytest.mark.parametrize("num_rows", [1, 7, 128])
def test_products_are_the_same_without_the_kernels(
    num_rows: int, request: pytest.FixtureRequest
) -> None:
    kernel = linear()
    x = torch.randn(num_rows, 256).half().to(ON)
    product, gated = kernel(x), kernel.gated(x)
    request.getfixturevalue("failing")
    replaced = linear()
    assert not replaced.accepts_deferred_norm(1)
    torch.testing.assert_close(replaced(x), product, rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(replaced.gated(x), gated, rtol=4e-3, atol=1e-2)


def test_a_row_is_normed_by_its_product_if_the_kernel_compiles() -> None:
    kernel = linear()
    assert kernel.accepts_deferred_norm(1)
    row = DeferredRMSNorm(torch.ones(1, 256).half().to(ON), torch.ones(256).half().to(ON), 0.0)
    expected = kernel.weight.float().sum(1).half()[None]
    torch.testing.assert_close(kernel.forward_with_norm(row), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("capability", "kernels"), [((9, 0), tuple(sorted(TRIALS))), ((8, 0), ())], ids=str
)
def test_replaced_kernels_are_those_that_a_gpu_would_use(
    capability: tuple[int, int],
    kernels: tuple[str, ...],
    failing: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    monkeypatch.setattr("torch.cuda.device", lambda _: nullcontext())
    assert replaced_kernels(torch.device("cuda", 0)) == kernels
    assert replaced_kernels(torch.device("cpu")) == ()
    assert failing == {name: [1] if kernels else [] for name in TRIALS}
