"""Unpacks numbers of four bits from the int32 of each format.

GPTQ: E. Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2023. AWQ: J. Lin et al., "AWQ: Activation-aware Weight Quantization for LLM
Compression and Acceleration", 2024.
"""

from __future__ import annotations

import torch

__all__ = ["PER_WORD", "unpacked"]

PER_WORD = 8
"""Numbers in an int32."""
_IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
# Where AWQ's kernels find number 0, 1, 2, ... of a word.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def unpacked(words: torch.Tensor, dim: int, *, is_awq: bool = False) -> torch.Tensor:
    """Return the uint8 numbers in an int32 matrix, whose `dim` becomes eight times as long."""
    places = _AWQ_PLACES if is_awq else _IN_ORDER
    shifts = torch.tensor([4 * place for place in places], dtype=torch.int32, device=words.device)
    shape = [1, 1, 1]
    shape[dim + 1] = PER_WORD
    numbers = words.unsqueeze(dim + 1).bitwise_right_shift(shifts.view(shape)).bitwise_and_(15)
    return numbers.to(torch.uint8).flatten(dim, dim + 1)
