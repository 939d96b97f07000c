"""A kernel that does not compile is named once in the log, and not launched again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from attention.kernels.triton.launches.optional_kernel import OptionalKernel

if TYPE_CHECKING:
    import pytest


class Kernel:
    """Compiles at the first launches, and then no longer."""

    __name__ = "_product"

    def __init__(self, num_good: int) -> None:
        self.num_good = num_good
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.launches.append((grid, arguments, options))
            if len(self.launches) > self.num_good:
                raise RuntimeError("PassManager::run failed\nmany lines")

        return launch


def test_a_kernel_that_compiles_is_launched_as_it_is() -> None:
    kernel = Kernel(num_good=2)
    optional = OptionalKernel(kernel, replacement="another")
    assert optional.launch((3,), 1, 2, num_warps=4)
    assert optional.launch((5,), 6)
    assert kernel.launches == [((3,), (1, 2), {"num_warps": 4}), ((5,), (6,), {})]


def test_a_kernel_that_fails_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Kernel(num_good=1)
    optional = OptionalKernel(kernel, replacement="cuBLAS")
    with caplog.at_level(logging.WARNING):
        assert [optional.launch((1,)) for _ in range(4)] == [True, False, False, False]
    assert len(kernel.launches) == 2
    assert caplog.messages == [
        "The kernel product does not compile, so cuBLAS takes its place, which is slower: "
        "PassManager::run failed"
    ]
