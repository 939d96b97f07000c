"""Repeats the launch of a kernel with other tensors, which takes less time than the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["POINTER_ALIGNMENT", "RepeatedLaunch"]

POINTER_ALIGNMENT = 16
"""In bytes. Triton compiles kernels separately for pointers that are multiples of it."""


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
