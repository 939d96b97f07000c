"""Which launches use a kernel that was compiled for an earlier one."""

from __future__ import annotations

import torch

from attention.kernels.triton.kernel_launcher import KernelLauncher


class Kernel:
    """A kernel whose launches are kept, with what they were compiled for, if they were."""

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []
        self.num_compiled = 0

    def __getitem__(self, grid: tuple[int, int, int]) -> object:
        def compile_and_launch(*arguments: object, **options: int) -> object:
            self.num_compiled += 1
            self.launches.append((grid, *arguments))
            return Compiled(self)

        return compile_and_launch


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, int, int]) -> object:
        return lambda *arguments: self._kernel.launches.append((grid, *arguments))


def test_each_kind_of_arguments_is_compiled_once() -> None:
    kernel = Kernel()
    launcher = KernelLauncher(kernel)
    numbers = torch.zeros(64)
    aligned, other, unaligned = numbers[:8], numbers[32:40], numbers[1:9]
    cases = [
        ((aligned, other), (8, 0.5, True), 4, 1),
        # Other tensors of the same kind, on another grid.
        ((other, aligned), (8, 0.5, True), 4, 1),
        ((unaligned, other), (8, 0.5, True), 4, 2),
        ((aligned, unaligned), (8, 0.5, True), 4, 3),
        ((aligned.int(), other), (8, 0.5, True), 4, 4),
        ((aligned, other), (9, 0.5, True), 4, 5),
        ((aligned, other), (8, 0.25, True), 4, 6),
        ((aligned, other), (8, 0.5, False), 4, 7),
        ((aligned, other), (8, 0.5, True), 8, 8),
        ((unaligned, aligned), (8, 0.5, True), 4, 8),
    ]
    for row, (tensors, arguments, num_warps, num_compiled) in enumerate(cases):
        launcher.launch((row + 1, 1, 1), tensors, arguments, num_warps=num_warps)
        assert kernel.num_compiled == num_compiled
        grid, *launched = kernel.launches[-1]
        assert grid == (row + 1, 1, 1)
        assert all(one is two for one, two in zip(launched[:2], tensors, strict=True))
        assert tuple(launched[2:]) == arguments
    assert len(kernel.launches) == len(cases)


def test_rows_are_compiled_for_one_for_multiples_of_16_and_for_others() -> None:
    kernel = Kernel()
    launcher = KernelLauncher(kernel)
    tensor = torch.zeros(8)
    cases = [(1, 1), (16, 2), (1600, 2), (2, 3), (15, 3), (1601, 3), (1, 3)]
    for num_rows, num_compiled in cases:
        launcher.launch((1, 1, 1), (tensor,), (0.5,), num_rows=num_rows, num_warps=4)
        assert kernel.num_compiled == num_compiled
        assert kernel.launches[-1] == ((1, 1, 1), tensor, num_rows, 0.5)
