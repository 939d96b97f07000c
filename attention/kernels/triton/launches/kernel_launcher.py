"""Launches a kernel without having Triton examine its arguments each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attention.kernels.triton.launches.repeated_launch import POINTER_ALIGNMENT

if TYPE_CHECKING:
    import torch

__all__ = ["KernelLauncher"]

_DIVISOR = 16
"""Triton compiles separate kernels for multiples of this number, and for 1."""


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
        *,
        num_rows: int | None = None,
        **options: int,
    ) -> None:
        """Launch the kernel, always with the same names of `options`, which are Triton's options.

        `arguments` are all arguments behind the tensors, by position. Each combination of their
        values is cached, so no argument may change from step to step. A changing number may be
        `num_rows`, which comes before the arguments if given: at most two kernels are cached for
        it, and another for a single row.
        """
        kinds = [(tensor.dtype, tensor.data_ptr() % POINTER_ALIGNMENT == 0) for tensor in tensors]
        rows = () if num_rows is None else (num_rows,)
        kind = [(number == 1, number % _DIVISOR == 0) for number in rows]
        key = (tensors[0].device, *kinds, *kind, *arguments, *options.values())
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *rows, *arguments)
            return
        compiled = self._kernel[grid](*tensors, *rows, *arguments, **options)
        # The interpreter compiles nothing.
        if compiled is not None:
            self._compiled[key] = compiled
