"""Compiles kernels in parallel, before any of them is launched."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, Self

import triton
from triton.runtime import driver

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

__all__ = ["ParallelCompilation"]


class ParallelCompilation:
    """A context in which threads compile missing kernels, and their launches are skipped.

    A skipped launch writes nothing, while compiled kernels are launched as usual, so use this only
    in captures that are dropped. When the context ends, kernels that wait for their compilation are
    dropped. If a kernel does not compile, the launch that needs it raises the error.
    """

    def __init__(self, num_threads: int) -> None:
        """Compile for the current device of the calling thread."""
        self._device = driver.active.get_current_device()
        self._threads = ThreadPoolExecutor(
            num_threads, thread_name_prefix="pagedray-compile", initializer=self._use_device
        )
        self._compilations: dict[tuple[str, str], Future[None]] = {}
        # Any: a hook of Triton, or None
        self._outer_hook: Any = None

    def __enter__(self) -> Self:
        self._outer_hook = triton.knobs.runtime.jit_cache_hook
        triton.knobs.runtime.jit_cache_hook = self._compile
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        triton.knobs.runtime.jit_cache_hook = self._outer_hook

    def wait(self) -> Iterator[int]:
        """Wait for all kernels; yield the number of compiled kernels after each kernel."""
        for count, _ in enumerate(as_completed(self._compilations.values()), start=1):
            yield count

    # Any: Triton has no types
    def _compile(self, *, fn: Any, compile: Any, is_manual_warmup: bool, **_: Any) -> bool:
        """Start to compile the kernel of a launch; return whether to skip the launch."""
        if is_manual_warmup:
            # One of the threads asks.
            return False
        key = f"{fn.module}.{fn.name}", compile["key"]
        if key not in self._compilations:
            self._compilations[key] = self._threads.submit(
                fn.jit_function.preload, compile["specialization_data"]
            )
        return True

    def _use_device(self) -> None:
        # Each thread has a current device of its own.
        driver.active.set_current_device(self._device)
