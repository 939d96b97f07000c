"""Launches a kernel without having Triton examine its arguments each time."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from functools import cache
from hashlib import sha256
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any, Self

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import attention.kernels.triton

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "KernelLauncher",
    "ParallelCompilation",
    "RepeatedLaunch",
    "can_depend",
    "dependent_launch",
    "fix_kernel_keys",
    "launch_options",
    "start_next_kernel",
    "wait_for_inputs",
]

_DIVISOR = 16
"""Triton compiles separate kernels for multiples of this number, and for 1."""
POINTER_ALIGNMENT = 16
"""In bytes. Triton compiles kernels separately for pointers that are multiples of it."""
_HOPPER = (9, 0)


class KernelLauncher:
    """Launches one kernel, with a cache of compiled kernels by arguments.

    At each launch, Triton examines all arguments to find the kernel that was compiled for them,
    which takes the host longer than the launch itself. If only the tensors change from one launch
    to the next, `RepeatedLaunch` is faster still.
    """

    def __init__(self, kernel: Any) -> None:  # Any: Triton has no types
        """The tensors are the first parameters of the kernel."""
        self._kernel = kernel
        self._compiled: dict[tuple[object, ...], Any] = {}  # Any: as above

    def launch(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[torch.Tensor, ...],
        arguments: tuple[object, ...],
        numbers: tuple[int, ...] = (),
        /,
        **options: int,
    ) -> None:
        """Launch the kernel, always with the same names of `options`, which are Triton's options.

        `arguments` are all arguments behind the tensors, by position. Each combination of their
        values is cached, so no argument may change from step to step. `numbers`, such as numbers of
        rows, come before the arguments and may change: at most two kernels are cached for each
        number, and another for 1.
        """
        kinds = [(tensor.dtype, tensor.data_ptr() % POINTER_ALIGNMENT == 0) for tensor in tensors]
        kind = [(number == 1, number % _DIVISOR == 0) for number in numbers]
        key = (tensors[0].device, *kinds, *kind, *arguments, *options.values())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *arguments)
            return
        compiled = self._kernel[grid](*tensors, *numbers, *arguments, **options)
        # The interpreter compiles nothing.
        if compiled is not None:
            self._compiled[key] = compiled


def fix_kernel_keys() -> str:
    """Import every kernel and compute its key, in an order that does not depend on their use.

    In Triton before 3.9, the key of a kernel depends on which of the functions that it calls were
    part of a key before. A replacement rank runs kernels in another order than a rank that starts,
    and would compile them again: 10 s for the sampling kernels.

    Returns a digest of all keys: kernels with the same digest are compiled to the same code.
    """
    digest = sha256()
    package = attention.kernels.triton
    names = sorted(one.name for one in walk_packages(package.__path__, f"{package.__name__}."))
    for name in names:
        for value in vars(import_module(name)).values():
            # Under the interpreter, functions are of another type.
            if isinstance(value, JITFunction):
                digest.update(value.cache_key.encode())
    return digest.hexdigest()


class RepeatedLaunch:
    """A launch that is repeated for tensors of the same layout.

    At each launch, Triton examines all arguments to find the kernel that was compiled for them.
    This class lets it do so for the first launch only, and launches the same kernel again.
    """

    def __init__(
        self,
        kernel: Any,  # Any: Triton has no types
        grid: tuple[int, int, int],
        arguments: tuple[object, ...],
        **options: int,
    ) -> None:
        """`arguments` are all arguments behind the tensors, by position; `options` are Triton's."""
        self._kernel = kernel
        self._grid = grid
        self._arguments = arguments
        self._options = options
        self._compiled: Callable[..., None] | None = None

    def launch(self, *tensors: torch.Tensor) -> None:
        """Launch the kernel; each tensor has the dtype that it had in the first launch."""
        is_aligned = True
        for tensor in tensors:
            if tensor.data_ptr() % POINTER_ALIGNMENT:
                is_aligned = False
        if self._compiled is not None and is_aligned:
            self._compiled(*tensors, *self._arguments)
            return
        kernel = self._kernel[self._grid](*tensors, *self._arguments, **self._options)
        # The interpreter compiles nothing.
        if is_aligned and kernel is not None:
            self._compiled = kernel[self._grid]


@triton.jit
def wait_for_inputs(is_dependent: tl.constexpr, starts_next: tl.constexpr = True) -> None:
    """Wait for all preceding kernels; with `starts_next`, let the next kernel start first.

    A program must call this before it writes anything, and before it reads anything other than
    weights, data that was uploaded before the step, and states that only earlier steps wrote. At
    least one program of each kernel must call this. A kernel then never ends before the preceding
    kernel, so waiting for one kernel means waiting for all, even though the next kernel starts
    before this kernel has waited. The next kernel starts when all programs of this kernel are
    running, so it takes no resources from them.
    """
    if is_dependent:
        if starts_next:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def start_next_kernel(is_dependent: tl.constexpr) -> None:
    """Let the next kernel start, after `wait_for_inputs` with `starts_next` false.

    The next kernel loads its first weights at once, which would delay earlier loads of this kernel.
    """
    if is_dependent:
        gdc_launch_dependents()


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Return arguments of a launch on a device, for a kernel that calls `wait_for_inputs`."""
    return {"is_dependent": can_depend(device), **launch_options(device)}


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the options of Triton among these arguments."""
    # The interpreter, which runs kernels on the CPU, does not know the option.
    return {"launch_pdl": True} if can_depend(device) else {}


@cache
def can_depend(device: torch.device) -> bool:
    """Return whether kernels of a device can overlap."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _HOPPER


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

    def __exit__(self, *_: object) -> None:
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
