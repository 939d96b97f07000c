"""Experts with weights stored in mxfp4: multiplied directly, or dequantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagedray.weight_format import MXFP4_BLOCK_SIZE
from workers.layers.expert_product import (
    ExpertProduct,
    GroupedExperts,
    LinearExperts,
    StackedExperts,
)
from workers.layers.formats.mxfp4 import Mxfp4Matrix, dequantized_mxfp4

if TYPE_CHECKING:
    from pagedray.model_config import ExpertsConfig
    from workers.layers.expert_part import ExpertPart
    from workers.layers.router import Choice

__all__ = ["DequantizedExperts", "Mxfp4Experts", "make_expert_product", "product_class"]


class Mxfp4Experts(StackedExperts):
    """Experts with weights in mxfp4, dequantized in registers; rows are bfloat16."""

    def _allocate(self, part: ExpertPart) -> None:
        assert part.dtype == torch.bfloat16
        self._gate_up, self._down = (
            Mxfp4Matrix.empty(len(part.experts), *shape, device=part.device)
            for shape in (part.gate_up_shape, part.down_shape)
        )

    def gate_up(self, expert: int) -> Mxfp4Matrix:
        return self._gate_up[expert]

    def down(self, expert: int) -> Mxfp4Matrix:
        return self._down[expert]

    def finalize(self) -> None:
        # The kernels read the scales of a block of inputs, for adjacent outputs.
        gate_up_scales, down_scales = (
            matrix.scales.view(torch.uint8).transpose(1, 2).contiguous()
            for matrix in (self._gate_up, self._down)
        )
        self._store(
            _packed(self._gate_up),
            _packed(self._down),
            gate_up_scales=gate_up_scales,
            down_scales=down_scales,
        )
        # Free the tensors that the kernels do not read.
        self._gate_up = self._down = Mxfp4Matrix.empty(0, 0, device=self._gate_up.blocks.device)


class DequantizedExperts(ExpertProduct):
    """Experts with weights in mxfp4 that are dequantized when they are loaded."""

    def __init__(self, part: ExpertPart) -> None:
        self._plain = _plain_class(part.device)(part)
        self._gate_up, self._down = (
            [Mxfp4Matrix.empty(*shape, device=part.device) for _ in part.experts]
            for shape in (part.gate_up_shape, part.down_shape)
        )

    def gate_up(self, expert: int) -> Mxfp4Matrix:
        return self._gate_up[expert]

    def gate_up_bias(self, expert: int) -> torch.Tensor | None:
        return self._plain.gate_up_bias(expert)

    def down(self, expert: int) -> Mxfp4Matrix:
        return self._down[expert]

    def down_bias(self, expert: int) -> torch.Tensor | None:
        return self._plain.down_bias(expert)

    def __call__(self, x: torch.Tensor, choice: Choice) -> torch.Tensor:
        return self._plain(x, choice)

    @property
    def num_bytes(self) -> int:
        return self._plain.num_bytes

    def finalize(self) -> None:
        for expert in reversed(range(len(self._gate_up))):
            for target, stored in (
                (self._plain.gate_up(expert), self._gate_up.pop()),
                (self._plain.down(expert), self._down.pop()),
            ):
                target.copy_(dequantized_mxfp4(stored, target.dtype))
        self._plain.finalize()


def make_expert_product(part: ExpertPart) -> ExpertProduct:
    """Return the product for the stored weights, the dtype of rows and the device."""
    return product_class(part.config, dtype=part.dtype, device=part.device)(part)


def product_class(
    config: ExpertsConfig, *, dtype: torch.dtype, device: torch.device
) -> type[GroupedExperts | LinearExperts | Mxfp4Experts | DequantizedExperts]:
    """Return the class of the product for the stored weights, the dtype of rows and the device."""
    if not config.is_mxfp4:
        return _plain_class(device)
    # CPUs, and products in other dtypes, have no kernel for it.
    is_multiplied = device.type == "cuda" and dtype == torch.bfloat16
    return Mxfp4Experts if is_multiplied else DequantizedExperts


def _packed(matrix: Mxfp4Matrix) -> torch.Tensor:
    """Return the numbers of all experts as the kernels read them, in place if they fit."""
    # Triton is absent on machines without a GPU.
    from attention.kernels.triton.experts import mxfp4_row_bytes, packed_mxfp4

    blocks = matrix.blocks
    num_experts, out_size, num_blocks, _ = blocks.shape
    packed = blocks.flatten(2)
    if num_blocks % 2:
        row_bytes = mxfp4_row_bytes(num_blocks * MXFP4_BLOCK_SIZE)
        packed = blocks.new_empty(num_experts, out_size, row_bytes)
    for expert in range(num_experts):
        packed[expert].copy_(packed_mxfp4(blocks[expert]))
    return packed


def _plain_class(device: torch.device) -> type[GroupedExperts | LinearExperts]:
    return GroupedExperts if device.type == "cuda" else LinearExperts
